"""LayerKV on one worker: layers that rest in host memory, staged to the device within a step."""
