"""How long a step takes: a linear model, fitted online, with its noise."""
