"""Devices, their queues of work, and memory of devices and of the host."""
