"""Prometheus metrics of requests, workers and promises."""
