"""What is measured and checked on a GPU: the steps of `python -m benchmarks.gpu.check`, each a program of its own."""
