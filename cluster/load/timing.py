"""What a client sees of one request: when its tokens came, and what follows from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cluster.slo.classes import SloClass
from cluster.slo.countings import MeasuredRequest
from cluster.slo.report import gap_p99

Json = dict[str, object]

MS: Final = 1e-3


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    """What a client saw of one request, in seconds on one clock: when it was sent, when its first and its last token
    came, and how many came in all. `arrivals_s`: when each piece of the answer came, where that was seen."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int
    arrivals_s: list[float] = field(default_factory=list)
    answer_id: str = ""
    num_cached_tokens: int = 0  # of the prompt, as the answer says

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first, of which there must be one."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """The times between the pieces of the answer; a single piece has none."""
        gaps: list[float] = np.diff(self.arrivals_s).tolist()
        return gaps

    @property
    def gap_p99_s(self) -> float | None:
        """The longest gap but for one in a hundred, by which a promise about gaps is judged.
        None: there are no gaps."""
        return gap_p99(np.array(self.gaps_s))

    def measured(self, promise: SloClass, num_prompt_tokens: int = 0) -> MeasuredRequest:
        """What is judged by the promise, and counted."""
        return MeasuredRequest(
            slo=promise,
            prompt_tokens=num_prompt_tokens,
            output_tokens=self.num_tokens,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s if self.num_tokens > 1 else None,
            gap_p99_s=self.gap_p99_s,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank); 0 < share <= 1."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def rounded(value: float) -> float:
    """The value with four significant digits: more would be noise."""
    return float(f"{value:.4g}")
