"""From the configuration tree to what each part takes. No decisions, no defaults of its own."""

from __future__ import annotations

from cluster.config.kv import KvPoolSettings
from cluster.config.settings import LegatoConfig, PoolSettings
from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeRole, DecodeWorkerConfig
from engine.steps.loading import EngineConfig
from engine.steps.memory_profile import StepSize
from kv_transfer.messages.fields import Role
from kv_transfer.tiers.config import DiskConfig, TiersConfig
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerRole
from prefill_workers.worker import PrefillRole, PrefillWorkerConfig


def prefill_engine(config: LegatoConfig) -> EngineConfig:
    return _engine(config, config.kv.prefill, config.prefill, may_decode=config.scheduler.role_flips)


def decode_engine(config: LegatoConfig) -> EngineConfig:
    return _engine(config, config.kv.decode, config.decode, may_decode=True)


def prefill_worker(config: LegatoConfig) -> PrefillWorkerConfig:
    return PrefillWorkerConfig(
        chunk_tokens=config.prefill.chunk_tokens,
        max_waiting=config.prefill.max_waiting,
        max_slab_bytes=config.transfer.slab_bytes,
        heartbeat_s=config.scheduler.heartbeat_s,
        calibration_s=config.prefill.calibration_s,
    )


def decode_worker(config: LegatoConfig) -> DecodeWorkerConfig:
    return DecodeWorkerConfig(
        max_num_seqs=config.decode.max_num_seqs,
        token_budget=config.decode.chunk_tokens + config.decode.max_num_seqs,
        max_waiting=config.decode.max_waiting,
        reserve_wait_s=config.decode.reserve_wait_s,
        lease_ttl_s=config.transfer.lease_ttl_s,
        heartbeat_s=config.scheduler.heartbeat_s,
        calibration_s=config.decode.calibration_s,
        layerkv=_layerkv(config),
        overlap_steps={"auto": None, "on": True, "off": False}[config.decode.overlap_steps],
    )


def worker_roles(config: LegatoConfig) -> dict[Role, WorkerRole]:
    """What every worker can be, whichever pool it was started in."""
    return {"prefill": PrefillRole(prefill_worker(config)), "decode": DecodeRole(decode_worker(config))}


def prefill_tiers(config: LegatoConfig) -> TiersConfig:
    return _tiers(config, config.kv.prefill)


def decode_tiers(config: LegatoConfig) -> TiersConfig:
    return _tiers(config, config.kv.decode)


def transfer_config(config: LegatoConfig) -> TransferConfig:
    return TransferConfig(
        transport=config.transfer.transport,
        slab_bytes=config.transfer.slab_bytes,
        num_slabs=config.transfer.num_slabs,
        num_connections=config.transfer.num_connections,
        digest=config.transfer.digest,
    )


def _engine(config: LegatoConfig, kv: KvPoolSettings, pool: PoolSettings, *, may_decode: bool) -> EngineConfig:
    return EngineConfig(
        model_ref=config.model.ref,
        model_name=config.model.name,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        block_size=kv.block_size,
        layers_per_group=config.kv.layers_per_group,
        kv_bytes=kv.memory.num_bytes,
        kv_blocks=kv.memory.num_blocks,
        kv_share=kv.memory.share,
        largest_step=_largest_step(config),
        staging_bytes=kv.staging if config.kv.layerkv == "auto" and kv.has_host_memory else 0,
        ring_groups=config.kv.ring_groups,
        num_threads=pool.threads,
        tensor_parallel=pool.tensor_parallel,
        prefix_caching=config.kv.prefix_cache,
        batch_invariant=config.model.batch_invariant,
        quantisation=config.model.quantisation,
        share_weights=config.model.share_weights,
        activation_bits=config.model.quantized_activations,
        decode_graphs=may_decode and config.decode.cuda_graphs == "auto",
        device="cuda:0" if pool.num_gpus else "cpu",  # Ray shows a worker only the GPUs that are set aside for it
    )


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
    return LayerKvConfig(tpot_target_s=config.decode.tpot_target_ms / 1000, max_in_flight=config.decode.max_in_flight)


def _tiers(config: LegatoConfig, kv: KvPoolSettings) -> TiersConfig:
    disk = config.kv.disk
    return TiersConfig(
        host=kv.host_memory,
        host_folder=config.kv.host_folder,
        disk=None if disk is None else DiskConfig(folder=disk.path, budget=disk.budget, sync=disk.sync),
    )
