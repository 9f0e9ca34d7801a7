"""What is asked: a text and a file of code to copy from, and questions whose answers copy nothing."""

from __future__ import annotations

from typing import Final

from benchmarks.common.part import ROOT

TEXT: Final = ROOT / "benchmarks" / "texts" / "decisions.txt"
CODE: Final = ROOT / "engine" / "kv" / "block_pool.py"
QUESTIONS: Final = (
    "Tell me about the history of tea.",
    "Why is the sky blue?",
    "Write a story about a fox.",
    "Explain how a bicycle works.",
    "What is a good way to learn to cook?",
    "Describe the city of Lisbon.",
    "How do plants grow?",
    "Write a letter to a friend about a journey.",
)
