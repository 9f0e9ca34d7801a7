"""Columns on their way down and up the tiers, with sources and sinks of the tests."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest

from kv_transfer.tiers import prefix_tiers
from tests.kv_transfer.tiers.prefix_bench import SlowSink, Tiers, opened
from tests.kv_transfer.tiers.tier_bench import GROUPS, ScriptedSource, fill, hashes, holds
from tests.support.waiting import HANGS_S, eventually

# --- down ---


async def test_what_the_device_has_computed_outlives_its_eviction() -> None:
    async with opened(Tiers()) as bench:
        digests = hashes(6)
        fill(bench.device, digests)
        bench.tiers.stored(digests)
        await bench.settled()
        fill(bench.device, hashes(8, "other"))
        assert not any(bench.device.column(digest) for digest in digests)
        assert all(holds(bench.host, digest) for digest in digests)
        assert bench.tiers.missing(digests + hashes(1, "new")).num_ready == 6


async def test_each_block_is_copied_once() -> None:
    async with opened(Tiers()) as bench:
        digests = hashes(6)
        fill(bench.device, digests)
        for count in (2, 4, 6, 6):
            bench.tiers.stored(digests[:count])
        await bench.settled()
        bench.tiers.stored(digests)
        await bench.settled()
        assert bench.tiers.write_through.copied_columns == 6


async def test_blocks_are_not_reused_while_they_are_copied() -> None:
    """The device is asked for all it has; what is being copied is not given."""
    async with opened(Tiers()) as bench:
        digests = hashes(8)
        fill(bench.device, digests)
        bench.tiers.stored(digests[:3])
        assert bench.device.pool.num_available == 5 * GROUPS
        await bench.settled()
        assert bench.device.pool.num_available == 8 * GROUPS


async def test_without_room_on_the_host_the_first_columns_are_kept() -> None:
    async with opened(Tiers(host_columns=3)) as bench:
        held = bench.host.pool.lease(2 * GROUPS - 1)
        digests = hashes(4)
        fill(bench.device, digests)
        bench.tiers.stored(digests)
        bench.host.pool.release(held)
        await bench.settled()
        assert [holds(bench.host, digest) for digest in digests] == [True, False, False, False]
        assert bench.tiers.write_through.skipped_columns == 3


async def test_a_queue_that_is_full_drops() -> None:
    async with opened(Tiers(max_queued_blocks=2 * GROUPS)) as bench:
        digests = hashes(5)
        fill(bench.device, digests)
        for digest in digests:
            bench.tiers.stored([digest])
        await bench.settled()
        assert [holds(bench.host, digest) for digest in digests] == [True, True, False, False, False]
        bench.tiers.stored(digests[2:4])
        await bench.settled()
        assert holds(bench.host, digests[3])


async def test_columns_that_rest_on_the_host_in_part_are_completed() -> None:
    """As a sequence leaves them whose layers are split over the tiers."""
    async with opened(Tiers()) as bench:
        digests = hashes(2)
        fill(bench.device, digests)
        blocks = bench.device.column(digests[0])
        assert blocks is not None
        lease = bench.host.pool.lease(1)
        bench.host.views(lease.blocks)[0][:] = bench.device.views([blocks[1]])[0]
        bench.host.pool.publish(lease, lease.blocks[0], (digests[0], 1))
        bench.host.pool.release(lease)
        assert bench.tiers.missing(digests).num_ready == 2
        bench.tiers.stored(digests)
        assert bench.host.pool.num_held == 2 * GROUPS - 1, "room for what is copied, and for no more"
        await bench.settled()
        assert all(holds(bench.host, digest) for digest in digests)


async def test_the_sink_gets_whole_columns_and_keeps_their_blocks_until_it_is_done() -> None:
    sink = SlowSink(room=2)
    async with opened(Tiers(sink=sink)) as bench:
        digests = hashes(3)
        fill(bench.device, digests)
        bench.tiers.stored(digests)
        await eventually(lambda: bench.device.pool.num_leases == 0)
        assert list(sink.written) == digests[:2]
        assert bench.host.pool.num_held == 2 * GROUPS
        sink.room = 3
        bench.tiers.stored(digests)  # the host has it all; what the sink lacks is offered again
        assert list(sink.written) == digests
        for done in sink.done:
            done()


# --- up ---


async def test_the_sink_hears_that_a_prefix_was_used_after_it_has_got_its_last_column() -> None:
    sink = SlowSink()
    async with opened(Tiers(sink=sink)) as bench:
        digests = hashes(6)
        fill(bench.device, digests)
        bench.tiers.stored(digests[:4])
        bench.tiers.stored(digests[4:])
        bench.tiers.used(digests)
        await eventually(lambda: bool(sink.used))
        assert sink.used == [(digests, 6)]
        for done in sink.done:
            done()


async def test_a_prefix_is_brought_up_as_far_as_somebody_has_it() -> None:
    digests = hashes(10)
    below = ScriptedSource([*digests[3:5], *digests[6:8], digests[9]])
    async with opened(Tiers(below)) as bench:
        fill(bench.device, digests[:2])
        fill(bench.host, [digests[2], digests[5]])
        plan = bench.tiers.missing(digests)
        assert (plan.num_ready, plan.num_reachable) == (3, 8)
        assert plan.load_s == pytest.approx(4 * bench.host.column_bytes / below.assumed_bytes_per_s)
        assert await bench.promote(digests) == 8
        assert below.loads == [*digests[3:5], *digests[6:8]]
        assert all(holds(bench.host, digest) for digest in digests[2:8])
        assert bench.tiers.missing(digests[:8]).load_s == 0


async def test_the_first_source_that_has_a_column_is_asked() -> None:
    digests = hashes(4)
    near, far = ScriptedSource(digests[1:3], "neighbours"), ScriptedSource(digests, "disk")
    async with opened(Tiers(near, far)) as bench:
        side_by_side_s = 2 * bench.host.column_bytes / near.assumed_bytes_per_s
        assert bench.tiers.missing(digests).load_s == pytest.approx(side_by_side_s)
        assert await bench.promote(digests) == 4
        assert (near.loads, far.loads) == (digests[1:3], [digests[0], digests[3]])


async def test_rates_are_measured() -> None:
    digests = hashes(4)
    below = ScriptedSource(digests)
    async with opened(Tiers(below)) as bench:
        before = bench.tiers.missing(digests).load_s
        await bench.promote(digests[:2])
        assert bench.tiers.missing(digests[2:]).load_s != pytest.approx(before / 2)


@pytest.mark.parametrize("failure", ["gone", "raises"])
async def test_a_source_that_fails_means_fewer_columns(failure: str) -> None:
    digests = hashes(6)
    below = ScriptedSource(digests)
    if failure == "gone":
        below.gone = {digests[2]}
    else:
        below.before_load = _raise
    async with opened(Tiers(below)) as bench:
        assert await bench.promote(digests) == (2 if failure == "gone" else 0)
        assert not holds(bench.host, digests[2])
        assert bench.tiers.failed_columns.total() == (1 if failure == "gone" else 6)


async def test_a_source_that_hangs_is_waited_for_only_so_long() -> None:
    digests = hashes(4)
    below = ScriptedSource(digests)
    async with opened(Tiers(below, load_timeout_s=0.1)) as bench:
        below.go.clear()
        promotion = asyncio.create_task(bench.promote(digests))
        await asyncio.sleep(0)
        assert below.begun.wait(HANGS_S)  # and no time passes on the loop: what has not begun by then is not loaded
        assert await promotion == 0
        assert bench.host.pool.num_held == 4 * GROUPS, "the thread still writes into them"
        assert (bench.tiers.loaded_columns["disk"], bench.tiers.failed_columns["disk"]) == (0, 4)
        below.go.set()
        await bench.settled()
        assert all(holds(bench.host, digest) for digest in digests), "what has come is kept"
        assert (bench.tiers.loaded_columns["disk"], bench.tiers.failed_columns["disk"]) == (4, 4)


async def test_after_a_load_that_came_too_late_nothing_is_worth_loading_for_a_minute_and_then_one_load_is() -> None:
    digests = hashes(8)
    below = ScriptedSource(digests)
    now = 0.0
    async with opened(Tiers(below, load_timeout_s=0.1, clock=lambda: now)) as bench:
        believed_s = bench.tiers.missing(digests[4:]).load_s
        computed_s = 10 * believed_s  # what takes longer to load is computed
        below.go.clear()
        promotion = asyncio.create_task(bench.promote(digests[:4]))
        await asyncio.sleep(0)
        assert below.begun.wait(HANGS_S)
        assert await promotion == 0
        now = 100.0
        below.go.set()
        await bench.settled()
        assert bench.tiers.missing(digests[4:]).load_s > computed_s
        now = 159.0
        assert bench.tiers.missing(digests[4:]).load_s > computed_s
        now = 161.0
        assert bench.tiers.missing(digests[4:]).load_s == believed_s, "else nothing would ever show that it is fast"
        below.begun.clear()
        below.go.clear()
        trial = asyncio.create_task(bench.promote(digests[4:6]))
        await asyncio.sleep(0)
        assert below.begun.wait(HANGS_S)
        assert bench.tiers.missing(digests[6:]).load_s > computed_s, "all others would wait in vain, too"
        now += believed_s / 4
        below.go.set()
        await trial
        await bench.settled()
        assert bench.tiers.missing(digests[6:]).load_s < believed_s, "one load has shown it"


async def test_a_source_that_hangs_holds_up_no_other_one() -> None:
    near, far = ScriptedSource(hashes(2), "neighbours"), ScriptedSource(hashes(2, "far"), "disk")
    async with opened(Tiers(near, far)) as bench:
        far.go.clear()
        hanging = asyncio.create_task(bench.promote(hashes(2, "far")))
        await asyncio.sleep(0)
        assert await bench.promote(hashes(2)) == 2
        far.go.set()
        assert await hanging == 2


async def test_what_is_queued_behind_a_load_that_hangs_gives_its_room_back_with_the_last_who_waits() -> None:
    digests = hashes(12)
    below = ScriptedSource(digests)
    async with opened(Tiers(below)) as bench:
        below.go.clear()
        promotion = bench.tiers.promote(digests, lambda _: pytest.fail("it was cancelled"))
        assert below.begun.wait(HANGS_S)
        assert bench.host.pool.num_held == 12 * GROUPS
        promotion.cancel()
        assert bench.host.pool.num_held == 8 * GROUPS, "the thread still writes into these"
        below.go.set()


async def test_of_a_source_that_hangs_nothing_is_wanted() -> None:
    digests = hashes(4)
    near, far = ScriptedSource(digests, "neighbours"), ScriptedSource(digests[:1], "disk")
    async with opened(Tiers(near, far, load_timeout_s=0.1)) as bench:
        near.go.clear()
        assert bench.tiers.missing(digests).num_reachable == 4
        promotion = asyncio.create_task(bench.promote(digests))
        await asyncio.sleep(0)
        assert near.begun.wait(HANGS_S)  # else its load may be recalled before it hangs
        assert await promotion == 0
        await eventually(lambda: bench.tiers.missing(digests).num_reachable == 1, what="what hangs is asked")
        near.go.set()
        await eventually(lambda: bench.tiers.missing(digests).num_ready == 4)


async def test_what_hangs_at_one_source_comes_from_another_meanwhile() -> None:
    digests = hashes(4)
    near, far = ScriptedSource(digests, "neighbours"), ScriptedSource(digests, "disk")
    now = 0.0
    async with opened(Tiers(near, far, clock=lambda: now)) as bench:
        near.go.clear()
        hanging = asyncio.create_task(bench.promote(digests))
        await asyncio.sleep(0)
        assert near.begun.wait(HANGS_S)
        now = HANGS_S + 1  # by which a load hangs; nobody's wait has ended
        far.go.clear()
        waits = [asyncio.create_task(bench.promote(digests)) for _ in range(2)]
        await asyncio.sleep(0)
        assert bench.host.pool.num_held == 8 * GROUPS, "one load from each"
        far.go.set()
        assert [await wait for wait in waits] == [4, 4]
        near.go.set()
        assert await hanging == 4


async def test_two_who_want_the_same_wait_for_one_load() -> None:
    digests = hashes(4)
    below = ScriptedSource(digests)
    async with opened(Tiers(below)) as bench:
        below.go.clear()
        waits = [asyncio.create_task(bench.promote(digests[:count])) for count in (3, 4, 2)]
        await asyncio.sleep(0)
        below.go.set()
        assert [await wait for wait in waits] == [3, 4, 2]
        assert sorted(below.loads) == sorted(digests)


async def test_a_cancelled_promotion_calls_nobody_and_loads_nothing_more() -> None:
    digests = hashes(12)
    below = ScriptedSource(digests)
    called: list[int] = []
    async with opened(Tiers(below)) as bench:
        below.go.clear()
        started = Event()
        below.before_load = started.set
        promotion = bench.tiers.promote(digests, called.append)
        promotion.cancel()
        promotion.cancel()
        below.go.set()
        await bench.settled()
        assert called == []
        assert len(below.loads) <= 8, "only the load that was under way"
        assert await bench.promote(digests) == 12


async def test_one_who_leaves_does_not_take_the_load_from_the_others() -> None:
    digests = hashes(4)
    below = ScriptedSource(digests)
    async with opened(Tiers(below)) as bench:
        below.go.clear()
        leaver = bench.tiers.promote(digests, lambda _: pytest.fail("it was cancelled"))
        stayer = asyncio.create_task(bench.promote(digests))
        await asyncio.sleep(0)
        leaver.cancel()
        below.go.set()
        assert await stayer == 4


async def test_one_who_leaves_as_another_one_is_called_is_called_no_more() -> None:
    """Both have waited for the same load. Which of them is the first is nobody's matter."""
    digests = hashes(4)
    below = ScriptedSource(digests)
    called: list[int] = []
    async with opened(Tiers(below)) as bench:

        def leave(_: int) -> None:
            called.append(len(called))
            for promotion in promotions:
                promotion.cancel()

        below.go.clear()
        promotions = [bench.tiers.promote(digests, leave) for _ in range(2)]
        below.go.set()
        await bench.settled()
        assert called == [0]


