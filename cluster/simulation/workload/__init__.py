"""Requests to simulate: read from traces, or drawn."""
