"""Legato and the baselines on one cluster and one trace: highest loads; by length of prompt; under overload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Final

from benchmarks.common.part import note
from benchmarks.common.summary import Json
from benchmarks.report.cells import Report
from benchmarks.scheduling.goodput_kept import Kept
from benchmarks.scheduling.goodput_search import WIDTH, Found, Search, Suited
from benchmarks.scheduling.goodput_setting import ATTAINMENT, Layout, Setting, play
from cluster.simulation.plan.demand import demand_of
from cluster.simulation.records import Record
from cluster.simulation.workload.traces import TraceRequest
from engine.cost_model.step_cost import StepCost, StepWork

OVERLOADS: Final = (1.0, 1.5, 2.0, 3.0)
MAX_RETURNS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`slices`: the first one is for choosing layouts. `variants`: of Legato; the first one is told of by class.
    `given`: see `Search`. `steps`: how often brackets of a factor of `WIDTH` are halved."""

    setting: Setting
    slices: Sequence[int]
    steps: int
    variants: Sequence[str]
    baselines: Sequence[str]
    with_overload: bool = False
    with_classes: bool = True
    kept: Kept
    given: Mapping[str, Layout] = field(default_factory=dict)

    def run(self) -> Json:
        found = self._rows()
        loads = {router: found[router]["highest_load"] for router in found}
        best = max(self.baselines, key=lambda router: fmean(loads[router]))
        suited = {router: self._search.suited(router).layout for router in (self.variants[0], best)}
        told = fmean(loads[self.variants[0]])
        setting = self.setting
        note(f"{setting.trace}, {setting.model}, {setting.num_workers} workers: the best of the others is {best}")
        return {
            "trace": setting.trace,
            "source": "drawn" if setting.path is None else "trace",
            "model": setting.model,
            "workers": setting.num_workers,
            "requests": setting.num_requests,
            "slices": list(self.slices[1:]),
            "resolution": round(WIDTH ** (0.5**self.steps) - 1.0, 3),
            "given_layouts": sorted(router for router in found if router in self.given),
            "routers": {router: found[router] for router in (*self.variants, *self.baselines)},
            "best_baseline": best,
            "ratio": {router: _ratio(loads[router], loads[best]) for router in self.variants},
            "ratio_by_slice": self._ratio_by_slice(loads),
            "bounds": [[round(load, 2) for load in bounds(setting, first)] for first in self.slices[1:]],
            "spans_s": [round(span_s(setting, first), 1) for first in self.slices[1:]],
            "by_class": self._by_class(told, suited) if self.with_classes else {},
            "overload": self._overload(told, suited[self.variants[0]]) if self.with_overload else [],
        }

    @property
    def _search(self) -> Search:
        return Search(setting=self.setting, first=self.slices[0], kept=self.kept, given=self.given)

    def _rows(self) -> dict[str, Report]:
        """Of the others only those are looked at closely that may be the best on a slice."""
        slices = range(len(self.slices) - 1)
        coarse = {router: self._coarsely(router) for router in (*self.baselines, *self.variants)}
        best = [max(coarse[router][at].load.low for router in self.baselines) for at in slices]
        rows = {}
        for router, found in coarse.items():
            layout = self._search.suited(router).layout
            for at, first in enumerate(self.slices[1:]):
                if router in self.variants or found[at].load.high > best[at]:
                    found[at] = self._search.finely(router, layout, first, found[at].load, self.steps)
            rows[router] = _row(layout, found)
            note(f"{self.setting.trace}, {router}, {layout}: {rows[router]['highest_load']}")
        return rows

    def _coarsely(self, router: str) -> list[Found]:
        suited, found = self._search.suited(router), list[Found]()
        for first in self.slices[1:]:
            found.append(self._search.coarsely(router, suited, first))
            suited = Suited(layout=suited.layout, load=found[-1].load.low or suited.load)
        return found

    def _ratio_by_slice(self, loads: dict[str, list[float]]) -> list[float | None]:
        """Beside the best of the others on the same slice, which need not be the same one."""
        bests = [max(each) for each in zip(*(loads[router] for router in self.baselines), strict=True)]
        return [_ratio([own], [best]) for own, best in zip(loads[self.variants[0]], bests, strict=True)]

    def _by_class(self, load: float, suited: dict[str, Layout]) -> Report:
        """Shares in time at Legato's highest load, of the prompts of each length."""

        def find(router: str, layout: Layout) -> Json:
            classes = play(self.setting, router, layout, load, self.slices[1]).summary.classes
            return {"classes": {c.name: [c.num_requests, round(c.attainment, 3)] for c in classes}}

        told: Report = {"load": round(load, 3)}
        for router, layout in suited.items():
            of = self._of("classes", router, layout, load)
            told[router] = self.kept.find(of, partial(find, router, layout))["classes"]
        return told

    def _overload(self, capacity: float, layout: Layout) -> list[Report]:
        def find(factor: float) -> Json:
            load, first = factor * capacity, self.slices[1]
            return _overloaded(
                factor, play(self.setting, "legato", layout, load, first, max_returns=MAX_RETURNS).records
            )

        return [
            self.kept.find(self._of("overload", "legato", layout, factor * capacity), partial(find, factor))
            for factor in OVERLOADS
        ]

    def _of(self, what: str, router: str, layout: Layout, load: float) -> Json:
        about = {what: router, "layout": str(layout), "load": round(load, 3), "slice": self.slices[1]}
        return {**self.setting.key(), **about}


def _row(layout: Layout, found: Sequence[Found]) -> Report:
    return {
        "layout": str(layout),
        "highest_load": [round(each.load.low, 3) for each in found],
        "not_served": [round(each.load.high, 3) for each in found],
        "commits": sorted({each.commit for each in found}),
    }


def _ratio(own: Sequence[float], other: Sequence[float]) -> float | None:
    return round(fmean(own) / fmean(other), 2) if fmean(other) else None


def _overloaded(factor: float, records: Sequence[Record]) -> Json:
    """While new clients came: requests in time per second. Of those who came back: how many were served in time."""
    until = max(record.first_arrival_s for record in records)
    good = sum(r.is_met and r.first_token_s is not None and r.first_token_s <= until for r in records)
    back = [r for r in records if r.arrival_s > r.first_arrival_s]
    return {
        "times_capacity": factor,
        "goodput": round(good / until, 3),
        "came_back": len(back),
        "came_back_in_time": round(sum(r.is_met for r in back) / len(back), 3) if back else None,
    }


def bounds(setting: Setting, first: int) -> tuple[float, float]:
    """The load at which the workers' time is used up, whoever places requests: what no router can exceed for long.

    If all requests of the slice are served, and if only those that take the least time are. Steps are taken to be as
    full as TPOT allows, the prefix cache to forget nothing and to be shared by all, and nobody to wait. A run that ends
    can be a little beyond it: what is still to be decoded then no longer competes with newcomers.
    """
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
