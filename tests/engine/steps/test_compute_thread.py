"""The thread that computes steps: order, errors, cancelled jobs, and that it keeps nothing alive."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from engine.steps.loop import ComputeThread
from tests.support.waiting import HANGS_S, eventually


@pytest.fixture
def thread() -> Iterator[ComputeThread]:
    thread = ComputeThread("compute")
    yield thread
    thread.shutdown()


class Thing:
    """Something to be let go."""


def raise_with(thing: Thing) -> None:
    raise ValueError(f"{type(thing).__name__} is wrong")


async def test_jobs_run_in_order_in_one_thread_of_that_name(thread: ComputeThread) -> None:
    done: list[tuple[int, str]] = []

    def note(n: int) -> None:
        done.append((n, threading.current_thread().name))

    futures = [thread.submit(functools.partial(note, n)) for n in range(50)]
    await asyncio.gather(*futures)
    assert done == [(n, "compute") for n in range(50)]


async def test_a_result_and_an_error_come_to_who_waits(thread: ComputeThread) -> None:
    assert await thread.submit(lambda: 7) == 7
    with pytest.raises(ValueError, match="Thing is wrong"):
        await thread.submit(lambda: raise_with(Thing()))
    assert await thread.submit(lambda: 8) == 8


async def test_a_job_that_is_cancelled_before_its_turn_is_not_run(thread: ComputeThread) -> None:
    may_end, ran = threading.Event(), list[str]()
    first = thread.submit(lambda: may_end.wait(HANGS_S))
    second, third = thread.submit(lambda: ran.append("second")), thread.submit(lambda: ran.append("third"))
    second.cancel()
    may_end.set()
    assert await first
    await third
    assert ran == ["third"]


async def test_the_result_of_a_job_that_is_cancelled_while_it_runs_is_dropped(thread: ComputeThread) -> None:
    began, may_end = threading.Event(), threading.Event()

    def job() -> None:
        began.set()
        may_end.wait(HANGS_S)

    future = thread.submit(job)
    await eventually(began.is_set, what="the job did not begin")
    future.cancel()
    may_end.set()
    assert await thread.submit(lambda: "next") == "next"
    assert future.cancelled()


async def test_shutdown_waits_for_the_jobs_so_far() -> None:
    thread, done = ComputeThread("compute"), list[int]()
    futures = [thread.submit(functools.partial(done.append, n)) for n in range(10)]
    await asyncio.to_thread(thread.shutdown)
    assert done == list(range(10))
    await asyncio.gather(*futures)


def test_a_thread_that_never_computed_can_be_shut_down() -> None:
    ComputeThread("compute").shutdown()


def test_a_job_that_outlives_its_loop_harms_nobody() -> None:
    thread, may_end, ended = ComputeThread("compute"), threading.Event(), threading.Event()

    async def leave() -> None:
        thread.submit(lambda: may_end.wait(HANGS_S))
        thread.submit(ended.set)

    asyncio.run(leave())
    may_end.set()
    thread.shutdown()
    assert ended.is_set(), "the thread died of the closed loop"


async def test_what_jobs_and_errors_hold_is_let_go_without_the_garbage_collector(thread: ComputeThread) -> None:
    gc.disable()
    try:
        held = [Thing(), Thing()]
        gone = [weakref.ref(thing) for thing in held]
        await thread.submit(functools.partial(id, held[0]))
        future = thread.submit(functools.partial(raise_with, held[1]))
        await asyncio.wait([future])
        assert isinstance(future.exception(), ValueError)
        del future
        held.clear()
        await eventually(lambda: [ref() for ref in gone] == [None, None], what="something holds what the jobs had")
    finally:
        gc.enable()
