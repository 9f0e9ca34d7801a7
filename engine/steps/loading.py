"""Brings a model up on a device: weights, KV memory, pool and runner, sized once."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import torch

from engine.checkpoint.adapters import largest_adapter_bytes
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.shared_weights import Sharing, packing_memory
from engine.checkpoint.store import resolve_model
from engine.checkpoint.weights import LoadProgress, Weights, is_projection, load_weights, require_roundable
from engine.cost_model.costs import StepCosts
from engine.cost_model.roofline import CPU_CORE, H100_SXM, ModelShape, roofline_cost
from engine.cost_model.step_cost import StepCost
from engine.drafting.draft_model import DraftModel
from engine.drafting.heads import HeadDrafter, HeadsConfig, is_heads, load_heads, require_heads_fit, target_config
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, KVLayout, SequenceKV
from engine.kv.sizes import KVMemory, KVSizes, layers_per_group_for, size_tiers
from engine.memory.devices import pinning_for, require_device
from engine.memory.host import keep_freed_memory, map_private_memory
from engine.model.adapters import AdapterPool, adapter_pool
from engine.model.config import Backend, DecoderConfig, ModelConfig, read_config
from engine.model.shards import WHOLE, check_degree
from engine.model.transformer import Model
from engine.parallel.leader import GroupLeader
from engine.parallel.rank_devices import require_devices
from engine.sampling.grammar import GrammarMasks
from engine.sampling.sampler import Sampler
from engine.steps.decode_graphs import DecodeGraphLimits
from engine.steps.memory_profile import StepSize, sizes_left, sizes_to_measure_with
from engine.steps.runner import ModelRunner
from engine.steps.threads import StepThreads
from engine.text.tokenizer import eos_token_ids, vocabulary
from kernels.cpu.huge_pages import PackingMemory
from kernels.cpu.thread_team import dissolve_team
from kernels.interface import GraphKernels, Kernels, PackedBytes
from kernels.native.kernels import NativeCpuKernels
from kernels.native.linear import can_pack_quantised
from kernels.ops import kernels_for
from kernels.quantised_weight import ActivationBits, QuantisedWeight

if TYPE_CHECKING:
    from engine.model.hugging_face import HuggingFaceConfig, HuggingFaceModel
    from engine.sampling.device_sampler import DeviceSampler

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

_KV_SAMPLES: Final = 1024
"""Of each file of weights, where KV is believed by the fingerprint: enough for one of each large matrix."""
_SAMPLED_BYTES = 1024 * 1024

HostMemory = Callable[[KVLayout, int], memoryview]
"""Gives the memory for so many blocks of the host's KV cache, writable, and pinned for a GPU: a mapping that others
read, for example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a worker loads. One of `kv_bytes`, `kv_blocks` and `kv_share` is set; None elsewhere means the default.

    `kv_share`: KV gets what is left of that share of the device's memory beside the model and a step of `largest_step`.

    `host_bytes` of host memory and a ring of `staging_bytes`, in `ring_groups` slots, come on top of the device's KV
    memory. `max_model_len` is bounded by what the model was made for and by what either memory holds; in host memory,
    also by what a slot of the ring holds. `layers_per_group` None: all layers share one block table, or, with host
    memory, are cut into some groups.
    """

    model_ref: str
    model_name: str
    backend: Backend = "auto"
    dtype: DtypeName = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    layers_per_group: int | None = None
    kv_bytes: int | None = None
    kv_blocks: int | None = None
    kv_share: float | None = None
    largest_step: StepSize = StepSize()  # noqa: RUF009 - frozen
    host_bytes: int = 0
    staging_bytes: int = 0
    ring_groups: int = 2
    num_threads: int | None = None  # torch's, for the whole process, and for each one of a group
    prefix_caching: bool = True
    device: str = "cpu"  # or cuda:0
    tensor_parallel: int = 1  # processes that have a part of the model each
    expert_parallel: bool | None = None  # whole experts, not a part of each; None: see `engine.model.shards.shards_of`
    batch_invariant: bool = False  # logits do not depend on the batch, to the bit, or nothing is loaded
    decode_graphs: bool = False  # on a GPU: decode steps up to `largest_step` are recorded at the start and replayed
    quantisation: Quantisation | None = None  # of the projections' weights, when they are loaded
    share_weights: Sharing = "off"  # with other processes of the machine: see `engine.checkpoint.shared_weights`
    activation_bits: ActivationBits = 8  # of what a CPU multiplies by quantised weights
    # A smaller model of the same vocabulary, that drafts; its KV is taken out of this one's. Or the folder of heads for
    # this model.
    draft_ref: str | None = None
    max_adapters: int = 0  # that are loaded at once, each of `max_adapter_rank` at most; 0: none are computed
    max_adapter_rank: int = 64


def load_runner(
    folder: Path,
    engine: EngineConfig,
    host_memory: HostMemory | None = None,
    progress: LoadProgress | None = None,
    attach: Callable[[ModelRunner], None] | None = None,
) -> ModelRunner:
    """A runner for `folder`, whatever `EngineConfig.model_ref` says. See `load_model`; what it took is logged.

    `attach` adds to the runner what lies beside the model on its device, before it is measured what is left for KV.
    Raises ValueError for models or sizes that cannot be run, GroupError if a group does not come up.
    """
    device = require_device(engine.device)
    kernels = kernels_for(device, batch_invariant=engine.batch_invariant, activation_bits=engine.activation_bits)
    require_devices(device, engine.tensor_parallel)
    require_whole_cache(device, engine.tensor_parallel, engine.host_bytes)
    config, layout, memory, sizes = _planned(folder, engine)
    _set_threads(engine.num_threads, engine.tensor_parallel)
    keep_freed_memory()
    loading = _Loading(engine, folder, config, layout, memory, device, kernels, host_memory, progress)
    return _made_ready(loading, loading.runner(sizes), attach)


def _planned(folder: Path, engine: EngineConfig) -> tuple[DecoderConfig, KVLayout, KVMemory, KVSizes]:
    """What a worker loads, and how large its caches are, or are to begin with where the device's memory has to be
    measured. Raises ValueError where settings and model do not go together, as far as files of settings tell: before
    any weight is read, which takes minutes."""
    config = _with_ends(served_config(folder, engine), folder)
    layout = layout_of(config, engine, dtype_of(engine.dtype, folder))
    memory = KVMemory(
        kv_blocks=engine.kv_blocks,
        kv_bytes=engine.kv_bytes,
        host_bytes=engine.host_bytes,
        staging_bytes=engine.staging_bytes,
        ring_groups=engine.ring_groups,
    )
    if engine.kv_share is None:
        sizes = size_tiers(layout, memory)
        held = sizes.longest(layout)
    else:
        sizes, held = sizes_to_measure_with(layout, memory, engine.largest_step), sys.maxsize
    context_length(engine.max_model_len, config, held=held)
    return config, layout, memory, sizes


@dataclass(frozen=True, slots=True)
class _Loading:
    """What a runner is made of, whatever the sizes of its caches."""

    engine: EngineConfig
    folder: Path
    config: DecoderConfig
    layout: KVLayout
    memory: KVMemory
    device: torch.device
    kernels: Kernels
    host_memory: HostMemory | None
    progress: LoadProgress | None

    def runner(self, sizes: KVSizes) -> ModelRunner:
        """Build the runner of one process, or of a group of them, which are up when this returns. Raises GroupError."""
        if self.engine.tensor_parallel > 1:
            return self._group_runner(sizes)
        sharing = replace(self, kernels=self._sharing_kernels())
        return sharing._runner(sizes, KVCache(self.layout, sizes.device_blocks, self.device), group=None)

    def _sharing_kernels(self) -> Kernels:
        """The kernels, which share packed weights with other workers of the machine if they can."""
        if not isinstance(self.kernels, NativeCpuKernels) or not isinstance(self.config, ModelConfig):
            return self.kernels
        facts = f"{self.kernels.packing} {self.layout.dtype} {self.engine.quantisation}"
        memory = packing_memory(self.folder, facts, self._pack_all, self.engine.share_weights)
        return self.kernels.packing_into(memory)

    def _pack_all(self, memory: PackingMemory) -> None:
        assert isinstance(self.kernels, NativeCpuKernels) and isinstance(self.config, ModelConfig)
        with torch.inference_mode():
            Model(self.config, self._native_weights(self.config, None), self.kernels.packing_into(memory))

    def _group_runner(self, sizes: KVSizes) -> ModelRunner:
        engine = self.engine
        assert isinstance(self.config, ModelConfig), "served_config refuses the others"
        group = GroupLeader(
            self.folder,
            self.config,
            self.layout,
            sizes.device_blocks,
            degree=engine.tensor_parallel,
            expert_parallel=engine.expert_parallel,
            num_threads=torch.get_num_threads(),
            device=self.device,
            batch_invariant=engine.batch_invariant,
            activation_bits=engine.activation_bits,
            quantisation=engine.quantisation,
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
        masks = GrammarMasks(self.folder, self.config.vocab_size, self.config.eos_token_ids)
        sampler = sampler_for(self.device, self.config.vocab_size, self.config.eos_token_ids, masks)
        if not isinstance(sampler, Sampler):
            sampler.compile_on(self.device)
        weights = self._weights(group)
        return ModelRunner(
            self.config,
            weights,
            kv_cache,
            sampler=sampler,
            host_cache=self._host_cache(sizes.host_blocks),
            ring=sizes.ring,
            group=group,
            kernels=self.kernels,
            threads=self._threads(group, weights),
            logit_rows=self.engine.largest_step.num_rows,
        )

    def _threads(self, group: GroupLeader | None, weights: Weights | HuggingFaceModel) -> StepThreads | None:
        kernels, dtype = self.kernels, self.layout.dtype
        if group is not None or not (isinstance(kernels, NativeCpuKernels) and isinstance(weights, dict)):
            return None  # or results would depend on them
        few_rows = kernels.few_rows(dtype, are_quantised=_are_multiplied_as_codes(weights, dtype))
        return StepThreads(torch.get_num_threads(), few_rows)

    def _weights(self, group: GroupLeader | None) -> Weights | HuggingFaceModel:
        """Or the whole model, where its own code lays them out."""
        if isinstance(self.config, ModelConfig):
            return self._native_weights(self.config, group)
        from engine.model.hugging_face import HuggingFaceConfig, HuggingFaceModel  # takes seconds to import

        assert isinstance(self.config, HuggingFaceConfig)
        with torch.inference_mode():
            return HuggingFaceModel(
                self.config, self.folder, dtype=self.layout.dtype, device=self.device, kernels=self.kernels
            )

    def _native_weights(self, config: ModelConfig, group: GroupLeader | None) -> Weights:
        return load_weights(
            self.folder,
            config,
            self.engine.quantisation,
            dtype=self.layout.dtype,
            shard=WHOLE if group is None else group.ranks.shard,
            device=self.device,
            progress=self.progress,
        )

    def _host_cache(self, num_blocks: int) -> KVCache | None:
        if not num_blocks:
            return None
        if self.host_memory is not None:
            return KVCache(self.layout, num_blocks, memory=self.host_memory(self.layout, num_blocks))
        pin = pinning_for(self.device)
        memory = None if pin is None else map_private_memory(num_blocks * self.layout.block_bytes, pin)
        return KVCache(self.layout, num_blocks, memory=memory)


def _are_multiplied_as_codes(weights: Weights, dtype: torch.dtype) -> bool:
    """Whether the C++ kernels multiply by more codes than numbers of `dtype`."""
    codes = numbers = 0
    for name, weight in weights.items():
        if is_projection(name):
            is_packed = isinstance(weight, QuantisedWeight) and can_pack_quantised(weight, dtype)
            codes += is_packed * prod(weight.shape)
            numbers += (not is_packed) * prod(weight.shape)
    return codes > numbers


def _with_ends(config: ModelConfig | HuggingFaceConfig, folder: Path) -> DecoderConfig:
    """With the tokens that end an answer as a gateway knows them, where anybody names some."""
    try:
        named = eos_token_ids(folder)
    except ValueError as error:  # gateways refuse the model for the same reason; prompts of token ids can be computed
        logger.info("what ends an answer is known by the model's config alone: %s", error)
        return config
    known = sorted(token_id for token_id in named if 0 <= token_id < config.vocab_size)
    return replace(config, eos_token_ids=tuple(known)) if known else config


def served_config(folder: Path, engine: EngineConfig) -> ModelConfig | HuggingFaceConfig:
    """The config of the model as it will be computed. Raises ValueError for what cannot be served, or not in this
    way."""
    config = read_config(folder, engine.backend)
    if not isinstance(config, ModelConfig):
        wished = {
            f"tensor_parallel {engine.tensor_parallel}": engine.tensor_parallel > 1,
            "quantization": engine.quantisation is not None,
            "batch_invariant": engine.batch_invariant,
            "adapters": engine.max_adapters > 0,
        }
        if unmet := [wish for wish, wanted in wished.items() if wanted]:
            raise ValueError(
                f"the model in {folder} is computed by transformers' {config.architecture}, for which"
                f" {unmet[0]} is not built; leave it out, or use a model with the backend native"
            )
    if engine.max_adapters and engine.tensor_parallel > 1:
        raise ValueError(
            f"adapters are set with tensor_parallel {engine.tensor_parallel}, whose ranks would each need a part of"
            " them, which is not built; leave one of the two out"
        )
    if isinstance(config, ModelConfig):
        check_degree(config, engine.tensor_parallel, engine.expert_parallel)
        if engine.quantisation is not None:
            require_roundable(folder, config, engine.quantisation)
    return config


def adapter_bytes(config: DecoderConfig, engine: EngineConfig, dtype: torch.dtype, packed_bytes: PackedBytes) -> int:
    """The most that all adapters of a worker whose kernels pack so may take, which it keeps free for them."""
    if not engine.max_adapters or not isinstance(config, ModelConfig) or config.latent is not None:
        return 0
    return engine.max_adapters * largest_adapter_bytes(config, engine.max_adapter_rank, dtype, packed_bytes)


def layout_of(config: DecoderConfig, engine: EngineConfig, dtype: torch.dtype) -> KVLayout:
    """How a worker's KV blocks are cut."""
    layers_per_group = engine.layers_per_group
    if layers_per_group is None:
        layers_per_group = layers_per_group_for(config.num_layers) if engine.host_bytes else config.num_layers
    return KVLayout(
        num_layers=config.num_layers,
        layers_per_group=layers_per_group,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=engine.block_size,
        dtype=dtype,
        latent_dim=config.latent_dim,
    )


