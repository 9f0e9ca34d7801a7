"""What outlives a gateway: files that clients sent, their batches, and what was answered of them."""
