"""What prefill and decode workers have in common: their place in the cluster and what they tell of themselves."""
