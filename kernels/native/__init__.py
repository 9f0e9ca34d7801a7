"""The kernels in C++ for CPUs that have AVX2, or AVX-512 with bfloat16: compiled once for a machine, then called
through ctypes."""
