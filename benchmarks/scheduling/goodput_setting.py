"""What one simulation of the goodput benchmark is: requests, targets, workers, and a router on a layout of them.

Rows of the tables are named in `ROWS`; each may choose among its `candidates`: layouts, steps and limits of its own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from benchmarks.common.part import Json
from benchmarks.scheduling.goodput_counting import Counts, DecidedError, Promise, tenant_of
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.command import ROUTERS
from cluster.simulation.routers.base import Router
from cluster.simulation.routers.baselines import CacheAware, Dynamo, LlmdHeadroom, Mooncake
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, Watch, simulate
from cluster.simulation.workers.worker import WorkerShape, measured
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

ModelName = Literal["8b", "70b"]
TTFT_S: Final = 2.0
TPOT_S: Final = 0.1
STRETCH: Final = 2.0
LENGTHS: Final = (4096, 8192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072)  # prompt tokens, at most, of each class
BUDGET: Final = 2048  # tokens of a step, on prefill workers and where prompts are computed beside decodes
# Budget of a decode step, and whether promises bound it further.
STEPS: Final = ((BUDGET, True), (BUDGET, False), (512, False), (256, False))
SHARES: Final = (0.0, 0.25, 0.5, 0.625, 0.75)  # of the workers, that compute prompts
STEP_NOISE: Final = 0.1  # sigma of steps' times; what a seed decides
MAX_RETURNS: Final = 3  # of a client that is told when to come back
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
    ("azure", "8b"): 3200,
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


def add_trace_paths(parser: argparse.ArgumentParser) -> None:
    """Add `--mooncake` and `--azure`, which name the published traces: by default as LEGATO_MOONCAKE_TRACE and
    LEGATO_AZURE_TRACE do; None: requests are drawn."""
    for trace in WORKLOADS:
        default = os.environ.get(f"LEGATO_{trace.upper()}_TRACE")
        parser.add_argument(f"--{trace}", type=Path, default=default and Path(default), help="the trace's file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the operator of a router chooses: prefill workers, all others decode; `budget`: at most so many tokens of a
    decode step; `is_paced`: as many as what was promised allows, within that; `limits`: the router's own (`LIMITS`)."""

    num_prefill: int
    num_decode: int
    budget: int = BUDGET
    is_paced: bool = True
    limits: str = ""

    def __str__(self) -> str:
        steps = f"steps by promise within {self.budget}" if self.is_paced else f"steps of {self.budget}"
        return ", ".join(filter(None, (f"{self.num_prefill}+{self.num_decode}", steps, self.limits)))

    def times(self, factor: int) -> Layout:
        """The layout for so many times as many workers."""
        return replace(self, num_prefill=factor * self.num_prefill, num_decode=factor * self.num_decode)


LIMITS: Final[Mapping[str, Mapping[str, Callable[[], Router]]]] = {
    "mooncake": {
        f"TTFT x {ttft:g}, TBT x {tbt:g}": partial(Mooncake, ttft_share=ttft, tbt_share=tbt)
        for ttft in (1.0, 0.7)
        for tbt in (1.0, 0.5, 0.25)
    },
    "dynamo": {
        "never busy": Dynamo,
        **{
            f"busy beyond {blocks:.0%} of blocks, {tokens} tokens": partial(
                Dynamo, busy_blocks=blocks, busy_tokens=tokens
            )
            for blocks in (0.85, 0.95)
            for tokens in (15_000, 30_000)
        },
    },
    "llm-d": {"least": LlmdHeadroom, "most": partial(LlmdHeadroom, strategy="most")},
    "length-limit": {
        f"{most} uncached tokens": partial(CacheAware, most_uncached=most)
        for most in (131_072, 65_536, 49_152, 36_864, 24_576, 16_384, 8192, 4096)
    },
}
_ROUTERS: Final[Mapping[str, Callable[[], Router]]] = {
    **ROUTERS,
    "legato-strict": lambda: LegatoRouter(DecisionPolicy(batch_idle=NEVER)),
    "length-limit": CacheAware,
}
# Whose decode workers make room for a prompt once it is computed: they pull it (vLLM's connector, DistServe), all of it
# exposed, or it lands in host memory (Mooncake).
PULLS: Final = frozenset({"distserve", "dynamo", "llm-d"})
LANDS: Final = frozenset({"mooncake"})


def candidates(router: str, num_workers: int) -> list[Layout]:
    """All layouts, without prefill workers all steps, with the router's first limits. Where others compute the prompts,
    a decode worker's step holds few of them. Automatic is nothing to choose."""
    if router == "legato-auto":
        return [Layout(num_prefill=0, num_decode=num_workers)]
    counts = sorted({min(round(share * num_workers), num_workers - 1) for share in SHARES})
    limits = next(iter(LIMITS.get(router, {"": None})))
    if router == "colocated":
        counts = [0]
    return [
        Layout(num_prefill=count, num_decode=num_workers - count, budget=budget, is_paced=is_paced, limits=limits)
        for count in counts
        for budget, is_paced in (STEPS[:1] if count else STEPS)
    ]


