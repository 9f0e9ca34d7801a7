"""KV through process groups of torch.distributed: NCCL between GPUs, gloo between CPUs. Experimental."""
