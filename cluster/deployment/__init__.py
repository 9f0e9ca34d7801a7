"""Legato on Ray: what is started, where, with which of Ray's settings, and what whoever starts it is told."""
