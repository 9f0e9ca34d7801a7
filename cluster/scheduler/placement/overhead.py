"""What a first token takes beside its prompt's computation: messages, reservation, gateway. Learned from them."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

_RECENT: Final = 32
_ENOUGH: Final = 4


class Overhead:
    """Seconds from a placement to its first token, beyond what was predicted for its prompt: the median of lately.

    Only of prompts that nobody was ahead of and nobody came after: else it would learn how far predicted queues are
    off, and what it costs to share a step.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._recent.append(seconds)
        if len(self._recent) >= _ENOUGH:
            self.seconds = max(0.0, median(self._recent))
