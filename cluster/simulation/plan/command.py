"""`python -m cluster plan`: the fewest GPUs that serve a trace within its targets, and what they are short of if fewer.

What may be asked for is in `cluster.simulation.plan.arguments`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final, Literal

from cluster.simulation.command import DEVICES, MODELS
from cluster.simulation.plan.arguments import SYNTHETIC
from cluster.simulation.plan.demand import Targets, busiest
from cluster.simulation.plan.problem import Hardware, Problem
from cluster.simulation.plan.report import Outcome, PlanReport
from cluster.simulation.plan.search import Layout, Outlook, OutOfTime, search
from cluster.simulation.workload.synthetic import Workload, draw_requests
from cluster.simulation.workload.traces import Scaling, TraceRequest, read_trace
from engine.cost_model.roofline import ModelShape
from engine.model.config import ModelConfig

_DEGREES: Final = (1, 2, 4, 8)
_LOADS: Final = (0.8, 1.2)
_BYTES_PER_VALUE: Final = 2

Verdict = Literal["found", "impossible"]


def run(arguments: argparse.Namespace) -> Verdict:
    """Raises ValueError, with advice, for what cannot be planned for."""
    started = time.monotonic()
    targets = Targets(ttft_s=arguments.ttft_ms / 1000, tpot_s=arguments.tpot_ms / 1000, share=arguments.share)
    if arguments.max_gpus < 1 or arguments.limit < 2:
        raise ValueError("a plan needs at least one GPU (--max-gpus) and two requests (--limit)")
    problem = Problem(_requests(arguments), targets, _hardware(arguments), deadline=started + arguments.time_s)
    report = make_plan(problem, tuple(arguments.tensor_parallel or _DEGREES), max_gpus=arguments.max_gpus)
    print(report.json_line() if arguments.json else report.text(), flush=True)
    return "found" if report.answer is not None else "impossible"


def make_plan(problem: Problem, degrees: tuple[int, ...], *, max_gpus: int) -> PlanReport:
    """Tells of its progress on stderr."""
    outcomes: dict[Layout, Outcome] = {}

    def achieves(layout: Layout) -> float:
        outcome = outcomes[layout] = Outcome.of(layout, problem.play(layout))
        print(f"{layout}: {outcome.share:.1%} in time", file=sys.stderr, flush=True)
        return outcome.share

    found = search(_outlooks(problem, degrees, max_gpus), achieves, share=problem.targets.share, max_gpus=max_gpus)
    hardware, answer, cheaper = problem.hardware, found.answer, found.next_cheaper
    return PlanReport(
        model=hardware.model.name,
        device=hardware.device.name,
        targets=problem.targets,
        demand=problem.demand,
        answer=None if answer is None else outcomes[answer],
        next_cheaper=None if cheaper is None else outcomes[cheaper],
        at_load={} if answer is None else _at_other_loads(problem, answer),
        memory={}
        if answer is None
        else {role: hardware.memory(role, answer.devices_per_worker) for role in _roles(answer)},
        num_tried=len(outcomes),
        is_complete=found.is_complete,
        max_gpus=max_gpus,
    )


def _outlooks(problem: Problem, degrees: tuple[int, ...], max_gpus: int) -> list[Outlook]:
    """Of the degrees that are possible. Raises ValueError, with why, where the targets are out of reach for all."""
    outlooks, reasons = [], []
    for degree in degrees:
        if degree > max_gpus:
            continue
        try:
            guess = problem.estimate(degree)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if guess.reachable < problem.targets.share:
            reasons.append(f"with TP {degree}, even an idle worker serves only {guess.reachable:.1%} in time")
            continue
        outlooks.append(Outlook(degree, guess.workers, guess.prefill_share))
    if not outlooks:
        raise ValueError(f"no number of workers meets the targets: {'; '.join(reasons) or 'no degree fits --max-gpus'}")
    return outlooks


def _at_other_loads(problem: Problem, answer: Layout) -> dict[str, float]:
    """Those that there is time for."""
    shares = {}
    for load in _LOADS:
        try:
            shares[f"{load:g}"] = problem.play(answer, load=load).summary.overall.attainment
        except OutOfTime:
            break
    return shares


def _roles(layout: Layout) -> tuple[str, ...]:
    return ("prefill", "decode") if layout.num_prefill else ("decode",)


def _requests(arguments: argparse.Namespace) -> list[TraceRequest]:
    scaling = Scaling(load=arguments.load, length=arguments.length)
    if arguments.format == SYNTHETIC:
        workload = Workload(
            requests_per_s=arguments.rate, num_requests=arguments.requests, burstiness=arguments.burstiness
        )
        requests = list(scaling.apply(draw_requests(workload, arguments.seed)))
    elif arguments.trace is None:
        raise ValueError("name a file with --trace, or draw requests with --format synthetic")
    else:
        requests = list(scaling.apply(read_trace(arguments.trace, arguments.format)))
    return list(busiest(requests, arguments.limit))


def _hardware(arguments: argparse.Namespace) -> Hardware:
    return Hardware(
        model=model_shape(arguments.model),
        device=DEVICES[arguments.device],
        link_bytes_per_s=arguments.link_gb_per_s * 1e9,
        prefill_budget=arguments.prefill_budget,
        decode_budget=arguments.decode_budget,
        max_num_seqs=arguments.max_num_seqs,
        ring_bytes=round(arguments.ring_gb * 1e9),
        noise=arguments.noise,
        block_size=arguments.block_size,
    )


def model_shape(name: str) -> ModelShape:
    """One of the known names, or a folder with a model's config.json. Raises ValueError for neither."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} is neither one of {', '.join(MODELS)} nor a folder with a config.json")
    return ModelShape.of(ModelConfig.from_folder(folder), bytes_per_value=_BYTES_PER_VALUE)
