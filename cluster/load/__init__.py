"""Load over real HTTP, and what a client sees of it: for `legato bench`, and for the benchmarks."""
