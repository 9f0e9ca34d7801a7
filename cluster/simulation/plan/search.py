"""The smallest cluster that serves a trace within its targets, searched for by simulation.

Knows layouts and how the search goes on; what a layout achieves is for the caller to find out. Of more workers it is
assumed that they do no worse: the search brackets, then halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from cluster.simulation.plan.demand import Estimate

_HOPELESS: Final = 0.5  # of the share asked for: no other split of as many workers is tried
_MOST_SPLITS: Final = 5


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Workers of `devices_per_worker` each. Without prefill workers, decode workers compute prompts too."""

    devices_per_worker: int
    num_prefill: int
    num_decode: int

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def num_gpus(self) -> int:
        return self.devices_per_worker * self.num_workers

    def __str__(self) -> str:
        pools = f"{self.num_prefill} prefill + {self.num_decode} decode" if self.num_prefill else ""
        return f"{pools or f'{self.num_decode} colocated'}, TP {self.devices_per_worker}"


class OutOfTime(Exception):
    """The time for the search is over, in the middle of a simulation."""


class Search:
    """`achieves(layout)` is the share of requests that it serves in time; it may raise OutOfTime.

    After `run`: `shares` of all layouts tried. `answer` None: none was enough. `is_complete` False: time was over
    before every smaller cluster had been looked at.
    """

    def __init__(self, achieves: Callable[[Layout], float], *, share: float, max_gpus: int) -> None:
        self.shares: dict[Layout, float] = {}
        self.answer: Layout | None = None
        self.is_complete = False
        self._achieves = achieves
        self._share = share
        self._max_gpus = max_gpus

    @property
    def next_cheaper(self) -> Layout | None:
        """The best of those that are smaller than the answer, or of all where there is none."""
        smaller = [x for x in self.shares if self.answer is None or x.num_gpus < self.answer.num_gpus]
        return max(smaller, key=lambda layout: (self.shares[layout], -layout.num_gpus), default=None)

    def run(self, guesses: Iterable[Estimate]) -> None:
        """Search from each guess, one for a degree, the one with the fewest GPUs first."""
        try:
            for guess in sorted(guesses, key=lambda g: (g.num_gpus, g.devices_per_worker)):
                self._through(guess)
        except OutOfTime:
            return
        self.is_complete = True

    def _through(self, guess: Estimate) -> None:
        """All numbers of workers that would be cheaper than what is known."""
        gpus = self._max_gpus if self.answer is None else self.answer.num_gpus - 1
        most = gpus // guess.devices_per_worker
        if not most:
            return
        fails, meets = self._bracket(guess, most)
        while meets is not None and meets - fails > 1:
            middle = (fails + meets) // 2
            if self._suffice(guess, middle):
                meets = middle
            else:
                fails = middle

    def _bracket(self, guess: Estimate, most: int) -> tuple[int, int | None]:
        """The most workers known to fail, and the fewest known to meet; None: not even `most` do."""
        fails, meets, step = 0, None, 1
        tried = min(most, guess.workers)
        while meets is None and fails < most:
            if self._suffice(guess, tried):
                meets = tried
            else:
                fails, tried, step = tried, min(most, tried + step), 2 * step
        while meets is not None and fails < meets - 1 and fails == 0:
            tried = max(1, meets - step)
            if self._suffice(guess, tried):
                meets, step = tried, 2 * step
            else:
                fails = tried
        return fails, meets

    def _suffice(self, guess: Estimate, num_workers: int) -> bool:
        """Under some split: climbs from the guessed one, then tries all of them as one pool."""
        colocated = Layout(guess.devices_per_worker, 0, num_workers)
        if num_workers == 1:
            return self._meets(colocated)

        def split(num_prefill: int) -> Layout:
            return Layout(guess.devices_per_worker, num_prefill, num_workers - num_prefill)

        middle = min(num_workers - 1, max(1, round(num_workers * guess.prefill_share)))
        tried = [middle]
        while not self._meets(split(middle)):
            if self.shares[split(middle)] < _HOPELESS * self._share:
                break
            nearby = [p for p in (middle + 1, middle - 1) if 1 <= p < num_workers and p not in tried]
            if not nearby or len(tried) >= _MOST_SPLITS:
                break
            tried.append(nearby[0])
            self._meets(split(nearby[0]))
            middle = max(tried, key=lambda p: self.shares[split(p)])
        return self._meets(split(middle)) or self._meets(colocated)

    def _meets(self, layout: Layout) -> bool:
        if layout not in self.shares:
            self.shares[layout] = self._achieves(layout)
        is_enough = self.shares[layout] >= self._share
        if is_enough and (self.answer is None or layout.num_gpus < self.answer.num_gpus):
            self.answer = layout
        return is_enough
