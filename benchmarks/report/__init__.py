"""Stored reports as pages for people."""
