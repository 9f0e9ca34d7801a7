"""Brings a runner up for the model in a folder: sizes, weights, KV memory, and the processes of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.checkpoint.packed_weights import Sharing, packing_memory
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.quantised_weights import load_mixed_weights
from engine.checkpoint.weights import AnyWeights
from engine.kv.cache import KVCache, KVLayout
from engine.kv.sizes import KVMemory, KVSizes, layers_per_group_for, size_tiers
from engine.memory.devices import pinning_for, require_device
from engine.memory.host import keep_freed_memory
from engine.memory.mappings import map_private_memory
from engine.model.config import ModelConfig
from engine.model.shards import WHOLE
from engine.model.transformer import Model
from engine.parallel.device_link import require_devices
from engine.parallel.leader import GroupLeader
from engine.sampling.sampler import sampler_for
from engine.steps.decode_graphs import DecodeGraphLimits
from engine.steps.memory_profile import DeviceShare, StepSize
from engine.steps.runner import ModelRunner
from engine.steps.threads import StepThreads
from kernels.cpu.packing_memory import PackingKernels, PackingMemory
from kernels.interface import GraphKernels, Kernels
from kernels.ops import kernels_for
from kernels.quantised_weight import ActivationBits

logger = logging.getLogger(__name__)

HostMemory = Callable[[KVLayout, int], memoryview]
"""Gives the memory for so many blocks of the host's KV cache, writable, and pinned for a GPU: a mapping that others
read, for example."""


def load_runner(
    model_folder: str | Path,
    *,
    dtype: torch.dtype,
    block_size: int,
    layers_per_group: int | None = None,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    kv_share: float | None = None,
    largest_step: StepSize = StepSize(),  # noqa: B008 - frozen
    host_bytes: int = 0,
    staging_bytes: int = 0,
    ring_groups: int = 2,
    host_memory: HostMemory | None = None,
    num_threads: int | None = None,
    device: str = "cpu",
    tensor_parallel: int = 1,
    batch_invariant: bool = False,
    decode_graphs: bool = False,
    quantisation: Quantisation | None = None,
    activation_bits: ActivationBits = 8,
    share_weights: Sharing = "off",
) -> ModelRunner:
    """A runner for the model in a folder, on a device; what it took is logged.

    `layers_per_group` None: all layers share one block table, or, with host memory, are cut into some groups. Give
    either `num_blocks` or `kv_bytes`, which the ranks of a group share, or `kv_share`: KV gets what is left of that
    share of the device's memory beside the model and a step of `largest_step`. `host_memory` None: private memory.
    `num_threads` is torch's, for the whole process, and for each of a group of `tensor_parallel`. `batch_invariant`,
    `activation_bits`: see `kernels_for`. `decode_graphs`: where the device can, decode steps of as many sequences as
    `largest_step` has, or fewer, are recorded now and replayed later; a group's are not. `quantisation`: of
    projections, as they are loaded. `share_weights`: see `packing_memory`. Raises ValueError for models or sizes that
    cannot be run, GroupError if a group does not come up.
    """
    where = require_device(device)
    kernels = kernels_for(where, batch_invariant=batch_invariant, activation_bits=activation_bits)
    require_devices(where, tensor_parallel)
    require_whole_cache(where, tensor_parallel, host_bytes)
    config = ModelConfig.from_folder(model_folder)
    layout = _layout(config, dtype, block_size, layers_per_group, tiered=host_bytes > 0)
    memory = KVMemory(
        kv_blocks=num_blocks,
        kv_bytes=kv_bytes,
        host_bytes=host_bytes,
        staging_bytes=staging_bytes,
        ring_groups=ring_groups,
    )
    share = DeviceShare.of(kv_share, memory, largest_step)
    _set_threads(num_threads, tensor_parallel)
    keep_freed_memory()
    loading = _Loading(Path(model_folder), config, layout, where, kernels, host_memory, quantisation, share_weights)
    sizes = size_tiers(layout, memory) if share is None else share.sizes_to_measure_with(layout)
    runner = (
        loading.runner(sizes)
        if tensor_parallel == 1
        else loading.group_runner(sizes, tensor_parallel, batch_invariant, activation_bits)
    )
    return _made_ready(loading, runner, share, largest_step if decode_graphs and tensor_parallel == 1 else None)


@dataclass(frozen=True, slots=True)
class _Loading:
    """What a runner is made of, whatever the sizes of its caches."""

    folder: Path
    config: ModelConfig
    layout: KVLayout
    device: torch.device
    kernels: Kernels
    host_memory: HostMemory | None
    quantisation: Quantisation | None
    share_weights: Sharing

    def runner(self, sizes: KVSizes) -> ModelRunner:
        """Of one process."""
        sharing = replace(self, kernels=self._sharing_kernels())
        return sharing._runner(sizes, KVCache(self.layout, sizes.device_blocks, self.device), group=None)

    def _sharing_kernels(self) -> Kernels:
        """With packed weights where other workers of the machine have theirs, if these kernels can."""
        if not isinstance(self.kernels, PackingKernels):
            return self.kernels
        facts = f"{self.kernels.packing} {self.layout.dtype} {self.quantisation}"
        memory = packing_memory(self.folder, facts, self._pack_all, self.share_weights)
        return self.kernels.packing_into(memory)

    def _pack_all(self, memory: PackingMemory) -> None:
        assert isinstance(self.kernels, PackingKernels)
        with torch.inference_mode():
            Model(self.config, self._weights(None), self.kernels.packing_into(memory))

    def group_runner(
        self, sizes: KVSizes, degree: int, batch_invariant: bool, activation_bits: ActivationBits
    ) -> ModelRunner:
        """Of a group of processes, which are up when this returns. Raises GroupError."""
        group = GroupLeader(
            self.folder,
            self.config,
            self.layout,
            sizes.device_blocks,
            degree=degree,
            num_threads=torch.get_num_threads(),
            device=self.device,
            batch_invariant=batch_invariant,
            activation_bits=activation_bits,
            quantisation=self.quantisation,
        )
        with ExitStack() as on_failure:
            on_failure.callback(group.close)
            runner = self._runner(sizes, group.own_cache, group)
            group.wait_until_loaded()
            on_failure.pop_all()
        return runner

    def give_kv(self, runner: ModelRunner, sizes: KVSizes) -> None:
        """Caches of these sizes in place of the runner's."""
        group = runner.group
        if group is None:
            kv_cache = KVCache(self.layout, sizes.device_blocks, self.device)
        else:
            kv_cache = group.give_kv(sizes.device_blocks)
        runner.keep_kv_in(kv_cache, self._host_cache(sizes.host_blocks), sizes.ring)

    def _runner(self, sizes: KVSizes, kv_cache: KVCache, group: GroupLeader | None) -> ModelRunner:
        return ModelRunner(
            self.config,
            self._weights(group),
            kv_cache,
            sampler=sampler_for(self.device, self.config.vocab_size, self.config.eos_token_ids),
            host_cache=self._host_cache(sizes.host_blocks),
            ring=sizes.ring,
            group=group,
            kernels=self.kernels,
            threads=self._threads(group),
        )

    def _threads(self, group: GroupLeader | None) -> StepThreads | None:
        if group is not None or not isinstance(self.kernels, PackingKernels):  # or results would depend on them
            return None
        return StepThreads(torch.get_num_threads())

    def _weights(self, group: GroupLeader | None) -> AnyWeights:
        return load_mixed_weights(
            self.folder,
            self.config,
            self.quantisation,
            dtype=self.layout.dtype,
            shard=WHOLE if group is None else group.ranks.shard,
            device=self.device,
        )

    def _host_cache(self, num_blocks: int) -> KVCache | None:
        if not num_blocks:
            return None
        if self.host_memory is not None:
            return KVCache(self.layout, num_blocks, memory=self.host_memory(self.layout, num_blocks))
        pin = pinning_for(self.device)
        memory = None if pin is None else map_private_memory(num_blocks * self.layout.block_bytes, pin)
        return KVCache(self.layout, num_blocks, memory=memory)


