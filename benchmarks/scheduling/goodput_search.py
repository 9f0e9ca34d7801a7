"""The highest load that a router serves with `ATTAINMENT` of the requests in time, and the layout that serves most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple

from benchmarks.common.summary import Json
from benchmarks.scheduling.goodput_kept import Kept
from benchmarks.scheduling.goodput_setting import ATTAINMENT, Layout, ModelName, Setting, attainment, layouts
from cluster.simulation.workload.traces import TraceFormat

FACTOR: Final = 1.5
WIDTH: Final = FACTOR**0.5  # of a bracket
LEAST_LOAD: Final = 1e-3
MOST_LOAD: Final = 1e5  # few requests may be served though they come all at once
BEGIN: Final[dict[TraceFormat, float]] = {"mooncake": 0.2, "azure": 2.0}  # loads per worker where a search begins
SPEED: Final[dict[ModelName, float]] = {"8b": 1.0, "70b": 0.4}  # about, of a worker


Serves = Callable[[float], bool]


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
    """From `begin` on, by factors."""
    low, high = begin, begin * factor
    if serves(low):
        while high < MOST_LOAD and serves(high):
            low, high = high, high * factor
        return Bracket(low, high)
    low, high = low / factor, low
    while not serves(low):
        low, high = low / factor, low
        if low < LEAST_LOAD:
            return Bracket(0.0, 0.0)
    return Bracket(low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suited:
    """`load`: the highest that was tried and served while looking for it."""

    layout: Layout
    load: float


class Found(NamedTuple):
    load: Bracket
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """`first`: the slice that layouts are chosen on. A large cluster takes over the shares that suit a small one.
    `given`: layouts of routers for which none is looked for, of the small cluster."""

    setting: Setting
    first: int
    kept: Kept
    given: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        return BEGIN[self.setting.trace] * self.setting.num_workers * SPEED[self.setting.model]

    def suited(self, router: str) -> Suited:
        small, times = self.setting.small()
        if router in self.given:
            return Suited(layout=self.given[router].times(times), load=self.begin)
        on_small = Search(setting=small, first=self.first, kept=self.kept)

        def find() -> Json:
            found = on_small.look(router)
            layout = found.layout
            return {"layout": [layout.num_prefill, layout.num_decode, layout.budget], "load": found.load}

        found = self.kept.find({**small.key(), "layout of": router, "slice": self.first}, find)
        num_prefill, num_decode, budget = found["layout"]
        layout = Layout(num_prefill=num_prefill, num_decode=num_decode, budget=budget)
        return Suited(layout=layout.times(times), load=times * found["load"])

    def look(self, router: str) -> Suited:
        """All layouts at higher and higher loads, until one is left; or at lower ones, until one serves."""
        options = layouts(router, self.setting.num_workers, self.setting.cost, self.setting.tpot_s)
        load, best = self.begin, options[0]

        def shares() -> list[float]:
            return [attainment(self.setting, router, option, load, self.first) for option in options]

        served = shares()
        while max(served) < ATTAINMENT and load > LEAST_LOAD:
            load /= FACTOR
            served = shares()
        while max(served) >= ATTAINMENT and load < MOST_LOAD:
            best = options[served.index(max(served))]
            options = [option for option, share in zip(options, served, strict=True) if share >= ATTAINMENT]
            load *= WIDTH
            if len(options) == 1:
                break
            served = shares()
        return Suited(layout=best, load=load / WIDTH)

    def coarsely(self, router: str, suited: Suited, first: int) -> Found:
        """On the slice at `first`, to within a factor of `WIDTH`."""
        serves = self._serves(router, suited.layout, first)
        return self._find(router, suited.layout, first, 0, lambda: bracketed(serves, suited.load, WIDTH))

    def finely(self, router: str, layout: Layout, first: int, coarse: Bracket, steps: int) -> Found:
        """The same, halved so often."""
        serves = self._serves(router, layout, first)
        return self._find(router, layout, first, steps, lambda: coarse.halved(serves, steps))

    def _find(self, router: str, layout: Layout, first: int, steps: int, find: Callable[[], Bracket]) -> Found:
        of = {"router": router, "layout": str(layout), "slice": first, "steps": steps}
        found = self.kept.find({**self.setting.key(), **of}, lambda: asdict(find()))
        return Found(Bracket(found["low"], found["high"]), found["commit"])

    def _serves(self, router: str, layout: Layout, first: int) -> Serves:
        return lambda load: attainment(self.setting, router, layout, load, first) >= ATTAINMENT
