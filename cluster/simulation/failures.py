"""What goes wrong in a simulation, and when: workers that die, and workers that become slow."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The worker's process ends; `back_s` later there is another one under its name, knowing nothing. None: never."""

    worker_id: str
    at_s: float
    back_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Kill:
        """`decode-1@30`, or `decode-1@30+60`: gone at second 30, for 60 s. Raises ValueError with the shape wanted."""
        worker_id, _, times = text.partition("@")
        at, plus, back = times.partition("+")
        try:
            return cls(worker_id=worker_id, at_s=_seconds(at), back_s=_seconds(back) if plus else None)
        except ValueError as error:
            raise ValueError(
                f"{text!r} is not like decode-1@30, or decode-1@30+60 for one that is back: {error}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Makes all steps of a worker take `factor` times as long from then on; 1: as before. The worker measures that."""

    worker_id: str
    at_s: float
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"{self.factor} is no factor")

    @classmethod
    def parse(cls, text: str) -> Slow:
        """`decode-1@30:2`: takes twice as long from second 30 on. Raises ValueError with the shape wanted."""
        worker_id, _, rest = text.partition("@")
        at, _, factor = rest.partition(":")
        try:
            return cls(worker_id=worker_id, at_s=_seconds(at), factor=float(factor))
        except ValueError as error:
            raise ValueError(f"{text!r} is not like decode-1@30:2, twice as slow from second 30 on: {error}") from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{text} is no second of the trace")
    return seconds
