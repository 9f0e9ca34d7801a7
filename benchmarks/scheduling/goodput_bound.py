"""The load at which the workers' time is used up, whoever places requests: what no router can exceed for long.

Steps are taken to be as full as TPOT allows, the prefix cache to forget nothing and to be shared by all, and nobody to
wait. A run that ends can be a little beyond it: what is still to be decoded then no longer competes with newcomers.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.scheduling.goodput_setting import ATTAINMENT, Setting
from cluster.simulation.plan.demand import demand_of
from cluster.simulation.workload.traces import TraceRequest
from engine.cost_model.step_cost import StepCost, StepWork


def bounds(setting: Setting, first: int) -> tuple[float, float]:
    """Of the load, if all requests of the slice are served, and if only those that take the least time are."""
    requests = list(setting.requests(first, 1.0))
    demand = demand_of(requests)
    seconds = sorted(_work_s(setting.cost, r, *prompt) for r, prompt in zip(requests, demand.prompts, strict=True))
    # A step at least every TPOT, and each takes `base_s` whatever is in it.
    capacity_s = setting.num_workers * demand.duration_s * (1.0 - setting.cost.base_s / setting.tpot_s)
    return capacity_s / sum(seconds), capacity_s / sum(_cheapest(seconds))


def span_s(setting: Setting, first: int) -> float:
    """From the slice's first arrival to its last, at load 1."""
    arrivals = [request.arrival_s for request in setting.requests(first, 1.0)]
    return max(arrivals) - min(arrivals)


def _cheapest(seconds: Sequence[float]) -> Sequence[float]:
    return seconds[: round(ATTAINMENT * len(seconds))]


def _work_s(cost: StepCost, request: TraceRequest, num_new: int, num_cached: int) -> float:
    """All that the request adds to steps that are there anyway."""
    prefill = StepWork.of_prefill(num_new, num_cached)
    decodes = request.output_tokens - 1
    context = decodes * (request.prompt_tokens + request.output_tokens / 2)
    return cost.step_s(prefill + StepWork(decodes=decodes, context_tokens=context)) - cost.base_s
