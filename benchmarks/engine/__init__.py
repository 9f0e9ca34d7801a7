"""One model in one process."""
