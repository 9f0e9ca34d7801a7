"""The engines that are compared: how each is installed, started and asked."""
