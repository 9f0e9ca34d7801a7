"""The index of workers' blocks over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster.scheduler.block_index import PrefixReach
from cluster.scheduler.scheduler import SchedulerPolicy
from cluster.scheduler.server import ModelRules, SchedulerServer
from kv_transfer.messages.requests import Endpoint
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.transports.base import Identity
from kv_transfer.worker.port import Registration
from tests.cluster.scheduler.block_index_tools import LAYER_GROUPS, digest_of, log_with_pool, store_columns
from tests.support.clusters.worker_reports import worker_info, worker_snapshot
from tests.support.waiting import HANGS_S, eventually


def _identity(worker_id: str) -> Identity:
    return Identity(worker_id=worker_id, node_id="node", secret=b"secret of the test", compatibility={})


def _registration(
    worker_id: str, scheduler: Callable[[], SchedulerServer], log: BlockEventLog, period_s: float
) -> Registration:
    async def locate() -> Endpoint:
        return scheduler().endpoint

    numbers = iter(range(1, 1_000_000))
    info = worker_info(worker_id, layer_groups=LAYER_GROUPS)
    return Registration(
        _identity(worker_id),
        info,
        locate_scheduler=locate,
        snapshot=lambda: worker_snapshot(worker_id, next(numbers)),
        period_s=period_s,
        events=log,
    )


@asynccontextmanager
async def _worker(server: SchedulerServer, log: BlockEventLog, period_s: float = 0.02) -> AsyncIterator[Registration]:
    registration = _registration("worker", lambda: server, log, period_s)
    registration.start()
    try:
        yield registration
    finally:
        await registration.stop()


@asynccontextmanager
async def _server() -> AsyncIterator[SchedulerServer]:
    rules = ModelRules(policy=SchedulerPolicy(stale_after_s=4 * HANGS_S))  # later than anybody is to report here
    server = SchedulerServer({"model": rules}, _identity("scheduler"), broadcast_period_s=0.05)
    await server.start("127.0.0.1")
    try:
        yield server
    finally:
        await server.stop()


async def test_the_scheduler_follows_a_worker_and_forgets_it_when_it_leaves() -> None:
    log, pool = log_with_pool(num_blocks=40)
    store_columns(pool, [1, 2, 3])
    async with _server() as server:
        index = server.scheduler.block_index
        async with _worker(server, log):
            await eventually(lambda: index.columns("worker", "device") == {digest_of(1), digest_of(2), digest_of(3)})
            pool.drop_cached()
            store_columns(pool, [4])
            await eventually(lambda: index.columns("worker", "device") == {digest_of(4)})
            assert index.longest_prefix(digest_of(4)) == {"worker": PrefixReach(device=1, host=1, disk=1)}
        await eventually(lambda: index.num_columns("worker") is None)
        assert index.longest_prefix(digest_of(4)) == {}


async def test_a_gap_is_healed_by_a_snapshot() -> None:
    log, pool = log_with_pool(num_blocks=40)
    async with _server() as server:
        index = server.scheduler.block_index
        async with _worker(server, log):
            await eventually(lambda: index.num_columns("worker") == 0)
            store_columns(pool, [1, 2])
            log.take()  # as if this report had been lost
            await eventually(lambda: index.columns("worker", "device") == {digest_of(1), digest_of(2)})


async def test_a_scheduler_that_forgot_asks_and_many_changes_do_not_wait_for_the_next_report() -> None:
    log, pool = log_with_pool(num_blocks=2 * 5000)
    async with _server() as server:
        index = server.scheduler.block_index
        async with _worker(server, log, period_s=3 * HANGS_S):
            await eventually(lambda: index.num_columns("worker") == 0)
            index.forget("worker")
            store_columns(pool, list(range(5000)))
            await eventually(lambda: index.num_columns("worker") == 5000)


async def test_a_worker_finds_a_new_scheduler_and_tells_it_everything() -> None:
    log, pool = log_with_pool(num_blocks=40)
    store_columns(pool, [1, 2])
    async with _server() as first, _server() as second:
        current = [first]
        registration = _registration("worker", lambda: current[0], log, 0.02)
        registration.start()
        try:
            await eventually(lambda: first.scheduler.block_index.num_columns("worker") == 2)
            current[0] = second
            await first.stop()
            await eventually(lambda: second.scheduler.block_index.num_columns("worker") == 2)
        finally:
            await registration.stop()
