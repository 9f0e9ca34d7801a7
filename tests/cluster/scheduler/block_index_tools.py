"""A log of blocks over pools, and names for what these hold, for tests of the block index."""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from kv_transfer.tiers.block_events import BlockEventLog

LAYER_GROUPS = 2


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def store_columns(pool: BlockPool, numbers: list[int], groups: int = LAYER_GROUPS) -> None:
    """Compute these columns, publish them, and release them."""
    lease = pool.lease(len(numbers) * groups)
    keys = [(digest_of(number), group) for number in numbers for group in range(groups)]
    for block, key in zip(lease.blocks, keys, strict=True):
        pool.publish(lease, block, key)
    pool.release(lease)


def log_with_pool(num_blocks: int = 8, layer_groups: int = LAYER_GROUPS) -> tuple[BlockEventLog, BlockPool]:
    log, pool = BlockEventLog("worker", layer_groups=layer_groups, epoch=7), BlockPool(num_blocks)
    log.watch("device", pool)
    return log, pool
