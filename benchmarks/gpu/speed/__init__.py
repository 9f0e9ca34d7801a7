"""How fast a GPU runs steps, copies and kernels beside what it can, and what it waits for."""
