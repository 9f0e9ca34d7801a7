"""How many workers each pool should have, and who changes its role."""
