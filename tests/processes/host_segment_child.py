"""A worker of the host segment tests, in a process of its own.

It opens a segment, restores it into a pool, does what its role says, and sends the segment's path and whether it was
adopted. Then it waits to be killed or for the pipe to end, and closes.

* `hold`: fills every block.
* `tear`: fills every block, then takes one for new content and stops when half of that is written.
* `rewrite`: goes on filling blocks with content of random numbers until it is killed; the first before it sends.
* `adopt`: says that it is ready, waits for a word, then opens, and does nothing with what it restored.
"""

from __future__ import annotations

import contextlib
import random
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import BlockKey, BlockPool
from kv_transfer.tiers.host import segment as host_segment
from kv_transfer.tiers.host.segment import HostSegment
from kv_transfer.transports.shared_memory.segment import SegmentError

BLOCK_BYTES = 1 << 16
NUM_BLOCKS = 8
NUM_NUMBERS = 24  # more than there are blocks, so that content comes and goes
FINGERPRINT = "a model"


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def key_of(number: int) -> BlockKey:
    """Of a column of one group."""
    return hash_of(number), 0


def number_of(key: BlockKey) -> int:
    return int.from_bytes(key[0], "big")


def content_of(number: int, num_bytes: int = BLOCK_BYTES) -> npt.NDArray[np.uint64]:
    """What every block published under the number's key holds; never what a new segment holds."""
    return np.full(num_bytes // 8, (number + 1) * 0x9E3779B97F4A7C15 % 2**64, dtype=np.uint64)


def open_segment(folder: Path, scope: str, num_blocks: int = NUM_BLOCKS) -> HostSegment:
    """Blocks are published at once, large as they are; `test_late_digests` has those that are not."""
    host_segment.MAX_BYTES_AT_ONCE = BLOCK_BYTES
    return HostSegment.open(folder, scope, FINGERPRINT, BLOCK_BYTES, num_blocks)


def restored_pool(segment: HostSegment) -> BlockPool:
    pool = BlockPool(NUM_BLOCKS, observers=[segment])
    pool.restore(segment.restored())
    return pool


def words(segment: HostSegment, block: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(segment.block(block), dtype=np.uint64)


def fill(segment: HostSegment, pool: BlockPool, number: int) -> int:
    """Put the number's content into a block that was free or evicted; returns the block."""
    lease = pool.lease(1)
    [block] = lease.blocks
    words(segment, block)[:] = content_of(number)
    pool.publish(lease, block, key_of(number))
    pool.release(lease)
    return block


def run(role: str, folder: Path, scope: str, pipe: Connection) -> None:
    if role == "adopt":
        pipe.send("ready")
        pipe.recv()
    segment = open_segment(folder, scope)
    pool = restored_pool(segment)
    if role in ("hold", "tear"):
        for number in range(NUM_BLOCKS):
            fill(segment, pool, number)
    if role == "tear":
        [block] = pool.lease(1).blocks
        words(segment, block)[: BLOCK_BYTES // 16] = 0
    if role == "rewrite" and pool.find(key_of(0)) is None:
        fill(segment, pool, 0)
    pipe.send((segment.path, segment.adopted))
    while role == "rewrite":
        number = random.randrange(NUM_NUMBERS)
        if pool.find(key_of(number)) is None:
            fill(segment, pool, number)
    with contextlib.suppress(EOFError):
        pipe.recv()
    segment.close(unlink=True)


def run_under(limit: int, num_bytes: int, folder: Path, scope: str, num_blocks: int, pipe: Connection) -> None:
    """Sends why a process that may have so many bytes of files, or more of memory than it has, makes no segment of so
    many blocks of a MiB."""
    if limit == resource.RLIMIT_AS:
        num_bytes += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(limit, (num_bytes, num_bytes))
    try:
        HostSegment.open(folder, scope, FINGERPRINT, 1 << 20, num_blocks)
    except SegmentError as error:
        pipe.send(str(error))
