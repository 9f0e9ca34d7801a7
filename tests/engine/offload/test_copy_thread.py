"""The order of copies, and what becomes of those that fail or are called off."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from engine.offload.staging import CopyThread
from tests.support.waiting import HANGS_S


class Held:
    """A thread whose first job lasts until `release()`, so that what is submitted meanwhile queues up."""

    def __init__(self) -> None:
        self.thread = CopyThread()
        self.done: list[str] = []
        self._gate = threading.Event()
        self._begun = threading.Event()
        self.first = self.thread.submit(0, self._hold)
        assert self._begun.wait(HANGS_S)

    def append(self, urgency: int, name: str) -> Future[None]:
        return self.thread.submit(urgency, functools.partial(self.done.append, name))

    def _hold(self) -> None:
        self._begun.set()
        assert self._gate.wait(HANGS_S)

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.release()
    held.thread.close()


def test_the_most_urgent_goes_first_and_equals_in_order(held: Held) -> None:
    for urgency, name in ((2, "c"), (1, "a"), (2, "d"), (-1, "now"), (1, "b")):
        held.append(urgency, name)
    last = held.append(9, "last")
    held.release()
    last.result(HANGS_S)
    assert held.done == ["now", "a", "b", "c", "d", "last"]


def test_what_is_called_off_in_time_never_runs(held: Held) -> None:
    dropped = held.append(1, "dropped")
    last = held.append(2, "last")
    assert dropped.cancel()
    assert not held.first.cancel(), "what runs cannot be called off"
    held.release()
    last.result(HANGS_S)
    assert held.done == ["last"]


def test_a_failure_is_its_own_jobs_alone(held: Held) -> None:
    def fail() -> None:
        raise OSError("no such page")

    failed = held.thread.submit(1, fail)
    fine = held.append(2, "fine")
    held.release()
    with pytest.raises(OSError, match="no such page"):
        failed.result(HANGS_S)
    fine.result(HANGS_S)


def test_it_ends_after_what_was_submitted(held: Held) -> None:
    held.append(7, "late")
    held.release()
    held.thread.close()
    assert held.done == ["late"]


def test_it_may_change_tensors_made_under_inference_mode(held: Held) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)

    def change() -> None:
        tensor.add_(1)

    job = held.thread.submit(1, change)
    held.release()
    job.result(HANGS_S)
    assert tensor.tolist() == [1, 1, 1]
