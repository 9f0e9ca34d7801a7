"""The global scheduler: what workers report and gateways ask, and who holds which prefix."""
