"""KV between processes of one node, by memory that both map."""
