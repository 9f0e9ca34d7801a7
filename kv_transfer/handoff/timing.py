"""When a hand-off did what, as its sending end saw it: how much of it was hidden behind compute, how much was not.

Stamps are seconds of `time.monotonic` in the prefill process. Knows nothing of links or tensors, decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.sequence import SequenceKey


@dataclass(slots=True, kw_only=True)
class HandoffTimeline:
    """One hand-off that decode verified. A stamp is 0 until it happened."""

    request_id: str
    attempt: int
    num_tokens: int
    begun_s: float  # the ticket was there
    computed_s: float = 0.0  # the first token was sampled: from here on nothing is hidden
    sent_s: float = 0.0  # the link had taken the last slab
    verified_s: float = 0.0  # decode's answer was here
    num_bytes: int = 0
    num_slabs: int = 0
    num_hidden_bytes: int = 0  # sent before `computed_s`

    @property
    def key(self) -> SequenceKey:
        return self.request_id, self.attempt

    @property
    def prefill_s(self) -> float:
        return self.computed_s - self.begun_s

    @property
    def exposed_s(self) -> float:
        """From the first token until decode may schedule the sequence, the way of decode's answer included."""
        return self.verified_s - self.computed_s


def ignore_timeline(timeline: HandoffTimeline) -> None:
    """For those who do not want to know."""


class Timelines:
    """The timelines of one sender's hand-offs. Calls `on_verified` once for each that decode verified."""

    def __init__(self, on_verified: Callable[[HandoffTimeline], None]) -> None:
        self._on_verified = on_verified
        self._open: dict[SequenceKey, HandoffTimeline] = {}

    def begin(self, key: SequenceKey, num_tokens: int, now: float) -> None:
        self._open[key] = HandoffTimeline(request_id=key[0], attempt=key[1], num_tokens=num_tokens, begun_s=now)

    def slab_sent(self, key: SequenceKey, num_bytes: int, now: float) -> None:
        timeline = self._open.get(key)
        if timeline is not None:
            timeline.sent_s = now
            timeline.num_slabs += 1
            timeline.num_bytes += num_bytes
            timeline.num_hidden_bytes += num_bytes if timeline.computed_s == 0.0 else 0

    def computed(self, key: SequenceKey, now: float) -> None:
        timeline = self._open.get(key)
        if timeline is not None:
            timeline.computed_s = now

    def verified(self, key: SequenceKey, now: float) -> None:
        """Decode's word that the bytes are there; a repetition finds nothing."""
        timeline = self._open.pop(key, None)
        if timeline is not None:
            timeline.verified_s = now
            self._on_verified(timeline)

    def end(self, key: SequenceKey) -> None:
        """The hand-off is over, whatever became of it."""
        self._open.pop(key, None)
