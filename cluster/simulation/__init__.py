"""The cluster on a virtual clock: the real schedulers and block pools, and a cost model for the time of each step."""
