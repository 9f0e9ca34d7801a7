"""The kernels in C++ for CPUs that have AVX-512 with bfloat16: compiled once for a machine, then called through
ctypes."""
