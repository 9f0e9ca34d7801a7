"""Drives a `ModelRunner` whose sequences rest partly in host memory. All that nobody wrote is NaN, in both tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint.weights import load_weights
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, KVLayout
from engine.model.config import ModelConfig
from engine.offload.staging_plan import Blocks, StagingConfig
from engine.sequence import BlockCopy, BlockTable, SampledToken, ScheduledSequence, Sequence, StepPlan
from engine.steps.runner import ModelRunner
from tests.support.stepping import RecordingSampler, Stepper


def staged_runner(
    folder: Path,
    *,
    ring: StagingConfig | None,
    layers_per_group: int = 1,
    block_size: int = 4,
    num_blocks: int = 600,
    dtype: torch.dtype = torch.float32,
) -> tuple[ModelRunner, RecordingSampler]:
    """`num_blocks` for the sequences in each tier; the ring comes on top."""
    config = ModelConfig.from_folder(folder)
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=layers_per_group,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        latent_dim=config.latent_dim,
        block_size=block_size,
        dtype=dtype,
    )
    kv_cache = KVCache(layout, num_blocks + (ring.total_blocks if ring else 0))
    host_cache = KVCache(layout, num_blocks)
    for cache in (kv_cache, host_cache):
        cache.tensor.fill_(torch.nan)
    sampler = RecordingSampler()
    weights = load_weights(folder, config, dtype=dtype)
    return ModelRunner(config, weights, kv_cache, sampler=sampler, host_cache=host_cache, ring=ring), sampler


def rank_caches(runner: ModelRunner) -> list[KVCache]:
    """The device memory of every rank of a group, or of the one process."""
    return [runner.kv_cache] if runner.group is None else [cache for _, cache in runner.group.kv_cache.holders]


class StagedStepper(Stepper):
    """Some layer groups of each sequence on the host; groups move between the tiers as copies of a step."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        super().__init__(runner, seed)
        assert runner.host_cache is not None
        self.host_cache = runner.host_cache
        self.host_pool = BlockPool(runner.host_cache.num_blocks)
        shuffled = self.host_pool.lease(self.host_pool.num_blocks)
        self.random.shuffle(shuffled.blocks)
        self.host_pool.release(shuffled)

    def place(self, seq: Sequence, host_groups: Collection[int]) -> Sequence:
        """Before the sequence has blocks: these groups of it rest on the host."""
        assert seq.block_table is not None
        assert not seq.block_table.num_columns
        seq.host_groups = frozenset(host_groups)
        seq.host_lease = self.host_pool.lease()
        seq.host_table = BlockTable(self.layout.num_layer_groups)
        return seq

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        if seq.host_table is None:
            super().reserve(seq, num_tokens)
            return
        assert seq.lease is not None
        assert seq.host_lease is not None
        assert seq.block_table is not None
        count = -(-num_tokens // self.layout.block_size) - seq.block_table.num_columns
        if count <= 0:
            return
        device = np.full((self.layout.num_layer_groups, count), -1, dtype=np.int32)
        host = device.copy()
        for group in range(self.layout.num_layer_groups):
            if group in seq.host_groups:
                host[group] = self.host_pool.extend(seq.host_lease, count)
            else:
                device[group] = self.pool.extend(seq.lease, count)
        seq.block_table.append(device)
        seq.host_table.append(host)

    def step(
        self, chunks: Iterable[tuple[Sequence, int]], copies: tuple[BlockCopy, ...] = ()
    ) -> list[SampledToken | None]:
        plan = StepPlan(tuple(ScheduledSequence(seq, count) for seq, count in chunks), copies)
        for item in plan.items:
            self.reserve(item.seq, item.seq.num_computed + item.num_tokens)
        for cache in rank_caches(self.runner):
            cache.tensor[self.runner.num_pool_blocks :] = torch.nan
        output = self.runner.execute(plan)
        for item, token in zip(plan.items, output.sampled, strict=True):
            item.seq.num_computed += item.num_tokens
            if token is not None:
                item.seq.output_token_ids.append(token.token_id)
        return output.sampled

    def to_host(self, seq: Sequence, group: int) -> BlockCopy:
        """Of a step that does not compute the sequence; `moved` follows it."""
        assert seq.block_table is not None
        assert seq.host_table is not None
        assert seq.host_lease is not None
        source = seq.block_table.view[group].copy()
        destination = np.array(self.host_pool.extend(seq.host_lease, len(source)), dtype=np.int32)
        return BlockCopy(group=group, to="host", source=source, destination=destination)

    def to_device(self, seq: Sequence, group: int) -> BlockCopy:
        """Of a step that may compute the sequence already; `moved` precedes it."""
        assert seq.host_table is not None
        assert seq.lease is not None
        source = seq.host_table.view[group].copy()
        destination = np.array(self.pool.extend(seq.lease, len(source)), dtype=np.int32)
        return BlockCopy(group=group, to="device", source=source, destination=destination)

    def moved(self, seq: Sequence, copy: BlockCopy) -> None:
        """The sequence's group now rests at the copy's destination."""
        assert seq.block_table is not None
        assert seq.host_table is not None
        on_host = copy.to == "host"
        seq.host_groups = seq.host_groups | {copy.group} if on_host else seq.host_groups - {copy.group}
        there, gone = (seq.host_table, seq.block_table) if on_host else (seq.block_table, seq.host_table)
        there.view[copy.group] = copy.destination
        gone.view[copy.group] = -1

    def give_back(self, seq: Sequence, copy: BlockCopy) -> None:
        """After the step: the source's blocks are anyone's, so they are poisoned."""
        blocks: Blocks = copy.source
        if copy.to == "host":
            assert seq.lease is not None
            self.pool.give_back(seq.lease, blocks.tolist())
            for cache in rank_caches(self.runner):
                cache.tensor[blocks.tolist()] = torch.nan
        else:
            assert seq.host_lease is not None
            self.host_pool.give_back(seq.host_lease, blocks.tolist())
            self.host_cache.tensor[blocks.tolist()] = torch.nan
