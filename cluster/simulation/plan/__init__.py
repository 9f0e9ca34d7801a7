"""The smallest cluster that serves a trace within its targets."""
