"""Moving KV blocks between processes: hand-off protocol, wire format, transports. Knows no Ray, no HTTP, no policy."""
