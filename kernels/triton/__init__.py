"""The kernels on an NVIDIA GPU, in Triton."""
