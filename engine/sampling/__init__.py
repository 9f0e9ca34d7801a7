"""From logits to tokens: parameters, edits, filters, draws, and when a sequence ends."""
