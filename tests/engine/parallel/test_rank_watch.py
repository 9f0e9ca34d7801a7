"""Who notices that ranks are gone or late, while the leader waits for its device."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from queue import Queue
from typing import cast

from engine.parallel.processes import GroupWatch, RankProcess
from tests.support.waiting import HANGS_S, wait_until


class Process:
    """As much of a rank's process as its watch looks at."""

    def __init__(self) -> None:
        self.connection, self.theirs = Pipe()


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


def test_of_many_marks_the_last_one_is_looked_at_next() -> None:
    watching, _, lost = watch(0.05)
    first, between, last = Place(), Place(), Place()
    first.reached = True
    for place in (first, between, last):
        watching.expect(place.query)
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
