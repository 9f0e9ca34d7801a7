"""Brings a model up on a device: weights, KV memory, pool and runner, sized once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.kv_cache import KVCache, KVLayout
from engine.runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, with the one pool that owns its KV blocks."""

    name: str
    runner: ModelRunner
    kv_cache: KVCache
    block_pool: BlockPool
    max_model_len: int
    eos_token_ids: frozenset[int]

    @property
    def layout(self) -> KVLayout:
        return self.kv_cache.layout
