"""Where the next request goes: predicted, then decided. Pure classes, the same in the cluster and in the simulator."""
