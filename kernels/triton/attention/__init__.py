"""Paged attention on a GPU: lists of work made on the host, and the kernels that do it."""
