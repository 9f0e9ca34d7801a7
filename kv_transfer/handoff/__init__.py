"""A KV block's way from prefill to decode: the two state machines, what drives them, and the copies."""