def with_limits(router: str, layout: Layout) -> list[Layout]:
    return [replace(layout, limits=limits) for limits in LIMITS.get(router, {layout.limits: None})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the table. `tpot_s`, `gap_s`: what is promised beside TTFT; each that is set is judged. `stretch`:
    TTFT targets are at least so many times what an idle worker takes; 0: all are the same. `seed`: of the noise in
    steps, and of who is whose tenant. `declared_tokens`: see `SimulationConfig`; `acceptance`: `WorkerShape`."""

    trace: TraceFormat
    path: Path | None
    model: ModelName = "8b"
    num_workers: int = 8
    num_requests: int
    stretch: float = STRETCH
    tpot_s: float | None = TPOT_S
    gap_s: float | None = None
    seed: int = 0
    noise: float = STEP_NOISE
    max_returns: int = MAX_RETURNS
    has_tenants: bool = True  # told to routers; they are counted in any case
    declared_tokens: int | None = None
    acceptance: float = 0.0

    def key(self) -> Json:
        """What tells it from others in a file."""
        source = "drawn" if self.path is None else self.path.name
        return {**asdict(self), "path": source}

    def small(self) -> tuple[Setting, int]:
        """The setting with `SMALL` workers and a slice for these, and by how much it is smaller; itself if it is no
        multiple."""
        times = self.num_workers // SMALL
        if times < 2 or self.num_workers % SMALL:
            return self, 1
        return replace(self, num_workers=SMALL, num_requests=REQUESTS[self.trace, self.model]), times

    @property
    def cost(self) -> StepCost:
        shape, num_devices = DEVICES[self.model]
        return roofline_cost(shape, H100_SXM, num_devices=num_devices)

    @property
    def promises(self) -> dict[Promise, SloClass]:
        """What is judged beside TTFT."""
        promises: dict[Promise, SloClass] = {}
        if self.tpot_s is not None:
            promises["tpot"] = SloClass(name="tpot", tpot_s=self.tpot_s)
        if self.gap_s is not None:
            promises["gap"] = SloClass(name="gap", gap_s=self.gap_s)
        return promises

    def requests(self, first: int, load: float) -> Iterable[TraceRequest]:
        """The trace's requests from `first` on, or drawn ones of that seed."""
        named = _named(self.trace, self.path, first, self.num_requests, self.seed if self.has_tenants else None)
        return scaled(named, load=load)

    def kind(self, request: TraceRequest) -> str:
        """What lengths and tenants are told apart by where they are counted; here nothing."""
        return ""

    def slo(self) -> SloConfig:
        cost = self.cost

        def ttft_s(num_tokens: int) -> float:
            return max(TTFT_S, self.stretch * cost.prefill_s(num_tokens, 0.0, BUDGET))

        classes = tuple(
            SloClass(name=length_class(n), ttft_s=ttft_s(n), tpot_s=self.tpot_s, gap_s=self.gap_s) for n in LENGTHS
        )
        return SloConfig(classes=classes, default=classes[0].name)


@lru_cache(maxsize=16)  # they are played again and again at other loads
def _named(
    trace: TraceFormat, path: Path | None, first: int, num_requests: int, seed: int | None
) -> Sequence[TraceRequest]:
    """The requests at load 1, with their classes, and tenants by the seed."""
    if path is None:
        plain = islice(draw_requests(WORKLOADS[trace], first), num_requests)
    else:
        plain = islice(_read(path, trace), first, first + num_requests)
    return [
        replace(r, slo_class=length_class(r.prompt_tokens), tenant="" if seed is None else tenant_of(r, seed))
        for r in plain
    ]


@lru_cache(maxsize=2)
def _read(path: Path, trace: TraceFormat) -> Sequence[TraceRequest]:
    return list(read_trace(path, trace))


def length_class(num_tokens: int) -> str:
    return f"up to {next((n for n in LENGTHS if num_tokens <= n), LENGTHS[-1])}"


def play(
    setting: Setting, router: str, layout: Layout, load: float, first: int, watch: Watch = lambda record: None
) -> SimulationResult:
    requests = setting.requests(first, load)
    return simulate(config_of(setting, router, layout), requests, _router(router, layout), watch)


def counted(setting: Setting, router: str, layout: Layout, load: float, first: int) -> Counts:
    """All countings of one simulation, which ends as soon as all of them are decided."""
    counts = Counts(setting.requests(first, load), setting.promises, stops=True, kind=setting.kind)
    with suppress(DecidedError):
        play(setting, router, layout, load, first, counts.see)
    return counts


def _router(name: str, layout: Layout) -> Router:
    return LIMITS[name][layout.limits]() if layout.limits else _ROUTERS[name]()


def config_of(setting: Setting, router: str, layout: Layout) -> SimulationConfig:
    """The cluster of that layout under a router of that name."""
    model, num_devices = DEVICES[setting.model]
    layer_token_s = model.kv_bytes_per_token / model.num_layers / LINK_BYTES_PER_S

    def shape(token_budget: int) -> WorkerShape:
        return WorkerShape(
            cost=measured(setting.cost, setting.noise),
            kv_tokens=kv_capacity_tokens(model, H100_SXM, num_devices=num_devices),
            token_budget=token_budget,
            max_num_seqs=MAX_NUM_SEQS,
            block_size=BLOCK_TOKENS[setting.trace],
            handoff_token_s=layer_token_s,
            pulled_token_s=layer_token_s * (model.num_layers - 1) if router in PULLS else 0.0,
            step_noise=setting.noise,
            acceptance=setting.acceptance,
        )

    return SimulationConfig(
        num_prefill=layout.num_prefill,
        num_decode=layout.num_decode,
        prefill=shape(BUDGET),
        decode=shape(layout.budget),
        slo=setting.slo(),
        declared_tokens=setting.declared_tokens,
        max_returns=setting.max_returns,
        promises_steps=layout.is_paced,
        reserves_late=router in PULLS | LANDS,
        seed=1000 * setting.seed,
    )
