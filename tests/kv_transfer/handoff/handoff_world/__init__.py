"""A small world in which hand-offs can be made to go wrong: for the chaos test and for tests of single failures.

The state machines, the block pool and the digests are the real ones. Modelled is what stands around them: KV memory of
a few bytes per token, a network that keeps no order, the drivers of both workers, and a gateway that tries again.
"""