async def test_a_full_host_takes_what_fits_and_evicts_nothing_of_the_prefix() -> None:
    digests = hashes(8)
    below = ScriptedSource(digests[2:])
    async with opened(Tiers(below, host_columns=5)) as bench:
        fill(bench.host, digests[:2])
        held = bench.host.pool.lease(GROUPS)
        assert await bench.promote(digests) == 4
        bench.host.pool.release(held)


async def test_where_nothing_is_to_be_had_the_answer_still_comes() -> None:
    async with opened(Tiers()) as bench:
        fill(bench.device, hashes(2))
        assert await bench.promote(hashes(4)) == 2


async def test_closing_drops_what_is_queued() -> None:
    below = ScriptedSource(hashes(12))
    async with opened(Tiers(below)) as bench:
        fill(bench.device, hashes(8, "down"))
        bench.tiers.stored(hashes(8, "down")[:4])
        done: list[int] = []
        bench.tiers.promote(hashes(8), done.append)
        await bench.tiers.close()
        await eventually(lambda: done)


async def test_closing_gives_the_room_of_what_is_queued_back_once() -> None:
    below = ScriptedSource(hashes(12))
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with opened(Tiers(below)) as bench:
        below.go.clear()
        done: list[int] = []
        bench.tiers.promote(hashes(12), done.append)
        assert below.begun.wait(HANGS_S)
        closing = asyncio.create_task(bench.tiers.close())
        await eventually(lambda: bench.host.pool.num_held == 8 * GROUPS, what="the four that are queued have room")
        assert done == [], "the others are being loaded"
        below.go.set()
        await closing
        await bench.settled()
        assert done == [8]
    assert errors == []


async def test_closing_waits_only_so_long_for_a_load_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    below = ScriptedSource(hashes(2))
    async with opened(Tiers(below)) as bench:
        below.go.clear()
        bench.tiers.promote(hashes(2), lambda num_ready: None)
        assert below.begun.wait(HANGS_S)
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(prefix_tiers, "CLOSE_S", 0.05)
            await bench.tiers.close()
        assert bench.host.pool.num_held == 2 * GROUPS, "the thread still writes into them"
        below.go.set()


def _raise() -> None:
    raise OSError("the disk is gone")
