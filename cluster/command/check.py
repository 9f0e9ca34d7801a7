"""`legato check`: what is wrong with a configuration, and what its workers would take, with nothing started or loaded.

The model's folder is read as far as its config.json and the headers of its weights. A model that is not on this machine
is not fetched: then the settings alone are checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cluster.command.serve import count_gpus, is_config, model_document, require_model
from cluster.config.fields import format_budget
from cluster.config.load import IMPORT_PATH, ConfigError, find_legato, load_config, load_document
from cluster.config.settings import GatewaySettings, LegatoConfig
from cluster.deployment.capacity import needs, require_room
from cluster.deployment.local_cluster import require_serve_takes, unheeded
from engine.memory.control_groups import usable_cores
from engine.sampling.params import checkpoint_defaults, told_defaults

if TYPE_CHECKING:
    import torch

    from engine.kv.cache import KVLayout
    from engine.model.config import DecoderConfig
    from engine.model.shards import Shard
    from engine.steps.loading import EngineConfig
    from kv_transfer.messages.fields import Role

# torch, which most of what is asked below brings along, takes seconds: a configuration that is wrong is told at once.

_MIB: Final = 2**20


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code: 1 if something is wrong."""
    try:
        if is_config(arguments.target):
            document, config = load_document(arguments.target, manifests=True)
            require_serve_takes(document, arguments.target)
        else:
            require_model(arguments.target)
            document = _document_of_model(arguments.target)
            config = load_config(document["applications"][0]["args"])
    except ConfigError as error:
        return _tell(str(error).splitlines())
    parts = ", ".join(f"{need.replicas} {need.what}{'s' * (need.replicas > 1)}" for need in needs(config))
    print(f"The settings are valid: {config.names} on {parts}.", flush=True)
    problems: list[str] = []
    bytes_on_cpu: list[int] = []  # of each model that is here
    for served in config.served:
        if config.models:
            print(f"{served.model.name}:")
        try:
            _require_tuned(served)
            workers = _check_model(served, problems)
        except ValueError as error:
            problems.append(str(error))
        else:
            bytes_on_cpu += [_bytes_on_cpu(served, workers)] if workers else []
    notes = [*_serve_notes(document), *_setting_notes(config)]
    if bytes_on_cpu:
        notes += _notes(config, sum(bytes_on_cpu))
    for note in notes:
        print(f"Note: {note}")
    return _tell(list(dict.fromkeys(problems)))


def _require_tuned(config: LegatoConfig) -> None:
    """Raises ValueError where `tuning` names a field that there is not, or a value that it cannot have."""
    if not config.tuning:
        return
    from cluster.config.build import decode_worker, engine_config, prefill_worker, tiers_config
    from cluster.config.build_scheduler import scheduler_policy
    from cluster.gateway.orchestrator import OrchestratorConfig
    from cluster.http.api import HttpLimits

    for make in (prefill_worker, decode_worker, scheduler_policy):
        make(config)
    for role in _roles(config):
        engine_config(role, config)
        tiers_config(role, config)
    config.tuned(OrchestratorConfig())
    config.tuned(HttpLimits())


def _check_model(config: LegatoConfig, problems: list[str]) -> dict[Role, WorkerBytes]:
    """Print whose code computes the one model of a configuration, and what each of its workers takes. Returns the
    latter, by role; adds to `problems` what is wrong with a worker. Raises ValueError for a model that cannot be
    served."""
    from engine.checkpoint.store import has_weights
    from engine.steps.loading import told_dtype

    folder = find_model(config.model.ref)
    if folder is None:
        print(
            f"{config.model.ref} is not on this machine: whether it can be served, and the memory that it takes, was"
            " not looked at. `legato serve` fetches it, the weights only if it can be served."
        )
        return {}
    print(_computed_by(config, folder), flush=True)
    if config.model.generation_config == "auto" and (told := told_defaults(checkpoint_defaults(folder))):
        print(told)
    if defaults := config.model.chat_template_kwargs:
        from engine.text.tokenizer import Tokenizer

        Tokenizer(folder).require_template_reads(defaults)
    if told := told_dtype(config.model.dtype, folder):
        print(told)
    if not has_weights(folder):
        print(
            "Its weights are not on this machine: the memory that they take was not looked at. A worker reads them"
            " from *.safetensors."
        )
        return {}
    workers: dict[Role, WorkerBytes] = {}
    for role in _roles(config):
        try:
            _require_drafter(role, config, folder)
            workers[role] = worker_memory(role, config, folder)
        except ValueError as error:
            problems.append(f"a {role} worker: {error}")
        else:
            print("\n".join(_table(role, config, workers[role])), flush=True)
    return workers


