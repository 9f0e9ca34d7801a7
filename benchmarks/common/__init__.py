"""What benchmarks share: workloads, clients, processes, gates, medians."""
