"""How many workers a pool should have, said to Serve. Runs inside Serve's controller, once per pool and decision.

`follow_advice` passes on what the global scheduler advises (`cluster.autoscaling.sizing`), which each worker hears on
its connection to it and reports as "wanted". `LoadPolicy` divides what workers report as "load" by what one should
carry; smoothing over time (look-back, delays) is Serve's then.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.config.autoscaling import AutoscalingSettings

_REPORTED_OVER_S = 5.0  # Serve takes five samples in this time


class LoadPolicy:
    """Serve autoscaling policy: `ceil(total load / target_per_replica)` within the configured bounds.

    Workers that are away in another role come on top: Serve would take them for idle.
    """

    def __init__(self, target_per_replica: float) -> None:
        self._target_per_replica = target_per_replica

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = ctx.aggregated_metrics or {}
        at_home = math.ceil(sum(metrics.get("load", {}).values()) / self._target_per_replica)
        return _bounded(ctx, at_home + round(sum(metrics.get("away", {}).values()))), {}


def follow_advice(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve autoscaling policy: the newest advice that any worker of the pool reports; without any, no change."""
    reports = [series[-1] for series in (ctx.raw_metrics or {}).get("wanted", {}).values() if series]
    if not reports:
        return int(ctx.target_num_replicas), {}
    newest = max(reports, key=lambda report: report.timestamp)
    return _bounded(ctx, round(newest.value)), {}


def _bounded(ctx: AutoscalingContext, wanted: int) -> int:
    fewest, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
    return int(min(max(wanted, fewest), most))


def autoscaling_config(scaling: AutoscalingSettings, replicas: int) -> dict[str, Any]:
    """For Serve. Advice is followed at once: who gives it has waited already where waiting is due."""
    advised = scaling.policy == "slo"
    policy: dict[str, Any] = (
        {"policy_function": f"{__name__}:{follow_advice.__name__}"}
        if advised
        else {
            "policy_function": f"{__name__}:{LoadPolicy.__name__}",
            "policy_kwargs": {"target_per_replica": scaling.target_per_replica},
        }
    )
    return {
        "min_replicas": scaling.min_replicas,
        "initial_replicas": replicas,
        "max_replicas": scaling.max_replicas,
        "look_back_period_s": _REPORTED_OVER_S if advised else scaling.look_back_s,
        "upscale_delay_s": 0.0 if advised else scaling.upscale_delay_s,
        "downscale_delay_s": 0.0 if advised else scaling.downscale_delay_s,
        "policy": policy,
    }