def _require_drafter(role: Role, config: LegatoConfig, folder: Path) -> None:
    """Check that what drafts for the model in `folder` on such a worker can, if there is any and it is on this machine.
    Raises ValueError where it cannot, or where a folder is not there."""
    from cluster.config.build import engine_config
    from engine.checkpoint.store import has_weights
    from engine.steps.loading import heads_for, require_draft_fits

    engine = engine_config(role, config)
    if engine.draft_ref is None:
        return
    if (heads := heads_for(engine.draft_ref, folder, engine.backend)) is not None:
        draft_folder, _ = heads
    elif (found := find_model(engine.draft_ref)) is not None:
        draft_folder = found
        require_draft_fits(engine, folder, draft_folder)
    else:
        print(f"{engine.draft_ref}, which drafts, is not on this machine: whether it can was not looked at.")
        return
    if not has_weights(draft_folder):
        print(
            f"The weights of {engine.draft_ref}, which drafts, are not on this machine. A worker reads them from"
            " *.safetensors."
        )


def _computed_by(config: LegatoConfig, folder: Path) -> str:
    """A sentence that says whose code computes the model. Raises ValueError for a model that cannot be served."""
    from engine.model.config import ModelConfig, read_config

    model = read_config(folder, config.model.backend)
    whose = "Legato's own code" if isinstance(model, ModelConfig) else "the code of transformers"
    return f"{whose} computes it: {model.architecture}."


