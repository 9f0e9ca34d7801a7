"""OpenAI's shapes: bodies of requests, choices, log probabilities, streamed chunks."""
