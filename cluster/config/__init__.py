"""The configuration: its settings, how it is loaded and checked, and what the parts are built from."""
