"""One model over a group of processes, each with its own device: tensor parallelism within a node."""
