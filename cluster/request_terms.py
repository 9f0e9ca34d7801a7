"""On what terms the cluster serves a request: what it was promised, for whom, and since when its client waits.

Goes with the request from the HTTP side to the orchestrator. Knows nothing of HTTP, placement or tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from cluster.slo import RequestSlo

NO_TARGETS: Final = RequestSlo(slo_class="default", ttft_s=None, tpot_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """`tenant`: who shares with others under overload; "" is one tenant, too. `arrived_at`: when the request reached
    its gateway, in seconds of that process's `time.monotonic()`."""

    slo: RequestSlo = NO_TARGETS
    tenant: str = ""
    arrived_at: float = field(default_factory=time.monotonic)
