"""Authenticated streams of messages between processes, and the event loops that they live on."""
