"""`python -m cluster plan`: the fewest GPUs that serve a trace within its targets, and what they are short of if fewer.

What may be asked for is in `cluster.simulation.arguments`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cluster.simulation.command import DEVICES, MODELS, of_each_model, requests_of
from cluster.simulation.models import simulate_models
from cluster.simulation.plan.demand import Estimate, Targets, busiest, demand_of, estimate
from cluster.simulation.plan.report import Changing, LayoutResult, ModelsPlan, PlanReport, num_gpus_of
from cluster.simulation.plan.search import Layout, OutOfTime, Search
from cluster.simulation.records import tell
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, simulate
from cluster.simulation.workers.worker import WorkerShape, measured
from cluster.simulation.workload.traces import TraceRequest, paced, scaled, swing
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.roofline import Device, ModelShape, WorkerMemory, predict_memory, roofline_cost

_DEGREES: Final = (1, 2, 4, 8)
_LOADS: Final = (0.8, 1.2)
_BYTES_PER_VALUE: Final = 2
_SAMPLED_BY_PREFILL: Final = 32  # prompts that end in one step


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code: 3 if no cluster within the limits is enough. Raises ValueError, with
    advice, for what cannot be planned for."""
    started = time.monotonic()
    targets = Targets(ttft_s=arguments.ttft_s, tpot_s=arguments.tpot_s, gap_s=arguments.gap_s, share=arguments.share)
    deadline, degrees = started + arguments.time_s, tuple(arguments.tensor_parallel or _DEGREES)
    each = of_each_model(arguments)
    report: PlanReport | ModelsPlan
    if len(each) == 1:
        [own] = each.values()
        requests = list(busiest(_requests(own), arguments.limit))
        problem = Problem(requests, targets, _hardware(own), deadline=deadline)
        report = make_plan(problem, degrees, max_gpus=arguments.max_gpus)
    else:
        problems = {}
        for number, (name, own) in enumerate(each.items()):
            with _named(name):
                requests = _requests(own, number / len(each))
                problems[name] = Problem(requests, targets, _hardware(own), deadline=deadline)
        report = plan_models(
            problems, degrees, limit=arguments.limit, change_s=arguments.model_flips, max_gpus=arguments.max_gpus
        )
    tell(report, as_json=arguments.json)
    return 0 if report.is_enough else 3


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


def plan_models(
    problems: Mapping[str, Problem],
    degrees: tuple[int, ...],
    *,
    limit: int,
    change_s: float | None = None,
    max_gpus: int,
) -> ModelsPlan:
    """A plan for each of several models, by name, whose requests come at the same time: for the busiest stretch of
    `limit` of its own. `change_s`: then also for fewer workers, which change their model in so long. Raises ValueError
    where a model cannot be planned for."""
    busy, apart = {}, {}
    for name, problem in problems.items():
        print(f"{name}:", file=sys.stderr, flush=True)
        with _named(name):
            busy[name] = problem.of(busiest(problem.requests, limit))
            apart[name] = replace(make_plan(busy[name], degrees, max_gpus=max_gpus), model=name)
    changing = cheaper = None
    is_complete = all(report.is_complete for report in apart.values())
    if change_s is not None:
        fixed = num_gpus_of(apart.values())
        together = ModelsProblem(problems, busy, change_s)
        most = max_gpus if fixed is None else min(max_gpus, fixed - 1)
        search = Search(together.achieves, share=together.share, max_gpus=most)
        search.run(together.guesses(degrees, max_gpus))
        changing, cheaper = (
            None if x is None else together.played.get(x) for x in (search.answer, search.next_cheaper)
        )
        is_complete = is_complete and search.is_complete
    return ModelsPlan(
        by_model=apart,
        change_s=change_s,
        changing=changing,
        next_cheaper=cheaper,
        is_complete=is_complete,
        max_gpus=max_gpus,
    )


