"""From the configuration tree to what each part takes, with the constants that are no settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from cluster.config.settings import KvPoolSettings, LegatoConfig, PoolSettings
from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.steps.loading import EngineConfig
from engine.steps.memory_profile import StepSize
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.tiers.config import DiskConfig, TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerRole
from kv_transfer.worker.replica import ReplicaSite, WorkerReplica
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
    role: Role, config: LegatoConfig, site: ReplicaSite, locate_scheduler: Callable[[], Awaitable[Endpoint]]
) -> WorkerReplica:
    """What a worker's process makes of the configuration: a replica of the pool of this role, not started."""
    if role == "prefill":
        tiers = WorkerTiers(prefill_tiers(config), prefill_engine(config), site.secret)
    else:
        tiers = WorkerTiers(decode_tiers(config), decode_engine(config), site.secret)
    return WorkerReplica(role, worker_roles(config), tiers, transfer_config(config), site, locate_scheduler)


def prefill_engine(config: LegatoConfig) -> EngineConfig:
    return _engine(config, config.kv.prefill, config.prefill, may_decode=config.scheduler.role_flips)


def decode_engine(config: LegatoConfig) -> EngineConfig:
    return _engine(config, config.kv.decode, config.decode, may_decode=True)


def prefill_worker(config: LegatoConfig) -> PrefillWorkerConfig:
    return config.tuned(
        PrefillWorkerConfig(
            chunk_tokens=config.prefill.chunk_tokens,
            max_slab_bytes=transfer_config(config).slab_bytes,
            calibration_s=CALIBRATION_S,
        )
    )


def decode_worker(config: LegatoConfig) -> DecodeWorkerConfig:
    return config.tuned(
        DecodeWorkerConfig(
            max_num_seqs=config.decode.max_num_seqs,
            token_budget=config.decode.chunk_tokens + config.decode.max_num_seqs,
            reserve_wait_s=RESERVE_WAIT_S,
            lease_ttl_s=LEASE_TTL_S,
            calibration_s=CALIBRATION_S,
            layerkv=_layerkv(config),
        )
    )


def worker_roles(config: LegatoConfig) -> dict[Role, WorkerRole]:
    """What every worker can be, whichever pool it was started in."""
    return {
        "prefill": partial(PrefillWorker, config=prefill_worker(config)),
        "decode": partial(DecodeWorker, config=decode_worker(config)),
    }


def prefill_tiers(config: LegatoConfig) -> TiersConfig:
    return _tiers(config, config.kv.prefill)


def decode_tiers(config: LegatoConfig) -> TiersConfig:
    return _tiers(config, config.kv.decode)


def transfer_config(config: LegatoConfig) -> TransferConfig:
    if config.prefill.num_gpus or config.decode.num_gpus:
        made = TransferConfig(
            transport=config.transfer.transport, slab_bytes=32 * 2**20, num_slabs=16, num_connections=4
        )
    else:
        made = TransferConfig(transport=config.transfer.transport)
    return config.tuned(made)


def _engine(config: LegatoConfig, kv: KvPoolSettings, pool: PoolSettings, *, may_decode: bool) -> EngineConfig:
    made = EngineConfig(
        model_ref=config.model.ref,
        model_name=config.model.name,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        block_size=kv.block_size,
        kv_bytes=kv.memory.num_bytes,
        kv_blocks=kv.memory.num_blocks,
        kv_share=kv.memory.share,
        largest_step=_largest_step(config),
        staging_bytes=kv.staging if config.kv.layerkv == "auto" and kv.has_host_memory else 0,
        num_threads=pool.threads,
        tensor_parallel=pool.tensor_parallel,
        prefix_caching=config.kv.prefix_cache,
        batch_invariant=config.model.batch_invariant,
        quantisation=config.model.quantisation,
        share_weights="auto",
        decode_graphs=may_decode,
        device="cuda:0" if pool.num_gpus else "cpu",  # Ray shows a worker only the GPUs that are set aside for it
    )
    return config.tuned(made)


def _largest_step(config: LegatoConfig) -> StepSize:
    """Of either role: a worker may change its own, and its memory stays as it is."""
    decode = config.decode
    return StepSize(
        num_tokens=max(config.prefill.chunk_tokens, decode.chunk_tokens + decode.max_num_seqs),
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


def _tiers(config: LegatoConfig, kv: KvPoolSettings) -> TiersConfig:
    disk = config.kv.disk
    return config.tuned(
        TiersConfig(
            host=kv.host_memory,
            disk=None if disk is None else DiskConfig(folder=disk.path, budget=disk.budget, sync=disk.sync),
        )
    )
