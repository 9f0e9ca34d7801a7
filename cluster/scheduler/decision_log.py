"""What the scheduler decided lately, and from which candidates: for operators to read, as JSON or as a table.

The `GlobalScheduler` adds each. Times are on the scheduler's clock; whoever reads says what that is.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cluster.scheduler.placement.admission import Verdict
from kv_transfer.messages.scheduling import Place


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """`request`: as it was asked. The verdict's own query may have lost its targets: see `is_unattainable`."""

    request: Place
    verdict: Verdict
    reason: str

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_unattainable(self) -> bool:
        """Whether it would be late on an idle cluster, too, or is an embedding's that would be late now, so that it was
        served like one without targets."""
        return self.request.has_targets and not self.verdict.decision.query.has_targets

    def as_json(self, clock_offset_s: float) -> str:
        """One line. `clock_offset_s`: from the scheduler's clock to Unix time."""
        request, verdict, now = self.request, self.verdict, self.verdict.decision.now
        found = {
            "time": round(now + clock_offset_s, 6),
            "request_id": request.request_id,
            "attempt": request.attempt,
            "model": request.model,
            "tenant": request.tenant,
            "slo_class": request.slo_class,
            "num_tokens": request.num_tokens,
            "max_new_tokens": request.max_new_tokens,
            "ttft_s": request.ttft_s,
            "tpot_s": request.tpot_s,
            "gap_s": request.gap_s,
            "waited_s": request.waited_s,
            "outcome": verdict.outcome.name.lower(),
            "reason": self.reason,
            "unattainable": self.is_unattainable,
            "retry_after_s": verdict.retry_after_s,
            "look_again_s": None if verdict.until is None else verdict.until - now,
            "candidates": [row._asdict() for row in verdict.decision.rows],
        }
        return json.dumps(_finite(found))

    def __str__(self) -> str:
        note = " (unattainable: its targets do not count)" if self.is_unattainable else ""
        return f"{self.verdict}\n{self.reason}{note}"


class DecisionLog:
    """The newest `size`. `on_added` hears of each, such as to write it down."""

    def __init__(self, size: int, on_added: Callable[[LoggedDecision], None] = lambda decision: None) -> None:
        self._decisions: deque[LoggedDecision] = deque(maxlen=size)
        self._on_added = on_added

    def add(self, request: Place, verdict: Verdict, reason: str) -> None:
        decision = LoggedDecision(request, verdict, reason)
        self._decisions.append(decision)
        self._on_added(decision)

    def newest(self, limit: int) -> list[LoggedDecision]:
        """Newest first."""
        return list(islice(reversed(self._decisions), limit))


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
