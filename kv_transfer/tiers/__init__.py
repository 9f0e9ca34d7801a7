"""Where KV blocks rest: host memory that outlives its worker, and disk."""
