"""From a model's name to tensors: where its files are, how they are read, quantised and packed."""
