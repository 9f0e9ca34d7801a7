"""Large blocks in a segment's index: found by the neighbours soon, and never with bytes that are others' by then."""

from __future__ import annotations

import random
import time
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from engine.kv.block_pool import BlockPool
from kv_transfer.tiers.host import segment as host_segment
from kv_transfer.tiers.host.index import block_digest
from kv_transfer.tiers.host.segment import HostSegment
from tests.processes.host_segments import SHARED_MEMORY, scope
from tests.support.host_records import published, published_digests
from tests.support.waiting import HANGS_S, eventually

__all__ = ["scope"]

BLOCK_BYTES = 256 * 1024
NUM_BLOCKS = 12
Key = tuple[bytes, int]


def key_of(number: int) -> Key:
    return number.to_bytes(16, "little"), number % 3


def opened(scope: str) -> tuple[HostSegment, BlockPool]:
    segment = HostSegment.open(Path(SHARED_MEMORY), scope, "large", BLOCK_BYTES, NUM_BLOCKS)
    return segment, BlockPool(NUM_BLOCKS, observers=[segment])


def compute(segment: HostSegment, pool: BlockPool, number: int) -> None:
    """Written and published by one thread, as sequences in host memory are; released."""
    lease = pool.lease(1)
    segment.block(lease.blocks[0])[:] = bytes([number % 251]) * BLOCK_BYTES
    pool.publish(lease, lease.blocks[0], key_of(number))
    pool.release(lease)


def check_records(segment: HostSegment) -> None:
    for key, (block, digest) in published_digests(segment).items():
        assert digest == block_digest(key, segment.block(block)), f"block {block} is not what is told"


async def test_large_blocks_are_found_a_little_later_and_restored(scope: str) -> None:
    segment, pool = opened(scope)
    for number in range(8):
        compute(segment, pool, number)
    await eventually(lambda: len(published(segment)) == 8)
    check_records(segment)
    segment.close(unlink=False)
    again, _ = opened(scope)
    assert again.adopted
    assert {key for _, key in again.restored()} == {key_of(number) for number in range(8)}
    again.close(unlink=True)


async def test_what_was_evicted_before_its_turn_is_not_published(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block has been given to somebody else, who writes the same content again: still not this one's turn."""
    reached, go = Event(), Event()

    def slow_digest(key: Key, content: memoryview) -> int:
        digest = block_digest(key, content)
        reached.set()
        assert go.wait(HANGS_S)
        return digest

    monkeypatch.setattr(host_segment, "block_digest", slow_digest)
    segment, pool = opened(scope)
    compute(segment, pool, 1)
    assert reached.wait(HANGS_S)
    compute(segment, pool, 2)
    pool.drop_cached()
    go.set()
    compute(segment, pool, 1)
    lease = pool.lease(NUM_BLOCKS)
    for block in lease.blocks:
        segment.block(block)[:] = bytes(BLOCK_BYTES)
    segment.close(unlink=False)
    again, _ = opened(scope)
    assert again.restored() == []
    again.close(unlink=True)


def test_closing_waits_for_the_block_in_hand_and_publishes_no_more(scope: str) -> None:
    segment, pool = opened(scope)
    for number in range(NUM_BLOCKS):
        compute(segment, pool, number)
    segment.close(unlink=False)
    before = published(segment)
    time.sleep(0.02)
    assert published(segment) == before
    again, _ = opened(scope)
    assert {key: block for block, key in again.restored()} == before
    again.close(unlink=True)


@pytest.mark.parametrize("seed", range(4))
async def test_no_record_ever_tells_of_bytes_that_are_not_there(scope: str, seed: int) -> None:
    """Blocks are published, evicted and rewritten faster than they are digested."""
    chooser = random.Random(seed)
    segment, pool = opened(scope)
    for _ in range(300):
        compute(segment, pool, chooser.randrange(40))
        if chooser.random() < 0.1:
            pool.drop_cached()
        if chooser.random() < 0.1:
            check_records(segment)
    await eventually(lambda: published(segment) == pool.findable())
    check_records(segment)
    for key, block in published(segment).items():
        number = int.from_bytes(key[0], "little")
        assert np.all(np.frombuffer(segment.block(block), dtype=np.uint8) == number % 251)
    segment.close(unlink=True)
