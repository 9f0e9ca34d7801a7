"""What requests ask of those who compute prompts, smoothed: how long they take, and how soon they are wanted.

By this admission tells a long prompt from a short one, and a long queue from a short one, whatever model and device.
"""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.01  # about the last hundred requests


class PromptDemand:
    """`prompt_s`: of the prompts asked for, without what is cached; `ttft_s`: their targets. 0 before the first."""

    def __init__(self) -> None:
        self.prompt_s = 0.0
        self.ttft_s = 0.0
        self._num_seen = 0

    def observe(self, prompt_s: float, ttft_s: float) -> None:
        """Of a request with a TTFT target, when it comes."""
        self._num_seen += 1
        weight = max(_SMOOTHING, 1.0 / self._num_seen)
        self.prompt_s += weight * (prompt_s - self.prompt_s)
        self.ttft_s += weight * (ttft_s - self.ttft_s)
