"""How well, and how fast, requests are placed."""