def _layout(
    config: ModelConfig, dtype: torch.dtype, block_size: int, layers_per_group: int | None, *, tiered: bool
) -> KVLayout:
    if layers_per_group is None:
        layers_per_group = layers_per_group_for(config.num_layers) if tiered else config.num_layers
    return KVLayout(
        num_layers=config.num_layers,
        layers_per_group=layers_per_group,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def require_whole_cache(device: torch.device, tensor_parallel: int, host_bytes: int) -> None:
    """Raises ValueError where nothing could copy between the device's memory and the host's."""
    if host_bytes and tensor_parallel > 1 and device.type == "cuda":
        raise ValueError(
            f"host memory for KV is set with tensor_parallel {tensor_parallel} on GPUs: blocks of the host have all"
            " heads, each GPU some, and their copies are only built for CPUs; leave host_memory out, or use one GPU"
        )


def _set_threads(num_threads: int | None, tensor_parallel: int) -> None:
    """Of torch, for the whole process. The processes of a group share what one would have."""
    if num_threads is None and tensor_parallel > 1:
        num_threads = max(1, torch.get_num_threads() // tensor_parallel)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _decode_recording(runner: ModelRunner, kernels: Kernels, largest: StepSize) -> Callable[[], None] | None:
    """Records the runner's decode steps over the KV cache it then has. None: the kernels cannot be replayed."""
    if not isinstance(kernels, GraphKernels):
        return None
    limits = DecodeGraphLimits.of(largest.num_seqs, runner.config.max_position_embeddings)
    return partial(runner.record_decode, kernels, limits)


def _made_ready(
    loading: _Loading, runner: ModelRunner, share: DeviceShare | None, recorded: StepSize | None
) -> ModelRunner:
    """What needs a runner that is up, or it is closed. Decode steps up to `recorded` are recorded last, over the KV
    cache that stays."""
    with ExitStack() as on_failure:
        on_failure.callback(runner.close)
        record = None if recorded is None else _decode_recording(runner, loading.kernels, recorded)
        if share is not None:
            loading.give_kv(runner, share.sizes_left(loading.layout, runner, record))
        if record is not None:
            record()
        _report(runner, loading.folder)
        on_failure.pop_all()
    return runner


def _report(runner: ModelRunner, model_folder: str | Path) -> None:
    layout = runner.sequence_kv.layout
    logger.info(
        "%s from %s on %s: %.0f MB of weights; %d KV blocks of %d tokens x %d layers, %.0f MB, %d tokens; %d threads",
        runner.config.architecture,
        model_folder,
        runner.kv_cache.device,
        runner.weight_bytes / 1e6,
        runner.num_pool_blocks,
        layout.block_size,
        layout.layers_per_group,
        runner.num_pool_blocks * layout.block_bytes / 1e6,
        runner.num_pool_blocks // layout.num_layer_groups * layout.block_size,
        torch.get_num_threads(),
    )
    if runner.host_cache is not None and runner.transfer_stats is not None:
        logger.info(
            "%d KV blocks in host memory, %.0f MB at %.1f GB/s; a staging ring of %d blocks, %d block columns a step",
            runner.host_cache.num_blocks,
            runner.host_cache.num_bytes / 1e6,
            runner.transfer_stats.host_bytes_per_s / 1e9,
            runner.kv_cache.num_blocks - runner.num_pool_blocks,
            runner.staging_columns,
        )
