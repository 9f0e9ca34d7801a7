"""The HTTP side of a gateway: OpenAI's API over a `Generator`."""
