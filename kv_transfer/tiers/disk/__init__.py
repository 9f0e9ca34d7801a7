"""Disk as a tier: columns of KV in files, kept across restarts within a budget."""
