"""How many workers a pool should have, said to Serve.

`follow_advice` passes on what the global scheduler advises (`cluster.autoscaling.sizing`), which each worker hears on
its connection to it and reports as "wanted". It runs inside Serve's controller, once per pool and decision.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.config import AutoscalingContext

from cluster.config.settings import AutoscalingSettings

logger = logging.getLogger(__name__)

_ANSWERS_S = 30.0
# By default workers report every ten seconds. Of the variable that is to take the place of this option one day Serve
# (2.60) heeds nothing.
_REPORTED_EVERY_S = 1.0
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
    waiting is due. `replicas`: how many there are at first, also where the pool is deployed anew: Serve stops at once
    all beyond that."""
    return {
        "min_replicas": scaling.min_replicas,
        "initial_replicas": replicas,
        "max_replicas": scaling.max_replicas,
        "metrics_interval_s": _REPORTED_EVERY_S,
        "look_back_period_s": _REPORTED_OVER_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {"policy_function": f"{__name__}:{follow_advice.__name__}"},
    }


def present_sizes(args: Mapping[str, Any]) -> dict[str, int]:
    """How many replicas run now of each deployment of the application that Serve builds with these `args`, by the
    deployment's name, with those that start or are about to stop. Call it where the application is built."""
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace=SERVE_NAMESPACE)
        configs = ray.get(controller.get_app_configs.remote(), timeout=_ANSWERS_S)
    except ValueError:  # there is no Serve yet
        return {}
    except ray.exceptions.RayError as error:
        logger.warning("Serve does not say what it builds, so pools that scale begin with `replicas`: %s", error)
        return {}
    name = next((name for name, config in configs.items() if config.args == args), None)
    # While it builds an application, Serve itself says of none of its deployments how large it is.
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [ReplicaID.from_full_id_str(actor).deployment_id for actor in actors if ReplicaID.is_full_id_str(actor)]
    return dict(Counter(found.name for found in replicas if found.app_name == name))
