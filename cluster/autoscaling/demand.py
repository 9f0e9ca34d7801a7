"""How much of a pool's time requests take: each one's work in worker-seconds, and how fast such work comes in.

Demand is counted where it arrives, not where it is served: a pool that is too small, and turns clients away or keeps
them waiting, must not look as if less was asked of it. Knows costs and times; nothing of workers, sizes or targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cluster.slo.sliding_window import SlidingWindow
from engine.cost_model.step_cost import StepCost, StepWork

_NUM_PARTS: Final = 12
_FASTEST_GROWTH: Final = 2.0  # more is not believed of a trend, however steep
_SURE: Final = 2.0  # standard errors by which a rise must show before it counts as a trend


def prefill_work_s(cost: StepCost, uncached_tokens: float, cached_tokens: float, chunk_tokens: float) -> float:
    """Of a busy worker's time: it fills its steps, so that short prompts share what every step costs."""
    work = cost.step_s(StepWork.of_prefill(uncached_tokens, cached_tokens)) - cost.base_s
    return work + cost.base_s * min(1.0, uncached_tokens / chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRoom:
    """What bounds the sequences that a decode worker takes at once, beside their target."""

    kv_tokens: float
    max_num_seqs: float = math.inf


def largest_batch(cost: StepCost, room: DecodeRoom, context_tokens: float, tpot_s: float) -> float:
    """Of sequences alike: as many as memory and limits allow, and whose step is in time (inf: any time is)."""
    each_s = cost.decode_s + cost.context_token_s * context_tokens
    in_time = (tpot_s - cost.base_s) / each_s if each_s > 0.0 else math.inf
    return max(1.0, min(in_time, room.kv_tokens / context_tokens, room.max_num_seqs))


def decode_work_s(
    cost: StepCost, room: DecodeRoom, num_tokens: float, num_output: float, tpot_s: float = math.inf
) -> float:
    """Of a worker's time, with as many beside it as may be: `num_output` tokens behind a prompt of `num_tokens`."""
    context = num_tokens + num_output / 2
    batch = largest_batch(cost, room, context, tpot_s)
    return num_output * (cost.base_s / batch + cost.decode_s + cost.context_token_s * context)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandWindows:
    """The short one shows what is new, the long one what is usual."""

    short_s: float = 30.0
    long_s: float = 180.0

    def __post_init__(self) -> None:
        assert 0 < self.short_s < self.long_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Worker-seconds per second, that is workers kept busy. `error`: the standard error of `short`."""

    short: float
    long: float
    error: float
    predicted: float


@dataclass(slots=True)
class _Part:
    work: float = 0.0
    squares: float = 0.0


class WorkRate:
    """Work as it arrives, as a compound Poisson process: its sum tells the rate, the sum of squares how sure it is."""

    def __init__(self, start_s: float, windows: DemandWindows | None = None) -> None:
        windows = windows or DemandWindows()
        self._short, self._long = (
            SlidingWindow[_Part](window_s=window_s, num_parts=_NUM_PARTS, start_s=start_s, make=_Part)
            for window_s in (windows.short_s, windows.long_s)
        )

    def add(self, now: float, work_s: float) -> None:
        for window in (self._short, self._long):
            part = window.current(now)
            part.work += work_s
            part.squares += work_s * work_s

    def forecast(self, now: float, lead_s: float) -> Forecast:
        """The demand in `lead_s`: the usual one, or the new one where it is surely higher, and on as it rises."""
        short_s = max(self._short.covered_s(now), self._short.window_s / 2)  # in the first moments, nothing is sure
        long_s = max(self._long.covered_s(now), short_s)
        recent = self._short.parts(now)
        short = sum(part.work for part in recent) / short_s
        error = math.sqrt(sum(part.squares for part in recent)) / short_s
        long = sum(part.work for part in self._long.parts(now)) / long_s
        level = max(long, short - error)
        return Forecast(
            short=short, long=long, error=error, predicted=level + _rise(short - long, error, short_s, long_s, lead_s)
        )


def _rise(difference: float, error: float, short_s: float, long_s: float, lead_s: float) -> float:
    """From the middle of the short window on, if the demand grows as steadily as from the middle of the long one.

    A mean over a window tells of the window's middle.
    """
    between_s = (long_s - short_s) / 2
    sure = difference - _SURE * error
    if sure <= 0.0 or between_s < short_s / 2:
        return 0.0
    return min(sure / between_s * (short_s / 2 + lead_s), (_FASTEST_GROWTH - 1.0) * difference)
