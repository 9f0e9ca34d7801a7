"""The transformer of every supported family: its configuration, its batch, one forward pass, its shards."""
