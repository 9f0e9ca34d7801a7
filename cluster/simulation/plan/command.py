"""`python -m cluster plan`: the fewest GPUs that serve a trace within its targets, and what they are short of if fewer.

What may be asked for is in `cluster.simulation.arguments`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cluster.simulation.arguments import SYNTHETIC
from cluster.simulation.command import DEVICES, MODELS, drawn_requests
from cluster.simulation.plan.demand import Estimate, Targets, busiest, demand_of, estimate
from cluster.simulation.plan.report import LayoutResult, PlanReport
from cluster.simulation.plan.search import Layout, OutOfTime, Search
from cluster.simulation.plan.worker_memory import WorkerMemory, predict_memory
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, simulate
from cluster.simulation.workers.worker import WorkerShape, measured
from cluster.simulation.workload.traces import TraceRequest, read_trace, scaled
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.roofline import Device, ModelShape, roofline_cost
from engine.model.config import read_config

_DEGREES: Final = (1, 2, 4, 8)
_LOADS: Final = (0.8, 1.2)
_BYTES_PER_VALUE: Final = 2
_SAMPLED_BY_PREFILL: Final = 32  # prompts that end in one step


def run(arguments: argparse.Namespace) -> bool:
    """Whether there is a plan. Raises ValueError, with advice, for what cannot be planned for."""
    started = time.monotonic()
    targets = Targets(
        ttft_s=arguments.ttft_ms / 1000,
        tpot_s=arguments.tpot_ms / 1000,
        gap_s=None if arguments.gap_ms is None else arguments.gap_ms / 1000,
        share=arguments.share,
    )
    problem = Problem(_requests(arguments), targets, _hardware(arguments), deadline=started + arguments.time_s)
    report = make_plan(problem, tuple(arguments.tensor_parallel or _DEGREES), max_gpus=arguments.max_gpus)
    print(report.json_line() if arguments.json else report.text(), flush=True)
    return report.answer is not None


def make_plan(problem: Problem, degrees: tuple[int, ...], *, max_gpus: int) -> PlanReport:
    """Tells of its progress on stderr."""
    results: dict[Layout, LayoutResult] = {}

    def achieves(layout: Layout) -> float:
        result = results[layout] = LayoutResult.of(layout, problem.play(layout))
        print(f"{layout}: {result.share:.1%} in time", file=sys.stderr, flush=True)
        return result.share

    found = Search(achieves, share=problem.targets.share, max_gpus=max_gpus)
    found.run(_guesses(problem, degrees, max_gpus))
    hardware, answer, cheaper = problem.hardware, found.answer, found.next_cheaper
    return PlanReport(
        model=hardware.model.name,
        device=hardware.device.name,
        targets=problem.targets,
        demand=problem.demand,
        answer=None if answer is None else results[answer],
        next_cheaper=None if cheaper is None else results[cheaper],
        at_load={} if answer is None else _at_other_loads(problem, answer),
        memory={}
        if answer is None
        else {role: hardware.memory(role, answer.devices_per_worker) for role in _roles(answer)},
        num_tried=len(results),
        is_complete=found.is_complete,
        max_gpus=max_gpus,
    )


def _guesses(problem: Problem, degrees: tuple[int, ...], max_gpus: int) -> list[Estimate]:
    """An estimate for each of the degrees that are possible. Raises ValueError, with why, where the targets are out of
    reach for all."""
    guesses, reasons = [], []
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
        guesses.append(guess)
    if not guesses:
        raise ValueError(f"no number of workers meets the targets: {'; '.join(reasons) or 'no degree fits --max-gpus'}")
    return guesses


def _at_other_loads(problem: Problem, answer: Layout) -> dict[str, float]:
    """The share in time at other loads, as many as there is time for."""
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
    if arguments.format == SYNTHETIC:
        requests = drawn_requests(arguments)
    else:
        requests = read_trace(arguments.trace, arguments.format)
    return list(busiest([*scaled(requests, load=arguments.load, length=arguments.length)], arguments.limit))


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
        acceptance=arguments.acceptance,
    )


def model_shape(name: str) -> ModelShape:
    """One of the known names, or a folder with a model's config.json. Raises ValueError for neither."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} is neither one of {', '.join(MODELS)} nor a folder with a config.json")
    return ModelShape.of(read_config(folder), bytes_per_value=_BYTES_PER_VALUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Model and device, and the limits of workers that do not depend on the layout."""

    model: ModelShape
    device: Device
    link_bytes_per_s: float = 50e9
    prefill_budget: int = 2048
    decode_budget: int = 512
    max_num_seqs: int = 256
    ring_bytes: int = 0
    noise: float = 0.1
    block_size: int = 64
    acceptance: float = 0.0  # see `WorkerShape`

    def memory(self, role: str, num_devices: int) -> WorkerMemory:
        is_prefill = role == "prefill"
        return predict_memory(
            self.model,
            self.device,
            num_devices=num_devices,
            token_budget=self.prefill_budget if is_prefill else self.decode_budget,
            max_num_seqs=_SAMPLED_BY_PREFILL if is_prefill else self.max_num_seqs,
            ring_bytes=self.ring_bytes,
        )

    def worker(self, role: str, num_devices: int) -> WorkerShape:
        """Raises ValueError where the model does not fit, or cannot be cut into so many parts."""
        layer_bytes = self.model.kv_bytes_per_token / self.model.num_layers
        return WorkerShape(
            cost=measured(roofline_cost(self.model, self.device, num_devices=num_devices), self.noise),
            kv_tokens=self.memory(role, num_devices).kv_tokens,
            token_budget=self.prefill_budget if role == "prefill" else self.decode_budget,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            handoff_token_s=layer_bytes / self.link_bytes_per_s,
            step_noise=self.noise,
            acceptance=self.acceptance,
        )


class Problem:
    """A trace, targets and hardware. After `deadline`, by `clock`, simulations raise OutOfTime."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        targets: Targets,
        hardware: Hardware,
        *,
        deadline: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests = requests
        self.targets = targets
        self.hardware = hardware
        self.demand = demand_of(requests)
        self._deadline = deadline
        self._clock = clock

    def estimate(self, num_devices: int) -> Estimate:
        prefill = self.hardware.worker("prefill", num_devices)
        decode = self.hardware.worker("decode", num_devices)
        most_a_step = 1 / (1 - decode.acceptance)  # tokens of a sequence: a guess may be too good, never too bad
        return estimate(
            self.demand,
            replace(self.targets, tpot_s=self.targets.tpot_s * most_a_step),
            decode.cost,
            devices_per_worker=num_devices,
            chunk_tokens=prefill.token_budget,
            kv_tokens=decode.kv_tokens,
            max_num_seqs=decode.max_num_seqs,
        )

    def play(self, layout: Layout, *, load: float = 1.0) -> SimulationResult:
        """All requests, at `load` times their rate, over workers as the layout says."""
        targets = self.targets
        slo = SloClass(name="planned", ttft_s=targets.ttft_s, tpot_s=targets.tpot_s, gap_s=targets.gap_s)
        config = SimulationConfig(
            num_prefill=layout.num_prefill,
            num_decode=layout.num_decode,
            prefill=self.hardware.worker("prefill", layout.devices_per_worker),
            decode=self.hardware.worker("decode", layout.devices_per_worker),
            slo=SloConfig(classes=(slo,), default=slo.name),
        )
        return simulate(config, self._timed(scaled(self.requests, load=load)), LegatoRouter())

    def _timed(self, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        for request in requests:
            if self._clock() > self._deadline:
                raise OutOfTime
            yield request
