"""GGUF files as checkpoints: their blocks, their tokenizer, and where they are kept."""