class ModelsProblem:
    """Several models whose workers change their model in `change_s`. Layouts are of all of them together: each begins
    with its part, by what it is estimated to need at first, as if workers had followed the demand until then.

    What a layout achieves is counted of `busy`, each model's busiest stretch; all that comes from the first of these to
    the end of the last is played. `played`: every layout that was tried."""

    def __init__(self, problems: Mapping[str, Problem], busy: Mapping[str, Problem], change_s: float) -> None:
        since = min(problem.requests[0].arrival_s for problem in busy.values())
        until = max(problem.requests[-1].arrival_s for problem in busy.values())
        self.played: dict[Layout, Changing] = {}
        self._problems = {name: problem.of(problem.between(since, until)) for name, problem in problems.items()}
        self._busy = busy
        self._change_s = change_s
        self._guesses: dict[int, dict[str, Estimate]] = {}  # by degree: what each model needs at first
        first_s = min(problem.requests[-1].arrival_s for problem in busy.values()) - since
        rates = {
            name: (1 + sum(request.arrival_s <= first_s for request in problem.requests)) / first_s
            for name, problem in self._problems.items()
        }
        self._at_first = {name: rate / busy[name].demand.requests_per_s for name, rate in rates.items()}

    @property
    def share(self) -> float:
        """Of each model's requests, that is to be in time."""
        return max(problem.targets.share for problem in self._problems.values())

    def guesses(self, degrees: tuple[int, ...], max_gpus: int) -> Iterator[Estimate]:
        """What all models need at their peaks, with each degree that is possible for all of them."""
        for degree in degrees:
            try:
                each = {name: _guesses(problem, (degree,), max_gpus)[0] for name, problem in self._busy.items()}
            except ValueError:
                continue
            self._guesses[degree] = {
                name: replace(guess, prefill=guess.prefill * times, decode=guess.decode * times)
                for (name, guess), times in zip(each.items(), self._at_first.values(), strict=True)
            }
            yield Estimate(
                devices_per_worker=degree,
                prefill=sum(guess.prefill for guess in each.values()),
                decode=sum(guess.decode for guess in each.values()),
            )

    def achieves(self, layout: Layout) -> float:
        """The share in time of the model that has least. Tells of it on stderr."""
        if layout.num_decode < len(self._problems):
            return 0.0  # each has to have a worker
        parts = _parts(layout, self._guesses[layout.devices_per_worker])
        played = simulate_models(
            {name: problem.config(parts[name]) for name, problem in self._problems.items()},
            {name: problem.timed(problem.requests) for name, problem in self._problems.items()},
            change_s=dict.fromkeys(self._problems, self._change_s),
        )
        counted = {name: {request.request_id for request in problem.requests} for name, problem in self._busy.items()}
        results = {n: LayoutResult.of(parts[n], found.only(counted[n])) for n, found in played.by_model.items()}
        self.played[layout] = found = Changing(results=results, num_changes=len(played.changes))
        print(f"{layout}, changing their model: {found.share:.1%} in time", file=sys.stderr, flush=True)
        return found.share


def _parts(layout: Layout, guesses: Mapping[str, Estimate]) -> dict[str, Layout]:
    """What each model has of a layout at first: a decode worker, and of all others a part by what it is estimated to
    need."""
    prefill = _shared_out(layout.num_prefill, {name: guess.prefill for name, guess in guesses.items()}, 0)
    needs = {
        name: guess.decode if layout.num_prefill else guess.prefill + guess.decode for name, guess in guesses.items()
    }
    decode = _shared_out(layout.num_decode, needs, 1)
    return {name: Layout(layout.devices_per_worker, prefill[name], decode[name]) for name in guesses}


def _shared_out(num_workers: int, needs: Mapping[str, float], least: int) -> dict[str, int]:
    """`least` for each, and one after the other to whom it leaves with least of what it needs."""
    held = dict.fromkeys(needs, least)
    for _ in range(num_workers - least * len(needs)):
        held[min(needs, key=lambda name: (held[name] + 1) / needs[name])] += 1
    return held


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Whatever cannot be planned for is told with the model that it is of."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error


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


def _requests(arguments: argparse.Namespace, phase: float = 0.0) -> list[TraceRequest]:
    """The requests for one model. `phase`: of several, see `swing`."""
    requests = scaled(requests_of(arguments), load=arguments.load, length=arguments.length)
    return list(requests if arguments.swing is None else paced(requests, swing(arguments.swing, phase)))


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
    from engine.model.config import read_config  # brings torch, which takes seconds

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

    def of(self, requests: Sequence[TraceRequest]) -> Problem:
        """The same for other requests."""
        return Problem(requests, self.targets, self.hardware, deadline=self._deadline, clock=self._clock)

    def between(self, since_s: float, until_s: float) -> list[TraceRequest]:
        """The requests that arrive then, as if `since_s` were second 0."""
        within = (request for request in self.requests if since_s <= request.arrival_s <= until_s)
        return [replace(request, arrival_s=request.arrival_s - since_s) for request in within]

    def play(self, layout: Layout, *, load: float = 1.0) -> SimulationResult:
        """All requests, at `load` times their rate, over workers as the layout says."""
        return simulate(self.config(layout), self.timed(scaled(self.requests, load=load)), LegatoRouter())

    def config(self, layout: Layout) -> SimulationConfig:
        """Workers as the layout says."""
        targets = self.targets
        slo = SloClass(name="planned", ttft_s=targets.ttft_s, tpot_s=targets.tpot_s, gap_s=targets.gap_s)
        return SimulationConfig(
            num_prefill=layout.num_prefill,
            num_decode=layout.num_decode,
            prefill=self.hardware.worker("prefill", layout.devices_per_worker),
            decode=self.hardware.worker("decode", layout.devices_per_worker),
            slo=SloConfig(classes=(slo,), default=slo.name),
        )

    def timed(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """The requests, as long as there is time: then raises OutOfTime."""
        for request in requests:
            if self._clock() > self._deadline:
                raise OutOfTime
            yield request
