"""KV between processes that use one GPU, by memory of it that both map."""
