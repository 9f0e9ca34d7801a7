"""What prefill and decode workers have in common: their life, their place in the cluster, and what they report."""