def _tell(problems: list[str]) -> int:
    """Print problems as errors. Returns the exit code: 1 if there are any."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _document_of_model(ref: str) -> dict[str, Any]:
    """The Serve config that `legato serve` would make for a model on this machine."""
    return model_document(
        ref,
        num_prefill=1,
        num_decode=1,
        num_workers=None,
        port=8000,
        num_cores=usable_cores(),
        num_gpus=count_gpus(),
    )


def _roles(config: LegatoConfig) -> Iterator[Role]:
    """Yields the roles of the pools that the configuration has."""
    if not config.is_colocated:
        yield "prefill"
    yield "decode"


def find_model(ref: str) -> Path | None:
    """The folder of a model that is on this machine, perhaps without its weights, which a gateway does without; None:
    it would have to be fetched. Raises ValueError for a folder or a file that is no model, or is not there, and for a
    name that no model can have."""
    from engine.checkpoint.builtin_models import BUILTIN_MODELS
    from engine.checkpoint.store import hub_folder, is_hub_id, resolve_model
    from kernels.cache_folder import default_cache_dir

    if ref in BUILTIN_MODELS:
        folder = default_cache_dir() / ref
        return folder if (folder / "config.json").is_file() else None
    if Path(ref).expanduser().exists() or not is_hub_id(ref):
        return resolve_model(ref, with_weights=False)
    return hub_folder(ref)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBytes:
    """The memory that one worker takes, on all of its devices. `token_bytes`: the weights that one token is multiplied
    by, which are fewer where it chooses among experts. `adapter_bytes`: the most that adapters may take. `draft_bytes`:
    of what drafts, all that it takes, also KV, which what the configuration says is shared out between. `step_bytes` is
    an estimate. `host_bytes` and `host_tokens`: KV in host memory, on top. `kv_copies`: how many of its processes
    have the same KV, which `kv_tokens` and what the configuration says count once. `kv_bytes` None: KV gets what the
    rest leaves of the share of a GPU that the configuration names. `whole_experts`: the most that one of its processes
    has; None: each has a part of every one."""

    weight_bytes: int
    adapter_bytes: int
    token_bytes: int
    step_bytes: int
    staging_bytes: int
    host_bytes: int
    draft_bytes: int = 0
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    kv_copies: int = 1
    host_tokens: int | None = None
    context: int | None = None
    whole_experts: int | None = None

    @property
    def total_bytes(self) -> int:
        model, kv = self.weight_bytes + self.adapter_bytes + self.step_bytes, self.kv_bytes or 0
        return model + self.draft_bytes + kv + self.staging_bytes + self.host_bytes


def worker_memory(role: Role, config: LegatoConfig, folder: Path) -> WorkerBytes:
    """Work out a worker's memory by the rules of a worker that loads the model.
    Raises ValueError, with advice, where that would."""
    from cluster.command.weight_sizes import num_values
    from cluster.config.build import engine_config, tiers_config
    from engine.checkpoint.store import has_weights
    from engine.memory.host import memory_bytes
    from engine.steps.loading import dtype_of, heads_for, with_draft

    engine = engine_config(role, config)
    engine = replace(engine, host_bytes=tiers_config(role, config).host.resolve(memory_bytes()))
    if engine.draft_ref is None:
        return _engine_memory(engine, folder)
    if (heads := heads_for(engine.draft_ref, folder, engine.backend)) is not None:
        draft_bytes = num_values(heads[0]) * dtype_of(engine.dtype, folder).itemsize
    elif (draft_folder := find_model(engine.draft_ref)) is not None and has_weights(draft_folder):
        alone, engine = with_draft(engine, engine.draft_ref, folder, draft_folder)
        draft_bytes = _engine_memory(alone, draft_folder).total_bytes
    else:
        return _engine_memory(engine, folder)
    return replace(_engine_memory(engine, folder), draft_bytes=draft_bytes)


def _engine_memory(engine: EngineConfig, folder: Path) -> WorkerBytes:
    """As `worker_memory`, of one model without what drafts for it."""
    from engine.model.config import ModelConfig
    from engine.model.shards import WHOLE, shards_of
    from engine.steps.loading import dtype_of, layout_of, served_config

    model = served_config(folder, engine)
    shards = [WHOLE]
    if isinstance(model, ModelConfig):
        shards = shards_of(
            model, engine.tensor_parallel, expert_parallel=engine.expert_parallel, quantisation=engine.quantisation
        )
    layout = layout_of(model, engine, dtype_of(engine.dtype, folder))
    return _with_kv(_beside_kv(engine, folder, model, layout.dtype, shards), engine, model, layout)


def _beside_kv(
    engine: EngineConfig, folder: Path, model: DecoderConfig, dtype: torch.dtype, shards: Sequence[Shard]
) -> WorkerBytes:
    """All that one model takes beside KV on the device."""
    from torch import device

    from cluster.command.weight_sizes import weight_sizes
    from engine.cost_model.roofline import ModelShape
    from engine.steps.loading import adapter_bytes
    from kernels.ops import packed_bytes_on

    sizes = weight_sizes(folder, model, dtype, engine.quantisation, on_gpus=engine.device != "cpu", shards=shards)
    experts = ModelShape.of(model, bytes_per_value=dtype.itemsize).experts
    chosen, whole_experts = 1.0, None
    if experts is not None:
        chosen = experts.per_token / experts.num_experts
        if shards[0].expert_parallel:
            whole_experts = max(len(shard.experts(experts.num_experts)) for shard in shards)
    copies = shards[0].kv_holders(model.num_kv_heads)
    return WorkerBytes(
        weight_bytes=round(sum(sizes.values())),
        adapter_bytes=adapter_bytes(model, engine, dtype, packed_bytes_on(device(engine.device))),
        token_bytes=round(sum(size * (chosen if ".experts." in name else 1) for name, size in sizes.items())),
        step_bytes=_step_bytes(engine, folder, model, dtype, shards),
        staging_bytes=engine.staging_bytes * copies,
        host_bytes=engine.host_bytes,
        kv_copies=copies,
        whole_experts=whole_experts,
    )


def _step_bytes(
    engine: EngineConfig, folder: Path, model: DecoderConfig, dtype: torch.dtype, shards: Sequence[Shard]
) -> int:
    """What the largest step takes on all devices: activations, and where it has many rows the values of a weight that
    GPUs keep in codes."""
    from cluster.command.weight_sizes import most_values
    from engine.cost_model.roofline import ModelShape, activation_bytes
    from engine.model.config import ModelConfig
    from kernels.quantised_weight import VALUES_FROM_ROWS

    shape, num_ranks, largest = ModelShape.of(model, bytes_per_value=dtype.itemsize), len(shards), engine.largest_step
    if shape.experts is not None and shards[0].expert_parallel:
        # Each process has room for all rows: a router may like none but its experts.
        shape = replace(shape, experts=replace(shape.experts, width=shape.experts.width * num_ranks))
    activations = num_ranks * activation_bytes(
        shape, num_devices=num_ranks, token_budget=largest.num_tokens, max_num_seqs=largest.num_rows
    )
    expands = engine.device != "cpu" and largest.num_tokens >= VALUES_FROM_ROWS and not engine.batch_invariant
    if not expands or not isinstance(model, ModelConfig):
        return activations
    return activations + most_values(folder, model, engine.quantisation, num_ranks) * dtype.itemsize


def _with_kv(found: WorkerBytes, engine: EngineConfig, model: DecoderConfig, layout: KVLayout) -> WorkerBytes:
    """What was found with the KV that there is room for. Raises ValueError, with advice, where there is none."""
    from engine.kv.sizes import KVMemory, size_tiers
    from engine.memory.host import memory_bytes
    from engine.steps.loading import context_length

    kv_bytes = engine.kv_bytes
    if engine.kv_share is not None and engine.device == "cpu":
        beside = found.weight_bytes + found.adapter_bytes + found.step_bytes
        kv_bytes = (int(engine.kv_share * memory_bytes()) - beside) // found.kv_copies - engine.staging_bytes
        if kv_bytes <= 0:
            raise ValueError(
                f"of {engine.kv_share:.0%} of this machine's memory nothing is left for KV beside"
                f" {found.weight_bytes / 1e9:.1f} GB of weights, {found.adapter_bytes / 1e9:.1f} GB of adapters and"
                f" {found.step_bytes / 1e9:.1f} GB for a step; allow a larger share, or shorter steps (chunk_tokens)"
            )
    if kv_bytes is None and engine.kv_blocks is None:  # only the worker can ask its GPU how much is left
        context_length(engine.max_model_len, model, held=sys.maxsize)
        return found
    memory = KVMemory(
        kv_blocks=engine.kv_blocks if kv_bytes is None else None,
        kv_bytes=kv_bytes,
        host_bytes=engine.host_bytes,
        staging_bytes=engine.staging_bytes,
        ring_groups=engine.ring_groups,
    )
    sizes = size_tiers(layout, memory)
    columns, host_columns = (blocks // layout.num_layer_groups for blocks in (sizes.pool_blocks, sizes.host_blocks))
    return replace(
        found,
        kv_bytes=sizes.pool_blocks * layout.block_bytes * found.kv_copies,
        kv_tokens=columns * layout.block_size,
        host_tokens=host_columns * layout.block_size,
        context=context_length(engine.max_model_len, model, held=sizes.longest(layout)),
    )


def _table(role: Role, config: LegatoConfig, found: WorkerBytes) -> Iterator[str]:
    """Yields the lines of a table of a worker's memory."""
    from cluster.config.build import largest_step

    pool, kv = config.pools[role], config.kv.pools[role]
    where = f"{pool.num_gpus:g} GPU{'s' * (pool.num_gpus > 1)}" if pool.num_gpus else "the CPU"
    step = largest_step(config).num_tokens
    yield f"Each {role} worker, on {where}:"
    chosen = f"{found.token_bytes / 2**20:,.0f} MiB for each token" if found.token_bytes < found.weight_bytes else ""
    whole = f"{found.whole_experts} whole experts of a layer in a process" if found.whole_experts else ""
    yield _row("weights", found.weight_bytes, ", ".join(filter(None, (config.model.quantization, chosen, whole))))
    if found.adapter_bytes:
        yield _row(
            "adapters", found.adapter_bytes, f"at most: {config.adapters.max_loaded} of rank {config.adapters.max_rank}"
        )
    if found.draft_bytes:
        yield _row("drafts", found.draft_bytes, f"{config.decode.draft_model}, with KV of its own")
    yield _row("a step", found.step_bytes, f"of up to {step:,} tokens, an estimate")
    holds = f"{kv.memory}" if found.kv_tokens is None else f"{found.kv_tokens:,} tokens"
    copies = f", the same in {found.kv_copies} processes" if found.kv_copies > 1 else ""
    yield _row("KV", found.kv_bytes, holds + copies)
    if found.staging_bytes:
        yield _row("staging", found.staging_bytes, "through which layers in host memory pass")
    if found.host_bytes:
        told = f"KV in host memory ({format_budget(kv.host_memory)})"
        yield _row("host", found.host_bytes, f"{told}, {found.host_tokens:,} tokens" if found.host_tokens else told)
    context = "" if found.context is None else f"prompt and answer together up to {found.context:,} tokens"
    yield _row("in all", found.total_bytes, context)


