"""How many threads compute a step: all, but for small steps as many as turned out to be fastest.

Memory bounds a step of few tokens, and one core may read nearly as fast as all. Where others need the cores too, each
thread more is one more that all have to wait for at every product. Nobody can know that beforehand, so it is tried, by
turns, for as long as steps come. Results do not depend on it: see docs/decisions/0015-threads-of-a-step.md.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kernels.cpu.thread_team import set_team

_TRIAL_STEPS: Final = 4  # the first of which only warms up
_RECENT_STEPS: Final = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512  # steps between trials: twice as many after each that brought nothing
_GAIN: Final = 0.95  # a step with more threads has to take less than so much of what it takes with fewer


class StepThreads:
    """Chooses how many threads compute a step, by how fast steps of its size were. `few_tokens`: steps of more have
    work for all."""

    def __init__(self, num_threads: int, few_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_threads = num_threads
        self.few_tokens = few_tokens
        self._clock = clock
        self._of_size: dict[int, FastestCount] = {}

    @contextlib.contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """Have the chosen number of threads compute a step of so many tokens, which this thread computes within the
        context."""
        if self.num_threads == 1 or num_tokens > self.few_tokens:
            set_team(self.num_threads)
            yield
            return
        fastest = self._of_size.setdefault(num_tokens.bit_length(), FastestCount(self.num_threads))
        count = fastest.next()
        set_team(count)
        began = self._clock()
        yield
        fastest.took(count, self._clock() - began)


class FastestCount:
    """The best number of threads for steps that are alike, from all down to one by halves."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = most
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._trial: list[float] = []
        self._pause = _FIRST_PAUSE
        self._until_trial = _FIRST_PAUSE
        self._tries_fewer = True

    def next(self) -> int:
        return self._candidate() if self._until_trial == 0 else self.count

    def took(self, count: int, seconds: float) -> None:
        """A step with `count` threads, as `next` had it."""
        if count == self.count:
            self._recent.append(seconds)
            self._until_trial -= 1
            return
        self._trial.append(seconds)
        if len(self._trial) == _TRIAL_STEPS:
            self._judge(count)

    def _candidate(self) -> int:
        fewer = self.count > 1 and (self._tries_fewer or self.count == self._most)
        return self.count // 2 if fewer else min(self._most, self.count * 2)

    def _judge(self, tried: int) -> None:
        now_s, tried_s = statistics.median(self._recent), statistics.median(self._trial[1:])
        is_faster = tried_s <= now_s if tried < self.count else tried_s < now_s * _GAIN
        if is_faster:
            self.count, self._pause = tried, _FIRST_PAUSE
            self._recent = deque(self._trial[1:], maxlen=_RECENT_STEPS)
        else:
            self._tries_fewer = not self._tries_fewer
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._until_trial = self._pause
        self._trial = []
