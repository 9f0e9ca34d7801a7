"""On what terms the cluster serves a request: what it was promised, for whom, and since when its client waits.

Goes with the request from the HTTP side to the orchestrator. Knows nothing of HTTP, placement or tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from cluster.slo.classes import NO_TARGETS, RequestSlo

_NO_PROMISE: Final = NO_TARGETS.choose(None, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """`tenant`: who shares with others under overload; "" is one tenant, too. `arrived_at`: when the request reached
    its gateway, in seconds of that process's `time.monotonic()`."""

    slo: RequestSlo = _NO_PROMISE
    tenant: str = ""
    arrived_at: float = field(default_factory=time.monotonic)
