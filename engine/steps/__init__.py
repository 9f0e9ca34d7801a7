"""A worker's steps: the loop that plans, computes and takes in, and the runner that it drives."""
