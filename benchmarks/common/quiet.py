"""Measures while nothing else computes: waits for that, notices when it was not so, and measures again.

Two threads in step lose up to a time slice at every product when a third wants their core, so a result beside another
busy process is not slower by its share but by several times. Patience is bounded; what was disturbed to the end is kept
and counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.common.part import Json, note

T = TypeVar("T")

PATIENCE_VARIABLE = "LEGATO_BENCHMARK_PATIENCE_S"
DISTURBED_FROM = 0.15  # CPUs that others use, on average
SAMPLE_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class QuietMachine:
    """Runs a part's work while the machine is quiet. `patience_s`: in all, for waiting and for what was measured in
    vain."""

    def __init__(self, patience_s: float | None = None) -> None:
        given = float(os.environ.get(PATIENCE_VARIABLE, "60")) if patience_s is None else patience_s
        self._patience_s = given
        self._num_kept = 0
        self._num_disturbed = 0  # of those kept
        self._num_repeated = 0

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work` from a quiet moment; the last one, when patience is at its end."""
        while True:
            self._wait()
            watch = _Watch()
            result = work()
            if self._keep(watch):
                return result

    async def run_async(self, work: Callable[[], Awaitable[T]]) -> T:
        """`run` beside others on the event loop."""
        while True:
            await asyncio.to_thread(self._wait)
            watch = _Watch()
            result = await work()
            if self._keep(watch):
                return result

    def in_turns(self, works: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
        """The results of works that were run in turns, A, B, B, A, ..., so that what drifts on the machine meets all
        alike."""
        results: dict[str, list[T]] = {name: [] for name in works}
        for number in range(repeats):
            for name in list(works)[:: 1 if number % 2 == 0 else -1]:
                results[name].append(self.run(works[name]))
        return results

    def report(self) -> Json:
        return {"measured": self._num_kept, "of_these_disturbed": self._num_disturbed, "repeated": self._num_repeated}

    def _wait(self) -> None:
        waited_s = 0.0
        while self._patience_s > 0:
            watch = _Watch()
            time.sleep(SAMPLE_S)
            if not watch.disturbed:
                break
            self._patience_s -= SAMPLE_S
            waited_s += SAMPLE_S
        if waited_s > 5:
            note(f"waited {waited_s:.0f} s for other processes to let the cores alone")

    def _keep(self, watch: _Watch) -> bool:
        disturbed = watch.disturbed
        if disturbed and self._patience_s > 0:
            self._patience_s -= watch.elapsed_s
            self._num_repeated += 1
            return False
        self._num_kept += 1
        self._num_disturbed += disturbed
        return True


class _Watch:
    """CPU time since its making: the machine's, and that of this process and all below it."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def disturbed(self) -> bool:
        foreign_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        # Both are counted in ticks of 10 ms, ours once for each process.
        return foreign_s > DISTURBED_FROM * self.elapsed_s + 0.05


def _busy_s() -> float:
    """All CPUs; time that a hypervisor took away counts."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def _own_s() -> float:
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):  # each with those below it that have ended
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
