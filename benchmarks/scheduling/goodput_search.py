"""The highest load that a router serves under a counting, and the layout, steps and limits with which it serves most.

One simulation at a load answers all countings, is kept, and is never made again. Loads that searches try lie on one
grid, so that those for different countings meet the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Final

from benchmarks.common.part import Json, note
from benchmarks.scheduling.goodput_counting import Count, Promise
from benchmarks.scheduling.goodput_kept import Kept
from benchmarks.scheduling.goodput_setting import (
    Layout,
    ModelName,
    Setting,
    candidates,
    counted,
    with_limits,
)
from cluster.simulation.workload.traces import TraceFormat
from cluster.slo.countings import COUNTINGS, Counting

FACTOR: Final = 1.5
WIDTH: Final = FACTOR**0.5  # of a bracket
LEAST: Final = 1 / 32  # of the load where a search begins: below, nothing is served
MOST_LOAD: Final = 1e5  # few requests may be served though they come all at once
BEGIN: Final[dict[TraceFormat, float]] = {"mooncake": 0.2, "azure": 2.0}  # loads per worker where a search begins
SPEED: Final[dict[ModelName, float]] = {"8b": 1.0, "70b": 0.4}  # about, of a worker
_FINALISTS: Final = 2  # layouts for which the router's own limits are tried


Serves = Callable[[float], bool]
Goal = tuple[Promise, Counting]


@dataclass(frozen=True, slots=True)
class Bracket:
    """`low` is served, `high` is not. 0 and 0 where the least load is too much."""

    low: float
    high: float

    def halved(self, serves: Serves, times: int) -> Bracket:
        low, high = self.low, self.high
        for _ in range(times if low else 0):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if serves(middle) else (low, middle)
        return Bracket(low, high)


def bracketed(serves: Serves, begin: float, factor: float) -> Bracket:
    """Bracket the highest load that is served, from `begin` on, by factors."""
    low, high = begin, begin * factor
    if serves(low):
        while high < MOST_LOAD and serves(high):
            low, high = high, high * factor
        return Bracket(low, high)
    low, high = low / factor, low
    while not serves(low):
        low, high = low / factor, low
        if low < LEAST * begin:
            return Bracket(0.0, 0.0)
    return Bracket(low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """`first`: the slice that layouts and limits are tuned on, of the half of the trace that is not reported. A large
    cluster takes over what suits a small one. `given`: layouts of routers for which none is looked for, of the small
    cluster."""

    setting: Setting
    first: int
    kept: Kept
    given: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        return BEGIN[self.setting.trace] * self.setting.num_workers * SPEED[self.setting.model]

    def counts(self, router: str, layout: Layout, load: float, first: int) -> Mapping[Goal, Count]:
        """What one simulation says, which may have been made before."""
        load = float(f"{load:.9g}")  # the grid's loads are reached by different ways

        def find() -> Json:
            results = counted(self.setting, router, layout, load, first).results()
            return {f"{promise}: {counting}": asdict(count) for (promise, counting), count in results.items()}

        of = {**self.setting.key(), "router": router, "layout": asdict(layout), "load": load, "first": first}
        found = self.kept.find(of, find)
        return {
            (promise, counting): Count(**found[f"{promise}: {counting}"])
            for promise in self.setting.promises
            for counting in COUNTINGS
        }

    def tuned(self, router: str, goal: Goal) -> tuple[Layout, float]:
        """What serves most on the slice for that, and the load at which it was seen to: first among layouts and steps,
        then among the router's own limits."""
        small, times = self.setting.small()
        if router in self.given:
            return self.given[router].times(times), self.begin
        on_small = Search(setting=small, first=self.first, kept=self.kept)
        ranked = on_small._ranked(router, goal, candidates(router, small.num_workers), on_small.begin)
        finalists = [option for layout, _ in ranked[:_FINALISTS] for option in with_limits(router, layout)]
        if len(finalists) > len(ranked[:_FINALISTS]):
            ranked = on_small._ranked(router, goal, finalists, ranked[0][1] or on_small.begin)
        note(f"{small.trace}, {router}, {' '.join(goal)}: {ranked[0][0]} at {ranked[0][1]:.3g}")
        layout, load = ranked[0]
        return layout.times(times), times * (load or on_small.begin)

    def _ranked(self, router: str, goal: Goal, options: Sequence[Layout], load: float) -> list[tuple[Layout, float]]:
        """The layouts, the one that serves the highest load first. All are tried at higher and higher loads until one
        is left, or at lower ones until one serves."""

        def shares(options: Sequence[Layout]) -> dict[Layout, Count]:
            return {option: self.counts(router, option, load, self.first)[goal] for option in options}

        found = shares(options)
        while not any(count.serves for count in found.values()) and load > LEAST * self.begin:
            load /= FACTOR
            found = shares(options)
        highest = dict.fromkeys(options, 0.0)
        while load < MOST_LOAD:
            left = [option for option, count in found.items() if count.serves]
            if not left:
                break
            highest |= dict.fromkeys(left, load)
            if len(left) == 1:
                break
            load *= WIDTH
            found |= shares(left)
            found = {option: found[option] for option in left}
        at_end = {option: found[option].share if option in found else 0.0 for option in options}
        order = sorted(options, key=lambda option: (highest[option], at_end[option]), reverse=True)
        return [(option, highest[option]) for option in order]

    def highest(self, router: str, layout: Layout, first: int, goal: Goal, steps: int, begin: float = 0.0) -> Bracket:
        """The highest load served on the slice at `first`, to within a factor of `WIDTH`, halved so often. `begin`:
        where it is expected."""

        def serves(load: float) -> bool:
            return self.counts(router, layout, load, first)[goal].serves

        return bracketed(serves, begin or self.begin, WIDTH).halved(serves, steps)


@dataclass(frozen=True, slots=True)
class Spread:
    """How the results of several runs spread."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(round(min(values), 3), round(median(values), 3), round(max(values), 3))


def with_seed(search: Search, seed: int) -> Search:
    return replace(search, setting=replace(search.setting, seed=seed))
