"""How many workers a pool should have, said to Serve. Runs inside Serve's controller, once per pool and decision.

`follow_advice` passes on what the global scheduler advises (`cluster.autoscaling.sizing`), which each worker hears on
its connection to it and reports as "wanted".
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.config.settings import AutoscalingSettings

_REPORTED_OVER_S = 5.0  # Serve takes five samples in this time


def follow_advice(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy for Serve: the newest advice that any worker of the pool reports; without any, no change."""
    reports = [series[-1] for series in (ctx.raw_metrics or {}).get("wanted", {}).values() if series]
    if not reports:
        return int(ctx.target_num_replicas), {}
    newest = max(reports, key=lambda report: report.timestamp)
    fewest, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
    return int(min(max(round(newest.value), fewest), most)), {}


def autoscaling_config(scaling: AutoscalingSettings, replicas: int) -> dict[str, Any]:
    """The autoscaling settings of a pool, for Serve. Advice is followed at once: the scheduler has already waited where
    waiting is due."""
    return {
        "min_replicas": scaling.min_replicas,
        "initial_replicas": replicas,
        "max_replicas": scaling.max_replicas,
        "look_back_period_s": _REPORTED_OVER_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {"policy_function": f"{__name__}:{follow_advice.__name__}"},
    }
