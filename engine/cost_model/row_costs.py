"""What drafts add to the time of a step: little while the weights are what it waits for, much where products are.

Learnt from the steps that had drafts, by how many rows these had: `StepCosts` tells it, and
`engine.drafting.speculation` asks how many drafts are worth their time.
"""

from __future__ import annotations

from typing import Final

_RATE: Final = 0.1  # weight of the newest step, once there were as many
_MOST: Final = 4.0  # times what a prompt's token costs: a step that took longer was held up by something else
_FORGOTTEN: Final = 0.999  # of what a size is held to cost, after each step of another size: it is tried again
_SIZES: Final = 12  # by doubling: up to 2,048 rows and more


class RowCosts:
    """Seconds that each draft adds to a step, by the step's rows: decodes and drafts together, in sizes that double."""

    def __init__(self) -> None:
        self._each_s = [0.0] * _SIZES
        self._num_steps = [0] * _SIZES

    def extra_s(self, num_decodes: float, num_drafts: float, prefill_token_s: float) -> float:
        """Seconds that so many drafts add to a step. `prefill_token_s`: what a token of a prompt costs, which is what
        is assumed at first."""
        if not num_drafts:
            return 0.0
        return num_drafts * self._known_s(_size(num_decodes + num_drafts), prefill_token_s)

    def observe(self, num_decodes: float, num_drafts: float, extra_s: float, prefill_token_s: float) -> None:
        """A step with drafts took so much more than it would have without."""
        size = _size(num_decodes + num_drafts)
        before_s = self._known_s(size, prefill_token_s)
        each_s = min(extra_s / num_drafts, _MOST * prefill_token_s)  # negative ones too: their mean is what counts
        self._num_steps[size] += 1
        weight = max(_RATE, 1 / (self._num_steps[size] + 4))
        for other, known_s in enumerate(self._each_s):
            self._each_s[other] = known_s * _FORGOTTEN
        self._each_s[size] = before_s + weight * (each_s - before_s)

    def _known_s(self, size: int, assumed_s: float) -> float:
        """A size of which nothing is known yet costs what the next smaller one does."""
        while size >= 0 and not self._num_steps[size]:
            size -= 1
        return assumed_s if size < 0 else max(self._each_s[size], 0.0)


def _size(num_rows: float) -> int:
    return min((int(num_rows) - 1).bit_length(), _SIZES - 1)
