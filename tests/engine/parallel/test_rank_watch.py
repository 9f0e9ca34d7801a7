"""Who notices that ranks are gone or late, while the leader waits for its device."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from multiprocessing import Pipe
from queue import Queue
from types import SimpleNamespace
from typing import cast

import pytest

from engine.parallel import processes
from engine.parallel.processes import APART, GroupWatch, RankProcess, end_of
from tests.support.waiting import HANGS_S, wait_until


class Process:
    """As much of a rank's process as its watch looks at."""

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank
        self.connection, self.theirs = Pipe()
        self._code: int | None = None

    def left(self, code: int | None) -> Process:
        """Its connection has ended, and itself with this exit code, unless it is still about to."""
        self.theirs.close()
        self._code = code
        return self

    def exit_code(self, deadline: float) -> int | None:
        return self._code


class Place:
    """A mark that a device comes to when it is told to; it counts how often it was asked for."""

    def __init__(self) -> None:
        self.reached = False
        self.num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        return self.reached

    def was_asked(self) -> bool:
        return self.num_asked > 0


def watch(within_s: float) -> tuple[GroupWatch, Process, Queue[str]]:
    process, lost = Process(), Queue[str]()
    return GroupWatch([cast(RankProcess, process)], lost.put, within_s=within_s), process, lost


def test_the_end_of_a_process_is_told_of_though_nothing_is_expected() -> None:
    watching, process, lost = watch(HANGS_S)
    process.theirs.close()
    assert lost.get(timeout=HANGS_S) == "one of its processes has ended"
    watching.close()


def test_a_device_that_does_not_come_to_a_mark_is_told_of() -> None:
    watching, _, lost = watch(0.05)
    watching.expect(Place().query)
    assert "did not come to the end of a step within 0.05 s" in lost.get(timeout=HANGS_S)
    watching.close()


def test_of_many_marks_the_last_one_is_looked_at_next(monkeypatch: pytest.MonkeyPatch) -> None:
    are_given = threading.Event()  # before that no time passes
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if are_given.is_set() else 0.0)
    monkeypatch.setattr(processes, "time", clock)
    watching, _, lost = watch(0.05)
    first, between, last = Place(), Place(), Place()
    first.reached = True
    for place in (first, between, last):
        watching.expect(place.query)
    are_given.set()
    assert "did not come" in lost.get(timeout=HANGS_S)
    assert (first.num_asked, between.num_asked, last.num_asked) == (1, 0, 1)
    watching.close()


def test_marks_that_were_come_to_are_forgotten() -> None:
    watching, _, lost = watch(0.05)
    for _ in range(2):  # the watch goes back to sleep, and wakes again
        place = Place()
        place.reached = True
        watching.expect(place.query)
        wait_until(place.was_asked)
    assert lost.empty()
    watching.close()


def test_nothing_is_told_of_after_the_end() -> None:
    before = set(threading.enumerate())
    watching, process, lost = watch(HANGS_S)
    watching.close()
    watching.close()
    process.theirs.close()
    assert lost.empty() and set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ([-signal.SIGABRT, -signal.SIGKILL, APART], "has ended by signal 9"),
        ([None, -signal.SIGABRT, -signal.SIGKILL], "has ended by signal 9"),
        ([APART, 1, -signal.SIGABRT], "has ended with exit code 1; its reason is in the worker's log"),
        ([APART, -signal.SIGABRT, None], "has ended by signal 6"),
        ([None, APART, APART], "has left the group"),
        ([APART, APART, APART], None),
    ],
)
def test_of_ranks_that_have_ended_the_one_is_named_that_others_cannot_have_ended(
    codes: list[int | None], told: str | None
) -> None:
    """In whichever order their ends show."""
    reason = next((code for code in codes if told and str(abs(code or 0)) in told), None)
    for order in itertools.permutations(range(3)):
        ranks = [Process(number + 1) for number in range(3)]
        for number in order:
            ranks[number].left(codes[number])
        seen = end_of([cast(RankProcess, ranks[number]) for number in order], within_s=HANGS_S)
        assert seen == (None if told is None else f"rank {codes.index(reason) + 1} {told}")


def test_a_rank_that_stays_where_others_were_left_alone_does_not_answer() -> None:
    ranks = [Process(1).left(APART), Process(2)]
    assert end_of([cast(RankProcess, rank) for rank in ranks], within_s=0.05) == "rank 2 does not answer"
