"""Compute-bound prefill: chunks under a token budget, KV streamed out layer by layer."""