def _row(name: str, num_bytes: int | None, told: str) -> str:
    amount = "the rest" if num_bytes is None else f"{num_bytes / _MIB:,.0f} MiB"
    return f"  {name:<8} {amount:>12}  {told}".rstrip()


def _bytes_on_cpu(config: LegatoConfig, workers: Mapping[Role, WorkerBytes]) -> int:
    """The memory that all workers of the one model of a configuration take together, as far as they are on CPUs."""
    on_cpu = {role: found for role, found in workers.items() if not config.pools[role].num_gpus}
    return sum(config.pools[role].replicas * found.total_bytes for role, found in on_cpu.items())


def _serve_notes(document: dict[str, Any]) -> Iterator[str]:
    if ignored := unheeded(document):
        yield f"`legato serve` refuses {' and '.join(ignored)}, which `serve run` alone heeds"
    if (given := find_legato(document)[1]["import_path"]) != IMPORT_PATH:
        yield f"{given} is not Legato's own {IMPORT_PATH}: its `args` were checked as if it hands them on to that"


def _setting_notes(config: LegatoConfig) -> Iterator[str]:
    """Yields what is no mistake for sure: gateways of several nodes that would each keep what clients leave in a folder
    of its own node, a folder of adapters that is not here, settings that nobody heeds."""
    gateway = config.gateway
    folder = GatewaySettings.model_fields["storage"].default
    if config.network.host == "node" and gateway.replicas > 1 and gateway.storage == folder:
        yield (
            f"network.host is node, and {gateway.replicas} gateways keep files, batches and responses in"
            f" {folder}, which each node has for itself: which of them are found would depend on the gateway that"
            " answers; set gateway.storage to a folder that all nodes see, or to null, and such requests are refused"
        )
    for adapters in (served.adapters.folder for served in config.served):
        if adapters is not None and not Path(adapters).expanduser().is_dir():
            yield f"adapters.folder is {adapters}, which is not here; gateways make it where they run, without adapters"
    yield from config.unheeded()


def _notes(config: LegatoConfig, together: int) -> Iterator[str]:
    """Yields what does not fit on this machine, which may not be the one that serves. `together`: bytes that all
    workers on CPUs take."""
    from engine.memory.host import memory_bytes

    if together > memory_bytes():
        yield (
            f"together the workers on CPUs take {together / 1e9:.1f} GB, and this machine has"
            f" {memory_bytes() / 1e9:.1f}: lower kv.*.memory or kv.*.host_memory, or serve it on other nodes"
        )
    here = {"CPU": float(usable_cores()), "GPU": float(count_gpus())}
    try:
        require_room(config, [here])
    except ConfigError as error:
        yield f"on a Ray of this machine alone: {error}"
