"""Ways for KV bytes to get from one process to another, behind the protocol in `base`."""
