"""What one simulation of the goodput benchmark is: requests, targets, workers, and a router on a layout of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from benchmarks.common.summary import Json
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.command import ROUTERS
from cluster.simulation.routers.base import Router
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, simulate
from cluster.simulation.workers import WorkerShape, measured
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceFormat, TraceRequest, read_trace, scaled
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.roofline import (
    H100_SXM,
    LLAMA_3_1_8B,
    LLAMA_3_1_70B,
    ModelShape,
    kv_capacity_tokens,
    roofline_cost,
)
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Place, Placement, Queued, Unplaceable
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot


class TooManyMissedError(Exception):
    """More requests are missed than was allowed, whatever becomes of the others."""


class Judge:
    """Behaves as `router` does. Raises TooManyMissedError once more than `allowed` requests were turned away, or were
    too late where the router hears of it: then they are for the client, too."""

    def __init__(self, router: Router, allowed: int) -> None:
        self.wants_blocks = router.wants_blocks
        self._router = router
        self._allowed = allowed
        self._slo: dict[str, SloClass] = {}
        self._arrived_at: dict[str, float] = {}
        self._first_at: dict[str, float] = {}
        self._missed: set[str] = set()

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        self._router.register(info, snapshot, now)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> object:
        return self._router.heartbeat(snapshot, now)

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        self._router.blocks(message, now)

    def place(self, request: Place, now: float) -> Placement | Unplaceable | Queued:
        self._slo[request.request_id] = SloClass(name=request.slo_class, ttft_s=request.ttft_s, tpot_s=request.tpot_s)
        self._arrived_at[request.request_id] = now - request.waited_s
        answer = self._router.place(request, now)
        if isinstance(answer, Unplaceable):
            self._miss(answer.request_id)
        return answer

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        answers = self._router.answers(now)
        for answer in answers:
            if isinstance(answer, Unplaceable):
                self._miss(answer.request_id)
        return answers

    def next_at(self) -> float | None:
        return self._router.next_at()

    def first_token(self, request_id: str, now: float) -> None:
        self._first_at[request_id] = now
        if not self._slo[request_id].meets_ttft(now - self._arrived_at[request_id]):
            self._miss(request_id)
        self._router.first_token(request_id, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int | None) -> None:
        if not num_output_tokens:
            self._miss(request_id)
        elif num_output_tokens > 1:
            tpot_s = (now - self._first_at[request_id]) / (num_output_tokens - 1)
            if not self._slo[request_id].meets_tpot(tpot_s):
                self._miss(request_id)
        self._router.ended(request_id, now, num_output_tokens)

    def _miss(self, request_id: str) -> None:
        self._missed.add(request_id)
        if len(self._missed) > self._allowed:
            raise TooManyMissedError


ModelName = Literal["8b", "70b"]
ATTAINMENT: Final = 0.9
TTFT_S: Final = 2.0
TPOT_S: Final = 0.1
STRETCH: Final = 2.0
LENGTHS: Final = (4096, 8192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072)  # prompt tokens, at most, of each class
BUDGET: Final = 2048  # tokens of a step, on prefill workers and where prompts are computed beside decodes
SMALL_BUDGET: Final = 512
LEAST_BUDGET: Final = 256
SHARES: Final = (0.25, 0.5, 0.625, 0.75)  # of the workers, that compute prompts
MAX_NUM_SEQS: Final = 512
LINK_BYTES_PER_S: Final = 50e9
BLOCK_TOKENS: Final[dict[TraceFormat, int]] = {"mooncake": 512, "azure": 64}  # as in the trace; as in engines
DEVICES: Final[dict[ModelName, tuple[ModelShape, int]]] = {"8b": (LLAMA_3_1_8B, 1), "70b": (LLAMA_3_1_70B, 4)}
NEVER: Final = 2.0  # more idle workers than there are
SMALL: Final = 8  # workers of the clusters that layouts are looked for on
# Requests of a slice for so many workers: at the loads served, half a minute and more, several times an answer. In less
# no queue grows, and what is left to decode at its end costs nobody anything.
REQUESTS: Final[dict[tuple[TraceFormat, ModelName], int]] = {
    ("mooncake", "8b"): 1200,
    ("mooncake", "70b"): 1200,
    ("azure", "8b"): 4800,
    ("azure", "70b"): 2400,
}
# Near the published medians and means: Mooncake's conversations (mean prompt 12,035, output 343 tokens, much in common)
# and Azure's (mean prompt 1,155, output 211 tokens; what prompts have in common is not published: nothing).
WORKLOADS: Final[dict[TraceFormat, Workload]] = {
    "mooncake": Workload(
        requests_per_s=3.3,
        num_requests=100_000,
        turn=LogNormal(median=5000, sigma=1.0, most=60_000),
        output=LogNormal(median=300, sigma=0.6, most=2000),
        follow_up=0.5,
        max_prompt_tokens=120_000,
    ),
    "azure": Workload(
        requests_per_s=5.4,
        num_requests=100_000,
        turn=LogNormal(median=800, sigma=0.85, most=14_000),
        output=LogNormal(median=150, sigma=0.8, most=1000),
        num_systems=1,
        system_tokens=0,
        follow_up=0.0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the operator of a router chooses: prefill workers, all others decode; `budget`: tokens of a decode step."""

    num_prefill: int
    num_decode: int
    budget: int = BUDGET

    def __str__(self) -> str:
        return f"{self.num_prefill}+{self.num_decode}, steps of {self.budget}"

    def times(self, factor: int) -> Layout:
        """For so many times as many workers."""
        return replace(self, num_prefill=factor * self.num_prefill, num_decode=factor * self.num_decode)


