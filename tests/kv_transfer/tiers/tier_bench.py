"""Real tiers with recognisable bytes: what a worker's device would have computed for a prefix hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from threading import Event

import numpy as np
import torch

from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, KVLayout
from kv_transfer.messages.fields import SourceName
from kv_transfer.tiers.base import ColumnViews, TierMemory
from tests.support.waiting import HANGS_S

LAYOUT = KVLayout(num_layers=5, layers_per_group=2, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.bfloat16)
GROUPS = LAYOUT.num_layer_groups


def hashes(count: int, name: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{name}{index}".encode(), digest_size=16).digest() for index in range(count)]


def content(digest: bytes, group: int) -> bytes:
    """The bytes of a block."""
    seed = int.from_bytes(digest[:8], "little") + group
    return np.random.default_rng(seed).bytes(LAYOUT.block_bytes)


def tier(num_columns: int) -> TierMemory:
    """Its memory is full of what nobody must ever see."""
    cache = KVCache(LAYOUT, num_columns * GROUPS)
    cache.tensor.fill_(torch.nan)
    return TierMemory(cache, BlockPool(cache.num_blocks))


def fill(memory: TierMemory, digests: Sequence[bytes]) -> None:
    """Compute, publish, release."""
    lease = memory.pool.lease(len(digests) * GROUPS)
    keys = [(digest, group) for digest in digests for group in range(GROUPS)]
    for block, key in zip(lease.blocks, keys, strict=True):
        memory.views([block])[0][:] = content(*key)
        memory.pool.publish(lease, block, key)
    memory.pool.release(lease)


def holds(memory: TierMemory, digest: bytes) -> bool:
    """The whole column, and its bytes are right: anything else than all or nothing is an error."""
    blocks = memory.column(digest)
    if blocks is None:
        return False
    for group, view in enumerate(memory.views(blocks)):
        assert bytes(view) == content(digest, group), f"the block of group {group} holds other bytes"
    return True


class ScriptedSource:
    """Holds what it is told, counts its loads, and can be held up, fail, or be found wanting."""

    assumed_bytes_per_s = 1e6

    def __init__(self, digests: Sequence[bytes] = (), name: SourceName = "disk") -> None:
        self.name = name
        self.digests = set(digests)
        self.gone: set[bytes] = set()  # still believed to be there
        self.loads: list[bytes] = []
        self.begun, self.go = Event(), Event()
        self.go.set()
        self.before_load: Callable[[], None] = lambda: None

    def holds(self, digest: bytes) -> bool:
        return digest in self.digests

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        self.begun.set()
        assert self.go.wait(HANGS_S)
        self.before_load()
        self.loads += hashes
        for digest, views in zip(hashes, destinations, strict=True):
            for group, view in enumerate(views):
                view[:] = content(digest, group) if digest not in self.gone else bytes(len(view))
        return [digest in self.digests and digest not in self.gone for digest in hashes]
