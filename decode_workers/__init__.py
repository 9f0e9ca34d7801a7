"""Bandwidth-bound decode: admission of handed-over sequences, continuous batching."""
