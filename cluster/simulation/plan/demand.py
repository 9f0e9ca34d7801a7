"""How many workers a trace should need, by queueing theory: where a search by simulation begins.

Averages, independent arrivals, a prefix cache that forgets nothing: good to within a worker or two, and no promise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.autoscaling.demand import decode_work_s
from cluster.simulation.workload.traces import TraceRequest
from engine.cost_model.step_cost import StepCost, StepWork

_MOST_WORKERS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """`share` of all requests are to meet them all. `gap_s` None: nothing is promised of gaps."""

    ttft_s: float
    tpot_s: float
    share: float
    gap_s: float | None = None

    @property
    def step_s(self) -> float:
        """A step that takes longer is late, whoever is in it."""
        return self.tpot_s if self.gap_s is None else min(self.tpot_s, self.gap_s)

    def __post_init__(self) -> None:
        if min(self.ttft_s, self.step_s) <= 0 or not 0 < self.share < 1:
            raise ValueError("targets must be positive times, and the share that is to meet them between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a trace asks for. `prompts`: (tokens to compute, tokens computed before them) of each request."""

    duration_s: float
    prompts: tuple[tuple[int, int], ...]
    output_tokens: float  # mean
    context_tokens: float  # mean while decoding

    @property
    def requests_per_s(self) -> float:
        return len(self.prompts) / self.duration_s


def busiest(requests: Sequence[TraceRequest], num_requests: int) -> Sequence[TraceRequest]:
    """The stretch of so many requests that come in the shortest time."""
    if len(requests) <= num_requests:
        return requests
    starts = range(len(requests) - num_requests + 1)
    first = min(starts, key=lambda i: requests[i + num_requests - 1].arrival_s - requests[i].arrival_s)
    return requests[first : first + num_requests]


def demand_of(requests: Sequence[TraceRequest]) -> Demand:
    """Raises ValueError where too few requests make no rate."""
    duration_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if duration_s <= 0:
        raise ValueError("nothing can be planned for: the trace holds fewer than two requests, or all come at once")
    known: set[int] = set()
    prompts = []
    for request in requests:
        num_known = next((i for i, name in enumerate(request.content) if name not in known), len(request.content))
        cached = min(num_known * request.content_tokens, request.prompt_tokens - 1)
        prompts.append((request.prompt_tokens - cached, cached))
        known.update(request.content)
    outputs = sum(request.output_tokens for request in requests)
    contexts = sum(r.output_tokens * (r.prompt_tokens + r.output_tokens / 2) for r in requests)
    return Demand(
        duration_s=duration_s,
        prompts=tuple(prompts),
        output_tokens=outputs / len(requests),
        context_tokens=contexts / outputs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Workers of each kind, with `devices_per_worker` devices; `reachable`: the share of prompts that an idle worker
    computes within the TTFT target, or 0 where not even a lone sequence decodes within the TPOT target."""

    devices_per_worker: int
    prefill: float
    decode: float
    reachable: float = 1.0

    @property
    def workers(self) -> int:
        return max(1, math.ceil(self.prefill + self.decode))

    @property
    def num_gpus(self) -> int:
        return self.devices_per_worker * self.workers

    @property
    def prefill_share(self) -> float:
        return self.prefill / (self.prefill + self.decode)


def estimate(
    demand: Demand,
    targets: Targets,
    cost: StepCost,
    *,
    devices_per_worker: int = 1,
    chunk_tokens: int,
    kv_tokens: int,
    max_num_seqs: int,
) -> Estimate:
    work_s = decode_work_s(
        cost,
        kv_tokens,
        max_num_seqs,
        context_tokens=demand.context_tokens,
        num_output=demand.output_tokens,
        tpot_s=targets.step_s,
    )
    services = [cost.prefill_s(new, cached, chunk_tokens) for new, cached in demand.prompts]
    lone_s = cost.step_s(StepWork(decodes=1, context_tokens=demand.context_tokens))
    in_time = sum(service <= targets.ttft_s for service in services) / len(services)
    return Estimate(
        devices_per_worker=devices_per_worker,
        prefill=_prefill_workers(demand.requests_per_s, services, targets),
        decode=demand.requests_per_s * work_s,
        reachable=in_time if lone_s <= targets.step_s else 0.0,
    )


def _prefill_workers(requests_per_s: float, services: list[float], targets: Targets) -> float:
    """The fewest for which the wait is in bounds for the share: M/G/1 at each, with the mean wait by Pollaczek and
    Khinchine, and its tail exponential (Kingman's heavy traffic).
    """
    mean_s = sum(services) / len(services)
    square = sum(service * service for service in services) / len(services)
    slack_s = targets.ttft_s - mean_s
    work = requests_per_s * mean_s
    for num_workers in range(math.floor(work) + 1, _MOST_WORKERS):
        busy = work / num_workers
        wait_s = requests_per_s / num_workers * square / (2 * (1 - busy))
        if slack_s <= 0 or busy * math.exp(-busy * slack_s / wait_s) <= 1 - targets.share:
            # What a lone worker is not busy with is left to decodes, where one worker does both.
            return float(num_workers) if num_workers > 1 else work
    return float(_MOST_WORKERS)
