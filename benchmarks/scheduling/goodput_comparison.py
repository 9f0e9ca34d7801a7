"""Legato and the baselines on one cluster, one trace and one promise: highest loads under each counting; overload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Final

from benchmarks.common.part import Json, note
from benchmarks.report.cells import Report
from benchmarks.scheduling.goodput_counting import Counts, Promise
from benchmarks.scheduling.goodput_kept import Kept
from benchmarks.scheduling.goodput_search import WIDTH, Goal, Search, Spread, with_seed
from benchmarks.scheduling.goodput_setting import Layout, Setting, play
from cluster.simulation.plan.demand import demand_of
from cluster.simulation.records import RequestRecord
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.countings import COUNTINGS, HEADLINE, Counting
from engine.cost_model.step_cost import StepCost, StepWork

OVERLOADS: Final = (1.0, 2.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`tuning`: the slice that layouts and limits are chosen on; `slices`: those that are reported, each with `seeds`
    seeds of its own. `variants`: of Legato, the first of which is compared. `given`: see `Search`. `steps`: how often
    brackets of a factor of `WIDTH` are halved."""

    setting: Setting
    tuning: int
    slices: Sequence[int]
    seeds: int
    steps: int
    variants: Sequence[str]
    baselines: Sequence[str]
    countings: Sequence[Counting] = COUNTINGS
    with_overload: bool = False
    kept: Kept
    given: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def name(self) -> str:
        setting = self.setting
        targets = {"mean": setting.tpot_s, "gaps": setting.gap_s}
        told = [f"{what} of {1000 * target_s:g} ms" for what, target_s in targets.items() if target_s is not None]
        return ", ".join([setting.trace, setting.model, f"{setting.num_workers} workers", *told])

    def run(self) -> Json:
        setting = self.setting
        [promise] = setting.promises
        countings = {counting: self._counting((promise, counting)) for counting in self.countings}
        return {
            "trace": setting.trace,
            "source": "drawn" if setting.path is None else "trace",
            "model": setting.model,
            "workers": setting.num_workers,
            "requests": setting.num_requests,
            "promise": promise,
            "target_ms": round(1000 * ((setting.tpot_s if promise == "tpot" else setting.gap_s) or 0.0), 3),
            "runs": self._runs,
            "resolution": round(WIDTH ** (0.5**self.steps) - 1.0, 3),
            "given_layouts": sorted(router for router in (*self.variants, *self.baselines) if router in self.given),
            "bounds": [[round(load, 2) for load in bounds(setting, first)] for first in self.slices],
            "countings": countings,
            "overload": self._overload(countings) if self.with_overload and HEADLINE in countings else {},
        }

    @property
    def _search(self) -> Search:
        return Search(setting=self.setting, first=self.tuning, kept=self.kept, given=self.given)

    @property
    def _runs(self) -> list[tuple[int, int]]:
        """Slice and seed."""
        return [(first, seed) for seed, first in enumerate(first for first in self.slices for _ in range(self.seeds))]

    def _counting(self, goal: Goal) -> Report:
        """The best of the others is that with the highest median; `ratio` and `ratio_by_run` are to that one,
        `ratio_to_variants` to the other variants."""
        rows = {router: self._row(router, goal) for router in (*self.variants, *self.baselines)}
        best = max(self.baselines, key=lambda router: median(rows[router]["highest_load"]))
        own, other = (rows[router]["highest_load"] for router in (self.variants[0], best))
        ratios = [mine / yours for mine, yours in zip(own, other, strict=True) if yours]
        variants = {variant: rows[variant]["median"] for variant in self.variants[1:]}
        return {
            "routers": rows,
            "best_baseline": best,
            "ratio": round(median(own) / median(other), 2) if median(other) else None,
            "ratio_by_run": asdict(Spread.of(ratios)) if ratios else None,
            "ratio_to_variants": {variant: round(median(own) / load, 2) for variant, load in variants.items() if load},
        }

    def _row(self, router: str, goal: Goal) -> Report:
        """`lacks`: what was counted in the first run at the least load that is not served."""
        layout, begin = self._search.tuned(router, goal)
        brackets = [
            with_seed(self._search, seed).highest(router, layout, first, goal, self.steps, begin)
            for first, seed in self._runs
        ]
        loads = [round(bracket.low, 3) for bracket in brackets]
        note(f"{self.setting.trace}, {' '.join(goal)}, {router}, {layout}: {loads}")
        first, seed = self._runs[0]
        too_much = brackets[0].high
        lacks = with_seed(self._search, seed).counts(router, layout, too_much, first)[goal] if too_much else None
        return {
            "layout": str(layout),
            "chosen": asdict(layout),
            "highest_load": loads,
            **asdict(Spread.of(loads)),
            "lacks": None if lacks is None else asdict(lacks),
        }

    def _overload(self, countings: Mapping[Counting, Report]) -> Report:
        """Legato and the best of the others by the headline, at Legato's own highest load and at multiples of it."""
        rows, best = countings[HEADLINE]["routers"], countings[HEADLINE]["best_baseline"]
        load, [promise] = rows[self.variants[0]]["median"], self.setting.promises

        def find(router: str, layout: Layout, factor: float) -> Json:
            return _overloaded(self.setting, router, layout, factor * load, self.slices[0], promise)

        told: Report = {"load": load}
        for router in (self.variants[0], best):
            layout = Layout(**rows[router]["chosen"])
            told[router] = [
                self.kept.find(
                    {
                        **self.setting.key(),
                        "overload": router,
                        "layout": asdict(layout),
                        "load": round(factor * load, 4),
                    },
                    partial(find, router, layout, factor),
                )
                for factor in OVERLOADS
            ]
        return told


