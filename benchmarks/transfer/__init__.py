"""KV between processes."""
