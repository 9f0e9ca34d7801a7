"""One waiting task, woken by what arrives or by a deadline that mostly moves on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.gateway.wakeup import Wakeup
from tests.support.waiting import HANGS_S, eventually


def test_what_rang_before_the_wait_ends_it_once() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        wakeup.set()
        wakeup.set()
        await wakeup.wait()
        with pytest.raises(TimeoutError):
            await wakeup.wait(time.monotonic() + 0.01)

    asyncio.run(main())


def test_a_ring_ends_the_wait() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        waiting = asyncio.create_task(wakeup.wait(time.monotonic() + HANGS_S))
        await asyncio.sleep(0)  # it begins to wait
        wakeup.set()
        await asyncio.wait_for(waiting, HANGS_S / 2)
        wakeup.close()

    asyncio.run(main())


def test_a_deadline_holds_though_an_earlier_one_was_set_for_the_timer() -> None:
    """The timer of the first wait goes off during the second, whose deadline is later."""

    async def main() -> None:
        wakeup = Wakeup()
        asyncio.get_running_loop().call_soon(wakeup.set)  # however late: before any timer that is set from here on
        await wakeup.wait(time.monotonic() + 0.02)
        later = time.monotonic() + 0.1
        with pytest.raises(TimeoutError):
            await wakeup.wait(later)
        assert time.monotonic() >= later - 0.002  # timers have the resolution of the loop's clock

    asyncio.run(main())


def test_what_arrives_in_the_turn_of_the_deadline_is_not_late() -> None:
    """As after a turn that was long: the token that was missed lies in the socket already."""

    async def main() -> None:
        wakeup = Wakeup()
        now = time.monotonic()
        waiting = asyncio.create_task(wakeup.wait(now - 2))
        await asyncio.sleep(0)  # it begins to wait
        asyncio.get_running_loop().call_at(now - 1, wakeup.set)  # both are due in the next turn, this one behind
        await asyncio.wait_for(waiting, HANGS_S)

    asyncio.run(main())


def test_an_earlier_deadline_replaces_a_later_one() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        waiting = asyncio.create_task(wakeup.wait(time.monotonic() + 600))
        await asyncio.sleep(0)  # it begins to wait
        wakeup.set()
        await waiting
        early = asyncio.create_task(wakeup.wait(time.monotonic() + 0.01))
        await eventually(early.done)
        with pytest.raises(TimeoutError):
            early.result()

    asyncio.run(main())


def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        waiting = asyncio.create_task(wakeup.wait(time.monotonic() + 60))
        await asyncio.sleep(0)  # it begins to wait
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        wakeup.set()
        await asyncio.wait_for(wakeup.wait(), HANGS_S)
        wakeup.close()

    asyncio.run(main())


def test_a_thousand_waits_with_deadlines_that_move_on_set_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        wakeup = Wakeup()
        loop = asyncio.get_running_loop()
        set_at: list[float] = []
        call_at = loop.call_at

        def counted(when: float, *rest: Any, **options: Any) -> asyncio.TimerHandle:
            set_at.append(when)
            return call_at(when, *rest, **options)

        monkeypatch.setattr(loop, "call_at", counted)
        for _ in range(1_000):
            loop.call_soon(wakeup.set)
            await wakeup.wait(time.monotonic() + 300)
        wakeup.close()
        assert len(set_at) == 1

    asyncio.run(main())
