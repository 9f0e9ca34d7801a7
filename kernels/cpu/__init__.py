"""The kernels on any CPU: torch's own operators, and what they share with the C++ ones: threads, memory, digests."""
