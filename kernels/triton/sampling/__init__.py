"""From logits to tokens on a GPU, without a wait for the host."""
