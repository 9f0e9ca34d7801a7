"""Processor time for tests, in a unit that means the same on every machine: turns of a loop in Python.

A slow machine is slow at both, and what others take of a busy one does not count.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

_TURNS = 200_000


def in_loop_turns(work: Callable[[], object], rounds: int = 1) -> float:
    """What `work` takes in turns of `total += 1.0`, in the best of so many rounds, without garbage collection."""
    return min(_thread_s(work) for _ in range(rounds)) / turn_s()


def turn_s() -> float:
    """Seconds that a turn of `total += 1.0` takes here, at best."""
    return min(_thread_s(_loop) for _ in range(3)) / _TURNS


class Stepped:
    """Awaits `work`, and notes for how long each of its steps, from one wait to the next, has held the event loop:
    seconds of processor time, without garbage collection (a replica's heap is settled: `cluster.app`). It is not to be
    cancelled."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self.steps_s: list[float] = []

    def __await__(self) -> Generator[Any, None, None]:
        while True:
            waits_for: object = None
            try:
                with _uncollected():
                    began = time.thread_time()
                    try:
                        waits_for = self._work.send(None)
                    finally:
                        self.steps_s.append(time.thread_time() - began)
            except StopIteration:
                return
            yield waits_for


def _thread_s(work: Callable[[], object]) -> float:
    with _uncollected():
        began = time.thread_time()
        work()
        return time.thread_time() - began


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: it takes the longer the more other tests have left behind in this process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _loop() -> float:
    total = 0.0
    for _ in range(_TURNS):
        total += 1.0
    return total
