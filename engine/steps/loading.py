"""Brings a model up on a device: weights, KV memory, pool and runner, sized once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.checkpoint.packed_weights import Sharing
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.store import resolve_model
from engine.cost_model.costs import StepCosts
from engine.cost_model.roofline import CPU_CORE, H100_SXM, ModelShape, roofline_cost
from engine.cost_model.step_cost import StepCost
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, KVLayout
from engine.kv.sequence_kv import SequenceKV
from engine.steps.memory_profile import StepSize
from engine.steps.runner import ModelRunner
from engine.steps.runner_loading import HostMemory, load_runner
from kernels.cpu.thread_team import dissolve_team
from kernels.quantised_weight import ActivationBits

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a worker loads. One of `kv_bytes`, `kv_blocks` and `kv_share` is set; None elsewhere means the default.

    `kv_share`: KV gets what is left of that share of the device's memory beside the model and a step of `largest_step`.

    `host_bytes` of host memory and a ring of `staging_bytes`, in `ring_groups` slots, come on top of the device's KV
    memory. `max_model_len` is bounded by what the model was made for and by what either memory holds; in host memory,
    also by what a slot of the ring holds.
    """

    model_ref: str
    model_name: str
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
    num_threads: int | None = None
    prefix_caching: bool = True
    device: str = "cpu"  # or cuda:0, ...
    tensor_parallel: int = 1  # processes that have a part of the model each
    batch_invariant: bool = False  # logits do not depend on the batch, to the bit, or nothing is loaded
    decode_graphs: bool = False  # on a GPU: decode steps are recorded at the start and replayed
    quantisation: Quantisation | None = None  # of the projections' weights, when they are loaded
    share_weights: Sharing = "off"  # with other processes of the machine: see `engine.checkpoint.packed_weights`
    activation_bits: ActivationBits = 8  # of what a CPU multiplies by quantised weights


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
    prefix_caching: bool
    costs: StepCosts

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

    @property
    def layout(self) -> KVLayout:
        return self.sequence_kv.layout

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.runner.config.eos_token_ids)


def load_model(config: EngineConfig, host_memory: HostMemory | None = None) -> LoadedModel:
    """Fetch the model if need be and load it. Raises ValueError where the configuration cannot be met.

    `host_memory` gives the memory of the host's KV cache, if there is to be one; None: private memory.
    """
    folder = resolve_model(config.model_ref)
    runner = load_runner(
        folder,
        dtype=_dtype(config.dtype, folder),
        block_size=config.block_size,
        layers_per_group=config.layers_per_group,
        num_blocks=config.kv_blocks,
        kv_bytes=config.kv_bytes,
        kv_share=config.kv_share,
        largest_step=config.largest_step,
        host_bytes=config.host_bytes,
        staging_bytes=config.staging_bytes,
        ring_groups=config.ring_groups,
        host_memory=host_memory,
        num_threads=config.num_threads,
        device=config.device,
        tensor_parallel=config.tensor_parallel,
        batch_invariant=config.batch_invariant,
        decode_graphs=config.decode_graphs,
        quantisation=config.quantisation,
        share_weights=config.share_weights,
        activation_bits=config.activation_bits,
    )
    dissolve_team()  # steps will be computed by another thread
    return LoadedModel(
        name=config.model_name,
        fingerprint=model_fingerprint(folder, config.quantisation, config.activation_bits),
        runner=runner,
        block_pool=BlockPool(runner.num_pool_blocks),
        host_pool=None if runner.host_cache is None else BlockPool(runner.host_cache.num_blocks),
        max_model_len=_max_model_len(config, runner),
        prefix_caching=config.prefix_caching,
        costs=StepCosts(_estimated_cost(runner)),
    )


def model_fingerprint(folder: Path, quantisation: Quantisation | None, activation_bits: ActivationBits = 8) -> str:
    """SHA-256 over the model's configuration and samples of its weights: equal for equal checkpoints, loaded alike.

    Samples, because hashing all of a large checkpoint would take longer than loading it.
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
            for index in range(_NUM_SAMPLES):
                weights.seek(size * index // _NUM_SAMPLES)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _estimated_cost(runner: ModelRunner) -> StepCost:
    """With nothing measured. Only its proportions matter."""
    shape = ModelShape.of(runner.config, bytes_per_value=runner.kv_cache.layout.dtype.itemsize)
    return roofline_cost(shape, CPU_CORE if runner.kv_cache.tensor.device.type == "cpu" else H100_SXM)


def _dtype(name: DtypeName, folder: Path) -> torch.dtype:
    if name == "auto":
        raw = json.loads((folder / "config.json").read_text())
        stated = raw.get("dtype") or raw.get("torch_dtype")
        name = "float32" if stated == "float32" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _max_model_len(config: EngineConfig, runner: ModelRunner) -> int:
    held = _longest_held(runner)
    made_for = runner.config.max_position_embeddings
    wanted = config.max_model_len or min(made_for, held)
    if wanted > made_for:
        raise ValueError(f"max_model_len is {wanted}, but the model was made for {made_for} tokens; lower it")
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