def layouts(router: str, num_workers: int, cost: StepCost, tpot_s: float = TPOT_S) -> list[Layout]:
    """Without a split, only the step is to be chosen; with one, how many compute prompts. Legato may do without, and
    its decode workers may compute prompts: where the largest step misses the TPOT, it chooses both."""
    fitting = fitting_budget(cost, tpot_s)
    is_tight = fitting < BUDGET
    budgets = sorted({SMALL_BUDGET, BUDGET} | ({LEAST_BUDGET, fitting} if is_tight else set()))
    if router == "colocated":
        return [Layout(num_prefill=0, num_decode=num_workers, budget=budget) for budget in budgets]
    is_legato = router.startswith("legato")
    shares = SHARES if router == "legato-split" or not is_legato else (0.0, *SHARES)
    counts = sorted({min(round(share * num_workers), num_workers - 1) for share in shares})
    return [
        Layout(num_prefill=count, num_decode=num_workers - count, budget=budget)
        for count in counts
        for budget in (budgets if is_tight and is_legato else [BUDGET])
    ]


def fitting_budget(cost: StepCost, tpot_s: float) -> int:
    """Tokens of the largest step, in multiples of the least, that does not miss the TPOT by itself."""
    num_tokens = int((tpot_s - cost.base_s) / cost.prefill_token_s)
    return max(LEAST_BUDGET, min(BUDGET, num_tokens // LEAST_BUDGET * LEAST_BUDGET))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the table. `stretch`: TTFT targets are at least so many times what an idle worker takes; 0: all are
    the same. `declared_tokens`: see `SimulationConfig`."""

    trace: TraceFormat
    path: Path | None
    model: ModelName = "8b"
    num_workers: int = 8
    num_requests: int
    stretch: float = STRETCH
    tpot_s: float = TPOT_S
    declared_tokens: int | None = None

    def key(self) -> Json:
        """What tells it from others in a file."""
        source = "drawn" if self.path is None else self.path.name
        return {**asdict(self), "path": source}

    def small(self) -> tuple[Setting, int]:
        """The same with `SMALL` workers and a slice for these, and by how much it is smaller; itself if it is no
        multiple."""
        times = self.num_workers // SMALL
        if times < 2 or self.num_workers % SMALL:
            return self, 1
        return replace(self, num_workers=SMALL, num_requests=REQUESTS[self.trace, self.model]), times

    @property
    def cost(self) -> StepCost:
        shape, num_devices = DEVICES[self.model]
        return roofline_cost(shape, H100_SXM, num_devices=num_devices)

    def requests(self, first: int, load: float) -> Iterable[TraceRequest]:
        """`first` of the trace's requests, or the seed of drawn ones."""
        return (replace(r, slo_class=length_class(r.prompt_tokens)) for r in self._plain(first, load))

    def slo(self) -> SloConfig:
        cost = self.cost

        def ttft_s(num_tokens: int) -> float:
            return max(TTFT_S, self.stretch * cost.prefill_s(num_tokens, 0.0, BUDGET))

        classes = tuple(SloClass(name=length_class(n), ttft_s=ttft_s(n), tpot_s=self.tpot_s) for n in LENGTHS)
        return SloConfig(classes=classes, default=classes[0].name)

    def _plain(self, first: int, load: float) -> Iterable[TraceRequest]:
        if self.path is None:
            drawn = islice(draw_requests(WORKLOADS[self.trace], first), self.num_requests)
            return scaled(drawn, load=load)
        return scaled(read_trace(self.path, self.trace), load=load, first=first, limit=self.num_requests)


def length_class(num_tokens: int) -> str:
    return f"up to {next((n for n in LENGTHS if num_tokens <= n), LENGTHS[-1])}"


def play(
    setting: Setting,
    router: str,
    layout: Layout,
    load: float,
    first: int,
    *,
    max_returns: int = 0,
    allowed_misses: int | None = None,
) -> SimulationResult:
    """Raises TooManyMissedError where that is certain before the end."""
    config = _config(setting, layout, max_returns)
    asked = _router(router)
    judged = asked if allowed_misses is None else Judge(asked, allowed_misses)
    return simulate(config, setting.requests(first, load), judged)


def attainment(setting: Setting, router: str, layout: Layout, load: float, first: int) -> float:
    """0 where it is certain before the end to be less than `ATTAINMENT`."""
    allowed = math.floor((1.0 - ATTAINMENT) * setting.num_requests + 1e-6)
    try:
        return play(setting, router, layout, load, first, allowed_misses=allowed).summary.overall.attainment
    except TooManyMissedError:
        return 0.0


def _router(name: str) -> Router:
    if name == "legato-strict":
        return LegatoRouter(DecisionPolicy(batch_idle=NEVER))
    if name == "legato-fair":
        return LegatoRouter(DecisionPolicy(displacement_cost=0.0))
    return ROUTERS["legato" if name == "legato-split" else name]()


def _config(setting: Setting, layout: Layout, max_returns: int) -> SimulationConfig:
    model, num_devices = DEVICES[setting.model]

    def shape(token_budget: int) -> WorkerShape:
        return WorkerShape(
            cost=measured(setting.cost),
            kv_tokens=kv_capacity_tokens(model, H100_SXM, num_devices=num_devices),
            token_budget=token_budget,
            max_num_seqs=MAX_NUM_SEQS,
            block_size=BLOCK_TOKENS[setting.trace],
            handoff_token_s=model.kv_bytes_per_token / model.num_layers / LINK_BYTES_PER_S,
        )

    return SimulationConfig(
        num_prefill=layout.num_prefill,
        num_decode=layout.num_decode,
        prefill=shape(BUDGET),
        decode=shape(layout.budget),
        slo=setting.slo(),
        declared_tokens=setting.declared_tokens,
        max_returns=max_returns,
    )
