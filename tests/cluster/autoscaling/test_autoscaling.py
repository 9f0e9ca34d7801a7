"""What Serve's controller is told of a pool's size, out of what its replicas report."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.app import worker_pool
from cluster.autoscaling.serve_policy import autoscaling_config, follow_advice
from cluster.config.load import load_config
from cluster.config.settings import AutoscalingSettings

POOL = DeploymentID("PrefillWorker", "legato")
SCHEDULER: Any = object()  # which pools are only bound to


def context(reports: dict[str, list[list[tuple[float, float]]]], *, target: int = 2) -> AutoscalingContext:
    """`reports`: by name, for each replica (time, value), oldest first."""
    raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {
        name: {
            ReplicaID(str(number), POOL): [TimeStampedValue(time, value) for time, value in series]
            for number, series in enumerate(replicas)
        }
        for name, replicas in reports.items()
    }
    newest = {name: {r: s[-1].value for r, s in replicas.items() if s} for name, replicas in raw.items()}
    unused: dict[str, Any] = dict.fromkeys(
        ("total_num_requests", "total_queued_requests", "last_scale_up_time", "last_scale_down_time", "config")
    )
    return AutoscalingContext(
        deployment_id=POOL,
        deployment_name=POOL.name,
        app_name="legato",
        current_num_replicas=2,
        target_num_replicas=target,
        running_replicas=[],
        aggregated_metrics=newest,
        raw_metrics=raw,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=6,
        policy_state={},
        current_time=100.0,
        **unused,
    )


def test_the_newest_advice_counts_whoever_reports_it() -> None:
    wanted = [[(90.0, 5.0), (98.0, 4.0)], [(99.0, 3.0)], []]
    assert follow_advice(context({"wanted": wanted})) == (3, {})


@pytest.mark.parametrize("reports", [{}, {"other": [[(99.0, 900.0)]]}, {"wanted": [[]]}])
def test_without_advice_a_pool_stays_as_it_is(reports: dict[str, list[list[tuple[float, float]]]]) -> None:
    assert follow_advice(context(reports, target=4)) == (4, {})


@pytest.mark.parametrize(("advice", "size"), [(0.0, 1), (9.0, 6)])
def test_advice_stays_within_the_bounds(advice: float, size: int) -> None:
    assert follow_advice(context({"wanted": [[(99.0, advice)]]})) == (size, {})


def test_serve_takes_the_settings() -> None:
    config = AutoscalingConfig(**autoscaling_config(AutoscalingSettings(max_replicas=4), replicas=2))
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 4)
    assert config.upscale_delay_s == 0.0  # advice has waited already
    decide: Any = config.policy.get_policy()
    assert decide(context({"wanted": [[(99.0, 3.0)]]})) == (3, {})
    assert config.metrics_interval_s == 1.0  # as often workers tell Serve what they were advised


def test_only_a_pool_that_scales_keeps_its_size() -> None:
    """By its own name, of several models."""
    own = {"prefill": {"replicas": 0}, "decode": {"autoscaling": {"max_replicas": 8}}}
    config = load_config({"models": [{"model": name, **own} for name in ("x/a", "b")]})
    first, second = config.served
    sizes = {"DecodeWorker": 5, "DecodeWorker-x%2Fa": 6}
    for name, served, other, size in (("DecodeWorker", first, second, 5), ("DecodeWorker-b", second, first, 1)):
        pool = worker_pool(name, "decode", served, [other], None, SCHEDULER, sizes)
        scaled = pool._bound_deployment._deployment_config.autoscaling_config
        assert scaled.initial_replicas == size
    fixed = load_config({"decode": {"replicas": 2}})
    pool = worker_pool("DecodeWorker", "decode", fixed, [], None, SCHEDULER, {"DecodeWorker": 5})
    assert pool._bound_deployment.num_replicas == 2
