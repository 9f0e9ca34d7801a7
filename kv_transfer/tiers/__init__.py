"""Where KV blocks rest: host memory that outlives its worker, and disk. Knows nothing of requests or of scheduling."""
