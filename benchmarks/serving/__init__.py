"""A cluster or a gateway over HTTP."""