def require_whole_cache(device: torch.device, tensor_parallel: int, host_bytes: int) -> None:
    """Raises ValueError where nothing could copy between the device's memory and the host's."""
    if host_bytes and tensor_parallel > 1 and device.type == "cuda":
        raise ValueError(
            f"host memory for KV is set with tensor_parallel {tensor_parallel} on GPUs: copies between the host's"
            " memory and that of several GPUs are not built; set host_memory: 0, or use one GPU"
        )


def _set_threads(num_threads: int | None, tensor_parallel: int) -> None:
    """Set the number of torch's threads, for the whole process. The processes of a group share what one would have."""
    if num_threads is None and tensor_parallel > 1:
        num_threads = max(1, torch.get_num_threads() // tensor_parallel)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _decode_recording(loading: _Loading, runner: ModelRunner) -> Callable[[], None] | None:
    """Records the runner's decode steps over the KV cache it then has. None: not wanted, or the kernels cannot be
    replayed; a group's and transformers' are not."""
    engine, kernels = loading.engine, loading.kernels
    if not (engine.decode_graphs and isinstance(kernels, GraphKernels)):
        return None
    if engine.tensor_parallel > 1 or not isinstance(loading.config, ModelConfig):
        return None
    return partial(runner.record_decode, kernels, decode_graph_limits(engine, loading.config))


def decode_graph_limits(engine: EngineConfig, config: ModelConfig) -> DecodeGraphLimits:
    """By the longest sequence that a worker takes, whatever its KV memory then holds: that is not measured yet. Raises
    ValueError as `context_length` does."""
    max_model_len = context_length(engine.max_model_len, config, held=sys.maxsize)
    return DecodeGraphLimits.of(engine.largest_step.num_seqs, max_model_len)


def _made_ready(loading: _Loading, runner: ModelRunner, attach: Callable[[ModelRunner], None] | None) -> ModelRunner:
    """What needs a runner that is up, or it is closed. Decode steps are recorded last, over the KV cache that stays."""
    engine = loading.engine
    with ExitStack() as on_failure:
        on_failure.callback(runner.close)
        if attach is not None:
            attach(runner)
        record = _decode_recording(loading, runner)
        if engine.kv_share is not None:
            left = sizes_left(
                runner,
                loading.memory,
                share=engine.kv_share,
                largest=engine.largest_step,
                adapter_bytes=adapter_bytes(loading.config, engine, loading.layout.dtype, loading.kernels.packed_bytes),
                record=record,
            )
            loading.give_kv(runner, left)
        if record is not None:
            record()
        _log_summary(runner, loading.folder)
        if told := told_dtype(engine.dtype, loading.folder):
            logger.info(told)
        on_failure.pop_all()
    return runner


def _log_summary(runner: ModelRunner, model_folder: Path) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, with the pool that owns the KV blocks of each tier. `fingerprint` tells models apart;
    `costs` is what was learnt of its steps, whoever ran them."""

    name: str
    fingerprint: str
    runner: ModelRunner
    block_pool: BlockPool
    host_pool: BlockPool | None  # None without host memory
    max_model_len: int
    largest_step: StepSize  # that there is memory for
    prefix_caching: bool
    costs: StepCosts
    draft_model: DraftModel | HeadDrafter | None = None
    adapters: AdapterPool | None = None  # None: no sequence may have one

    @property
    def kv_cache(self) -> KVCache:
        return self.runner.kv_cache

    @property
    def sequence_kv(self) -> SequenceKV:
        """What is handed over, and received in: all heads, also where each rank of a group has its own."""
        return self.runner.sequence_kv

    @property
    def host_cache(self) -> KVCache | None:
        return self.runner.host_cache

    @property
    def staging_columns(self) -> int:
        """Block columns that all host-resident sequences of a step may have together; 0: none can be computed."""
        return self.runner.staging_columns

    def host_bytes_per_s(self) -> float:
        """Measured speed of copies between device and host; 0 without host memory."""
        stats = self.runner.transfer_stats
        return 0.0 if stats is None else stats.host_bytes_per_s

    @property
    def layout(self) -> KVLayout:
        return self.sequence_kv.layout

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.runner.config.eos_token_ids)

    @property
    def grammar_masks(self) -> list[GrammarMasks]:
        """Those of all samplers: the model's own, and that of whoever drafts for it. Each reads a tokenizer."""
        of_drafts = None if self.draft_model is None else self.draft_model.masks
        return [masks for masks in (self.runner.sampler.masks, of_drafts) if masks is not None]


def load_model(
    config: EngineConfig, host_memory: HostMemory | None = None, progress: LoadProgress | None = None
) -> LoadedModel:
    """Fetch the model if need be and load it. Raises ValueError where the configuration cannot be met.

    `host_memory` gives the memory of the host's KV cache, if there is to be one; None: private memory. `progress` is
    told how much of the checkpoint is loaded; of a group, by its first process.
    """
    folder = resolve_model(config.model_ref, backend=config.backend)
    draft = heads = None
    if config.draft_ref is not None:
        heads = heads_for(config.draft_ref, folder, config.backend)
        if heads is None:
            draft, config = _load_draft(config, config.draft_ref, folder)
    drafters: list[DraftModel | HeadDrafter] = []

    def attach(runner: ModelRunner) -> None:
        if draft is not None:
            drafters.append(DraftModel(draft, frozenset(runner.config.eos_token_ids)))
            runner.draw = drafters[0].draw
        elif heads is not None:
            drafters.append(attach_heads(runner, config, *heads, folder))

    runner = load_runner(folder, config, host_memory, progress, attach)
    dissolve_team()  # steps will be computed by another thread
    return LoadedModel(
        name=config.model_name,
        fingerprint=kv_fingerprint(folder, config),
        runner=runner,
        block_pool=BlockPool(runner.num_pool_blocks),
        host_pool=None if runner.host_cache is None else BlockPool(runner.host_cache.num_blocks),
        max_model_len=context_length(config.max_model_len, runner.config, held=_longest_held(runner)),
        largest_step=config.largest_step,
        prefix_caching=config.prefix_caching,
        costs=StepCosts(_estimated_cost(runner)),
        draft_model=drafters[0] if drafters else None,
        adapters=_adapters(runner, config),
    )


def _adapters(runner: ModelRunner, engine: EngineConfig) -> AdapterPool | None:
    if not engine.max_adapters:
        return None
    assert isinstance(runner.model, Model) and isinstance(runner.config, ModelConfig), "refused before it was loaded"
    return adapter_pool(runner.model, runner.config, max_loaded=engine.max_adapters, max_rank=engine.max_adapter_rank)


def heads_for(ref: str, folder: Path, backend: Backend) -> tuple[Path, HeadsConfig] | None:
    """The heads in a folder, for the model in `folder`; None: `ref` is a model. Raises ValueError, before anything is
    loaded, where they are not for this model."""
    heads_folder = Path(ref).expanduser()
    if not is_heads(heads_folder):
        return None
    heads, model = HeadsConfig.from_folder(heads_folder), target_config(read_config(folder, backend))
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    require_heads_fit(heads_folder, heads, **sizes, target=model_fingerprint(folder, None))
    return heads_folder, heads


def attach_heads(
    runner: ModelRunner, engine: EngineConfig, heads_folder: Path, heads: HeadsConfig, folder: Path
) -> HeadDrafter:
    """Heads draft for the runner's model from now on, which is the one in `folder`. Raises ValueError for a folder that
    does not hold what its config says."""
    model, device = target_config(runner.config), runner.model.device
    kernels = kernels_for(device, batch_invariant=engine.batch_invariant, activation_bits=engine.activation_bits)
    with torch.inference_mode():
        made = load_heads(
            heads_folder,
            heads,
            kernels,
            runner.model.logits,
            dtype=runner.model.dtype,
            device=device,
            softcap=model.logit_softcap,
        )
    masks = GrammarMasks(folder, model.vocab_size, model.eos_token_ids)
    sampler = sampler_for(device, model.vocab_size, model.eos_token_ids, masks)
    drafter = HeadDrafter(made, sampler, model.eos_token_ids)
    runner.draw, runner.keep_hidden = drafter.draw, drafter.keep
    return drafter


def _load_draft(config: EngineConfig, ref: str, folder: Path) -> tuple[LoadedModel, EngineConfig]:
    """The model that drafts for the one in `folder`, by one process, and what `config` leaves to that one: both hold KV
    of as many tokens. Raises ValueError, before anything is loaded, where the two do not go together."""
    draft_folder = resolve_model(ref)
    require_draft_fits(config, folder, draft_folder)
    alone, config = with_draft(config, ref, folder, draft_folder)
    _planned(folder, config)  # or it would be told after the other one is loaded
    return load_model(alone), config


def with_draft(config: EngineConfig, ref: str, folder: Path, draft_folder: Path) -> tuple[EngineConfig, EngineConfig]:
    """How the model `ref` in `draft_folder` is loaded that drafts for the one in `folder`, and how that one is."""
    alone = replace(config, model_ref=ref, draft_ref=None, backend="auto", max_model_len=None, layers_per_group=None)
    alone = replace(alone, host_bytes=0, staging_bytes=0, batch_invariant=False, max_adapters=0)
    alone = replace(alone, tensor_parallel=1, expert_parallel=None)
    if config.kv_bytes is not None:
        own, others = (_bytes_per_column(path, one) for path, one in ((draft_folder, alone), (folder, config)))
        alone = replace(alone, kv_bytes=config.kv_bytes * own // (own + others))
        config = replace(config, kv_bytes=config.kv_bytes - config.kv_bytes * own // (own + others))
    return alone, config


def _bytes_per_column(folder: Path, engine: EngineConfig) -> int:
    layout = layout_of(served_config(folder, engine), engine, dtype_of(engine.dtype, folder))
    return layout.block_bytes * layout.num_layer_groups


def require_draft_fits(config: EngineConfig, folder: Path, draft_folder: Path) -> None:
    """Check that the model in `draft_folder` can draft for the one in `folder` on a worker of this config: a token of
    one is the same token of the other, and it is said how much KV both have. Raises ValueError."""
    if config.kv_share is not None:
        raise ValueError(
            "with a draft model the KV memory of decode workers has to be given as a size or in blocks, not as a share"
            " of the device's: set kv.decode.memory to 8GiB, for example"
        )
    sizes = [read_config(path).vocab_size for path in (folder, draft_folder)]
    if sizes[0] != sizes[1]:
        reason = f"one has {sizes[0]} tokens, the other {sizes[1]}"
    else:
        ids, draft_ids = (vocabulary(path) for path in (folder, draft_folder))
        different = sorted(token for token in ids.keys() | draft_ids.keys() if ids.get(token) != draft_ids.get(token))
        if not different:
            return
        reason = f"{different[0]!r} is {ids.get(different[0])} in one and {draft_ids.get(different[0])} in the other"
    raise ValueError(
        f"the draft model in {draft_folder} has another vocabulary than the model in {folder}: {reason}; choose a"
        " smaller model of the same family, or leave decode.draft_model out"
    )


def model_fingerprint(
    folder: Path, quantisation: Quantisation | None, activation_bits: ActivationBits = 8, *, num_samples: int = 16
) -> str:
    """SHA-256 over the model's configuration and samples of its weights: equal for equal checkpoints, loaded alike.

    Samples, because hashing all of a large checkpoint would take longer than loading it. What was changed between two
    of them alone is not seen.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if quantisation is not None:
        digest.update(f"{quantisation.name} {quantisation.group_size}".encode())
    if activation_bits != 8:
        digest.update(f"activations of {activation_bits} bits".encode())
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as weights:
            for index in range(num_samples):
                weights.seek(size * index // num_samples)
                digest.update(weights.read(_SAMPLED_BYTES // num_samples))
    return digest.hexdigest()


def kv_fingerprint(folder: Path, engine: EngineConfig) -> str:
    """Equal where one worker's KV is of use to another: the model's fingerprint, and that keys have their numbers in an
    order of their own, where they do. transformers' code has those of the checkpoint."""
    model = model_fingerprint(folder, engine.quantisation, engine.activation_bits, num_samples=_KV_SAMPLES)
    config = read_config(folder, engine.backend)
    return f"{model} reordered" if isinstance(config, ModelConfig) and config.reorders_heads else model


def _estimated_cost(runner: ModelRunner) -> StepCost:
    """A cost for a runner of which nothing is measured. Only its proportions matter."""
    shape = ModelShape.of(runner.config, bytes_per_value=runner.kv_cache.layout.dtype.itemsize)
    return roofline_cost(shape, CPU_CORE if runner.kv_cache.tensor.device.type == "cpu" else H100_SXM)


def dtype_of(name: DtypeName, folder: Path) -> torch.dtype:
    """What the weights in a folder are computed in, where the configuration says `name`. `auto` is never float16: no
    kernel of a CPU computes in it, and workers on CPUs and on GPUs hand their KV over to each other."""
    if name == "auto":
        name = "float32" if _stated_dtype(folder) == "float32" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def told_dtype(name: DtypeName, folder: Path) -> str:
    """A sentence for operators on a checkpoint that is not computed in its own type; "" where it is."""
    if name != "auto" or _stated_dtype(folder) != "float16":
        return ""
    return (
        "The checkpoint is in float16 and is computed in bfloat16, which has three binary digits fewer;"
        " model.dtype: float16 computes in its own type, slowly on CPUs."
    )


def _stated_dtype(folder: Path) -> str | None:
    raw = json.loads((folder / "config.json").read_text())
    stated: str | None = raw.get("dtype") or raw.get("torch_dtype")
    return stated


def context_length(wanted: int | None, config: DecoderConfig, *, held: int) -> int:
    """The context of a worker: as many tokens as were asked for, or as the model was made for and the KV memory holds.
    Raises ValueError where that is too much."""
    if wanted is None:
        return min(config.max_position_embeddings, held)
    if wanted > (longest := config.longest_context):
        raise ValueError(f"max_model_len is {wanted}, but the model was made for {longest} tokens; lower it")
    if wanted > held:
        raise ValueError(
            f"max_model_len is {wanted}, but the KV memory holds {held} tokens; lower it or give more KV memory"
        )
    return wanted


def _longest_held(runner: ModelRunner) -> int:
    """Tokens of a sequence that lies on the device alone, or in host memory alone."""
    layout = runner.kv_cache.layout
    columns = runner.num_pool_blocks // layout.num_layer_groups
    if runner.host_cache is not None:
        columns = max(columns, min(runner.host_cache.num_blocks // layout.num_layer_groups, runner.staging_columns))
    return columns * layout.block_size


def sampler_for(
    device: torch.device, vocab_size: int, eos_token_ids: Iterable[int] = (), masks: GrammarMasks | None = None
) -> Sampler | DeviceSampler:
    """The sampler for logits on `device`: the same tokens from either."""
    if device.type != "cuda":
        return Sampler(vocab_size, eos_token_ids, masks)
    from engine.sampling.device_sampler import DeviceSampler  # an installation for CPUs only has no Triton

    return DeviceSampler(vocab_size, eos_token_ids, masks)