def _overloaded(setting: Setting, router: str, layout: Layout, load: float, first: int, promise: Promise) -> Json:
    """Shares in time under each counting, and requests in time per second while new clients came. Of those who came
    back when they were told to: how many were then served in time."""
    counts = Counts(setting.requests(first, 1.0), setting.promises)
    records: list[RequestRecord] = play(setting, router, layout, load, first, counts.see).records
    until = max(record.first_arrival_s for record in records)
    good = sum(r.is_met and r.first_token_s is not None and r.first_token_s <= until for r in records)
    back = [r for r in records if r.arrival_s > r.first_arrival_s]
    results = counts.results()
    return {
        "load": round(load, 3),
        "goodput": round(good / until, 3),
        "shares": {counting: results[promise, counting].share for counting in COUNTINGS},
        "least": results[promise, HEADLINE].least,
        "came_back": len(back),
        "came_back_in_time": round(sum(r.is_met for r in back) / len(back), 3) if back else None,
    }


def bounds(setting: Setting, first: int) -> tuple[float, float]:
    """The load at which the workers' time is used up, whoever places requests: what no router can exceed for long.

    If all requests of the slice are served, and if only the nine tenths are that take the least time. Steps are taken
    to be as full as the promise allows, the prefix cache to forget nothing and to be shared by all, and nobody to wait.
    A run that ends can be a little beyond it: what is still to be decoded then no longer competes with newcomers.
    """
    requests = list(setting.requests(first, 1.0))
    demand = demand_of(requests)
    seconds = sorted(_work_s(setting.cost, r, *prompt) for r, prompt in zip(requests, demand.prompts, strict=True))
    # A step at least every so often, and each takes `base_s` whatever is in it.
    step_s = min(target for target in (setting.tpot_s, setting.gap_s) if target is not None)
    capacity_s = setting.num_workers * demand.duration_s * (1.0 - setting.cost.base_s / step_s)
    return capacity_s / sum(seconds), capacity_s / sum(seconds[: round(0.9 * len(seconds))])


def _work_s(cost: StepCost, request: TraceRequest, num_new: int, num_cached: int) -> float:
    """All that the request adds to steps that are there anyway."""
    prefill = StepWork.of_prefill(num_new, num_cached)
    decodes = request.output_tokens - 1
    context = decodes * (request.prompt_tokens + request.output_tokens / 2)
    return cost.step_s(prefill + StepWork(decodes=decodes, context_tokens=context)) - cost.base_s
