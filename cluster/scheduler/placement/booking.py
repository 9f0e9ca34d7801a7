"""One placed request, as the ledger keeps it, and how long such prompts take one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.scheduler.placement.query import Query


@dataclass(slots=True)
class Booking:
    """`computing`: the worker of the prompt; `prefill_s`: predicted, for `uncached_tokens`; `computed_at`: its end."""

    query: Query
    computing: str
    decode: str
    uncached_tokens: float
    prefill_s: float
    placed_at: float
    slot: int
    computed_at: float
    is_first: bool = False  # nobody was ahead of it there
    reported: bool = False  # the computing worker's snapshots include it by now


def seconds_of(bookings: Iterable[Booking], num_tokens: float) -> float:
    """Predicted, for the first so many uncached tokens of these prompts, one after the other."""
    seconds = 0.0
    for booking in bookings:
        if num_tokens <= 0:
            break
        seconds += booking.prefill_s * min(1.0, num_tokens / max(booking.uncached_tokens, 1.0))
        num_tokens -= booking.uncached_tokens
    return seconds
