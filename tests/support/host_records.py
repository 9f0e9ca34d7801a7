"""What a host segment tells its neighbours, read from its file as they read it."""

from __future__ import annotations

import mmap
import os

from engine.kv.block_pool import BlockKey
from kv_transfer.tiers.host.index import SegmentIndex
from kv_transfer.tiers.host.segment import HostSegment
from kv_transfer.tiers.host.segment_files import open_segment


def published(segment: HostSegment) -> dict[BlockKey, int]:
    """The blocks that can be found now."""
    return {key: block for key, (block, _) in published_digests(segment).items()}


def published_digests(segment: HostSegment) -> dict[BlockKey, tuple[int, int]]:
    """The same, and the digest that goes with each block."""
    opened = open_segment(segment.path)
    assert opened is not None, f"{segment.path} has no name any more"
    fd, shape = opened
    try:
        memory = memoryview(mmap.mmap(fd, shape.num_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    return {record.key: (block, record.digest) for block, record in SegmentIndex(memory, shape).valid_records()}
