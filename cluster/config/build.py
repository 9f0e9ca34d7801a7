"""From the configuration tree to what each part takes, with the constants that are no settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from cluster.config.settings import LegatoConfig
from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.drafting.speculation import SpeculationConfig
from engine.steps.loading import EngineConfig
from engine.steps.memory_profile import StepSize
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.tiers.config import DiskConfig, TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerRole
from kv_transfer.worker.replica import ModelKit, ReplicaSite, WorkerReplica
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig

CALIBRATION_S: Final = 2.0
"""How long a worker tries steps out at its start, so that its first requests are predicted well."""

RESERVE_WAIT_S: Final = 60.0
"""How long a reservation may wait for free KV blocks before it is refused."""

LEASE_TTL_S: Final = 10.0
"""A reservation lapses when nothing is heard of it for so long."""

MAX_IN_FLIGHT: Final = 256
"""Sequences that one worker may hold in all its tiers, with LayerKV; as many as one step may hold, if that is more."""


def worker_replica(
    role: Role,
    config: LegatoConfig,
    others: Sequence[LegatoConfig],
    site: ReplicaSite,
    locate_scheduler: Callable[[], Awaitable[Endpoint]],
) -> WorkerReplica:
    """Make, in a worker's process, a replica of the pool of this role. It is not started. `others`: a configuration for
    each other model, of which those are left out that its process cannot take on."""
    able = [other for other in others if _can_change(role, config, other)]
    kits = {each.model.name: _model_kit(each, site) for each in (config, *able)}
    return WorkerReplica(role, config.model.name, kits, site, locate_scheduler)


def _model_kit(config: LegatoConfig, site: ReplicaSite) -> ModelKit:
    # A worker can take on any of these roles, whichever pool it was started in.
    roles: dict[Role, WorkerRole] = {
        "prefill": partial(PrefillWorker, config=prefill_worker(config)),
        "decode": partial(DecodeWorker, config=decode_worker(config)),
    }

    def tiers(role: Role) -> WorkerTiers:
        return WorkerTiers(tiers_config(role, config), engine_config(role, config), site.secret)

    return ModelKit(roles=roles, tiers=tiers, transfer=transfer_config(config))


def _can_change(role: Role, config: LegatoConfig, other: LegatoConfig) -> bool:
    """Whether a process that is started in a pool of one model may become a worker of another: Ray has given it as many
    GPUs as such a worker has, and the resources that such a worker is kept to its nodes by; and nobody counts the
    pools' workers by where they were started."""
    own, pools = config.pools[role], [*config.pools.values(), *other.pools.values()]
    others = [pool for pool in other.pools.values() if pool.replicas]
    alike = all((pool.num_gpus, pool.resources) == (own.num_gpus, own.resources) for pool in others)
    return alike and all(pool.autoscaling is None for pool in pools)


def prefill_worker(config: LegatoConfig) -> PrefillWorkerConfig:
    return config.tuned(
        PrefillWorkerConfig(
            chunk_tokens=config.prefill.chunk_tokens,
            max_slab_bytes=transfer_config(config).slab_bytes,
            calibration_s=CALIBRATION_S,
            kept_s=max(RESERVE_WAIT_S, decode_worker(config).reserve_wait_s),
        )
    )


def decode_worker(config: LegatoConfig) -> DecodeWorkerConfig:
    return config.tuned(
        DecodeWorkerConfig(
            max_num_seqs=config.decode.max_num_seqs,
            token_budget=config.decode.chunk_tokens + config.decode.max_num_seqs,
            max_slab_bytes=transfer_config(config).slab_bytes,
            reserve_wait_s=RESERVE_WAIT_S,
            lease_ttl_s=LEASE_TTL_S,
            calibration_s=CALIBRATION_S,
            layerkv=_layerkv(config),
            speculation=_speculation(config),
        )
    )


def transfer_config(config: LegatoConfig) -> TransferConfig:
    made = TransferConfig(transport=config.transfer.transport)
    if any(pool.num_gpus for pool in config.pools.values() if pool.replicas):
        made = replace(made, slab_bytes=32 * 2**20, num_slabs=16, num_connections=4)
    return config.tuned(made)


def tiers_config(role: Role, config: LegatoConfig) -> TiersConfig:
    """The config of the KV tiers of a worker that is started in this role's pool."""
    disk = config.kv.disk
    return config.tuned(
        TiersConfig(
            host=config.kv.pools[role].host_memory,
            disk=None if disk is None else DiskConfig(folder=disk.path, budget=disk.budget, sync=disk.sync),
        )
    )


def engine_config(role: Role, config: LegatoConfig) -> EngineConfig:
    """The config of the engine of a worker that is started in this role's pool."""
    kv, pool = config.kv.pools[role], config.pools[role]
    made = EngineConfig(
        model_ref=config.model.ref,
        model_name=config.model.name,
        backend=config.model.backend,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        block_size=kv.block_size,
        kv_bytes=kv.memory.num_bytes,
        kv_blocks=kv.memory.num_blocks,
        kv_share=kv.memory.share,
        largest_step=largest_step(config),
        staging_bytes=kv.staging if config.kv.layerkv == "auto" and kv.has_host_memory else 0,
        num_threads=pool.threads,
        tensor_parallel=pool.tensor_parallel,
        expert_parallel=pool.expert_parallel,
        prefix_caching=config.kv.prefix_cache,
        batch_invariant=config.model.batch_invariant,
        quantisation=config.model.quantisation,
        share_weights="auto",
        draft_ref=_draft_ref(role, config),
        max_adapters=config.adapters.max_loaded if config.adapters.folder is not None else 0,
        max_adapter_rank=config.adapters.max_rank,
        decode_graphs=role == "decode" or config.scheduler.role_flips,
        device="cuda:0" if pool.num_gpus else "cpu",  # Ray shows a worker only the GPUs that are set aside for it
    )
    return config.tuned(made)


def largest_step(config: LegatoConfig) -> StepSize:
    """The largest step of the roles that there are: a worker may change its role, and its memory stays as it is."""
    decode = config.decode
    return StepSize(
        num_tokens=max(
            0 if config.is_colocated else config.prefill.chunk_tokens, decode.chunk_tokens + decode.max_num_seqs
        ),
        num_seqs=decode.max_num_seqs,
    )


def _layerkv(config: LegatoConfig) -> LayerKvConfig | None:
    if config.kv.layerkv == "off":
        return None
    return config.tuned(
        LayerKvConfig(
            tpot_target_s=config.decode.tpot_target_ms / 1000,
            max_in_flight=max(MAX_IN_FLIGHT, config.decode.max_num_seqs),
        )
    )


def _draft_ref(role: Role, config: LegatoConfig) -> str | None:
    is_to_decode = role == "decode" or config.scheduler.role_flips
    return config.decode.draft_model if is_to_decode and config.decode.speculation == "auto" else None


def _speculation(config: LegatoConfig) -> SpeculationConfig | None:
    return None if config.decode.speculation == "off" else config.tuned(SpeculationConfig())
