"""The paged KV cache: its bytes, who owns which block, prefix hashes, eviction."""
