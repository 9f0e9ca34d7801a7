"""The highest load that a router serves with `ATTAINMENT` of the requests in time, and the layout that serves most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.cells import Report
from benchmarks.goodput_kept import Kept
from benchmarks.goodput_setting import ATTAINMENT, Layout, ModelName, Setting, attainment, layouts
from benchmarks.summary import Json
from cluster.simulation.traces import TraceFormat

FACTOR: Final = 1.5
LEAST_LOAD: Final = 1e-3
MOST_LOAD: Final = 1e5  # few requests may be served though they come all at once
BEGIN: Final[dict[TraceFormat, float]] = {"mooncake": 0.2, "azure": 2.0}  # loads per worker where a search begins
SPEED: Final[dict[ModelName, float]] = {"8b": 1.0, "70b": 0.4}  # about, of a worker


def highest_load(serves: Callable[[float], bool], begin: float, steps: int, factor: float = FACTOR) -> float:
    """That is served: bracketed by factors from `begin` on, then the bracket is halved `steps` times. 0 where the least
    load is too much."""
    low, high = begin, begin * factor
    if serves(low):
        while high < MOST_LOAD and serves(high):
            low, high = high, high * factor
    else:
        low, high = low / factor, low
        while not serves(low):
            low, high = low / factor, low
            if low < LEAST_LOAD:
                return 0.0
    for _ in range(steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Suited:
    """`load`: the highest that was tried and served while looking for it."""

    layout: Layout
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """`first`: the slice that layouts are chosen on. A large cluster takes over the shares that suit a small one."""

    setting: Setting
    first: int
    kept: Kept

    @property
    def begin(self) -> float:
        return BEGIN[self.setting.trace] * self.setting.num_workers * SPEED[self.setting.model]

    def suited(self, router: str) -> Suited:
        small, times = self.setting.small()
        on_small = Search(setting=small, first=self.first, kept=self.kept)

        def find() -> Json:
            found = on_small.look(router)
            layout = found.layout
            return {"layout": [layout.num_prefill, layout.num_decode, layout.budget], "load": found.load}

        found = self.kept.find({**small.key(), "layout of": router, "slice": self.first}, find)
        num_prefill, num_decode, budget = found["layout"]
        layout = Layout(num_prefill=times * num_prefill, num_decode=times * num_decode, budget=budget)
        return Suited(layout=layout, load=times * found["load"])

    def look(self, router: str) -> Suited:
        """All layouts at higher and higher loads, until one is left; or at lower ones, until one serves."""
        options = layouts(router, self.setting.num_workers, self.setting.tpot_s)
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
            load *= FACTOR**0.5
            if len(options) == 1:
                break
            served = shares()
        return Suited(layout=best, load=load / FACTOR**0.5)

    def highest(self, router: str, suited: Suited, first: int, steps: int) -> Report:
        """The `load`, of the slice at `first`: to within `FACTOR`, halved `steps` times."""

        def serves(load: float) -> bool:
            return attainment(self.setting, router, suited.layout, load, first) >= ATTAINMENT

        def find() -> Json:
            return {"load": highest_load(serves, suited.load, max(0, steps - 1), FACTOR**0.5)}

        of = {"router": router, "layout": str(suited.layout), "slice": first, "steps": steps}
        return self.kept.find({**self.setting.key(), **of}, find)
