"""Bandwidth-bound decode: admission of handed-over sequences, continuous batching. Does not know prefill_workers."""
