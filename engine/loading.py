"""Brings a model up on a device: weights, KV memory, pool and runner, sized once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.block_pool import BlockPool
from engine.kv_cache import KVCache, KVLayout
from engine.model_store import resolve_model
from engine.runner import ModelRunner, load_runner

DtypeName = Literal["auto", "float32", "bfloat16"]

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a worker loads. Exactly one of `kv_bytes` and `kv_blocks` is set; None elsewhere means the default.

    `max_model_len` is bounded by what the model was made for and by what the KV memory holds.
    """

    model_ref: str
    model_name: str
    dtype: DtypeName = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    layers_per_group: int | None = None
    kv_bytes: int | None = None
    kv_blocks: int | None = None
    num_threads: int | None = None
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, with the one pool that owns its KV blocks. `fingerprint` tells models apart."""

    name: str
    fingerprint: str
    runner: ModelRunner
    block_pool: BlockPool
    max_model_len: int
    prefix_caching: bool

    @property
    def kv_cache(self) -> KVCache:
        return self.runner.kv_cache

    @property
    def layout(self) -> KVLayout:
        return self.kv_cache.layout

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.runner.config.eos_token_ids)


def load_model(config: EngineConfig) -> LoadedModel:
    """Fetch the model if need be and load it. Raises ValueError where the configuration cannot be met."""
    folder = resolve_model(config.model_ref)
    runner = load_runner(
        folder,
        dtype=_dtype(config.dtype, folder),
        block_size=config.block_size,
        layers_per_group=config.layers_per_group,
        num_blocks=config.kv_blocks,
        kv_bytes=config.kv_bytes,
        num_threads=config.num_threads,
    )
    return LoadedModel(
        name=config.model_name,
        fingerprint=model_fingerprint(folder),
        runner=runner,
        block_pool=BlockPool(runner.kv_cache.num_blocks),
        max_model_len=_max_model_len(config, runner),
        prefix_caching=config.prefix_caching,
    )


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over the model's configuration and samples of its weights: equal for equal checkpoints.

    Samples, because hashing all of a large checkpoint would take longer than loading it.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as weights:
            for index in range(_NUM_SAMPLES):
                weights.seek(size * index // _NUM_SAMPLES)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _dtype(name: DtypeName, folder: Path) -> torch.dtype:
    if name == "auto":
        raw = json.loads((folder / "config.json").read_text())
        stated = raw.get("dtype") or raw.get("torch_dtype")
        name = "float32" if stated == "float32" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _max_model_len(config: EngineConfig, runner: ModelRunner) -> int:
    layout = runner.kv_cache.layout
    held = runner.kv_cache.num_blocks // layout.num_layer_groups * layout.block_size
    made_for = runner.config.max_position_embeddings
    wanted = config.max_model_len or min(made_for, held)
    if wanted > made_for:
        raise ValueError(f"max_model_len is {wanted}, but the model was made for {made_for} tokens; lower it")
    if wanted > held:
        raise ValueError(
            f"max_model_len is {wanted}, but the KV memory holds {held} tokens; lower it or give more KV memory"
        )
    return wanted
