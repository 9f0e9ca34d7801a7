"""Wake-ups at deadlines: the last one armed, and none after the end."""

from __future__ import annotations

import asyncio
import time

from kv_transfer.connections.event_loops import DeadlineTimer
from tests.support.waiting import eventually


async def test_it_wakes_at_the_deadline_armed_last() -> None:
    woken: list[float] = []
    timer = DeadlineTimer(lambda: woken.append(time.monotonic()))
    timer.arm(time.monotonic() + 3600)
    deadline = time.monotonic() + 0.01
    timer.arm(deadline)
    await eventually(lambda: woken)
    assert woken[0] >= deadline - 0.001  # the loop's clock may be that coarse


async def test_a_deadline_of_none_disarms_it() -> None:
    woken: list[None] = []
    timer = DeadlineTimer(lambda: woken.append(None))
    timer.arm(time.monotonic())
    timer.arm(None)
    await asyncio.sleep(0.02)
    assert not woken


async def test_what_is_armed_after_the_end_does_not_wake() -> None:
    """A slab under way reports its end to a sender that has stopped, and must not start its keep-alives anew."""
    woken: list[None] = []
    timer = DeadlineTimer(lambda: woken.append(None))
    timer.arm(time.monotonic() + 0.01)
    timer.stop()
    timer.arm(time.monotonic())
    await asyncio.sleep(0.03)
    assert not woken
