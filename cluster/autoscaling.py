"""How many workers a pool should have: its load, divided by what one worker should carry.

Runs inside Serve's controller, once per pool and decision; each worker reports its load under the name "load".
Smoothing over time (look-back, delays) is Serve's, configured next to the target.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class LoadPolicy:
    """Serve autoscaling policy: `ceil(total load / target_per_replica)` within the configured bounds."""

    def __init__(self, target_per_replica: float) -> None:
        self._target_per_replica = target_per_replica

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        loads = (ctx.aggregated_metrics or {}).get("load", {})
        wanted = math.ceil(sum(loads.values()) / self._target_per_replica)
        return min(max(wanted, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas), {}
