"""From the configuration tree to what each part takes. No decisions, no defaults of its own."""

from __future__ import annotations

from cluster.settings import KvPoolSettings, LegatoConfig, PoolSettings
from decode_workers.worker import DecodeWorkerConfig
from engine.loading import EngineConfig
from kv_transfer.transfer_config import TransferConfig
from prefill_workers.worker import PrefillWorkerConfig


def prefill_engine(config: LegatoConfig) -> EngineConfig:
    return _engine(config, config.kv.prefill, config.prefill)


def decode_engine(config: LegatoConfig) -> EngineConfig:
    return _engine(config, config.kv.decode, config.decode)


def prefill_worker(config: LegatoConfig, host: str) -> PrefillWorkerConfig:
    return PrefillWorkerConfig(
        host=host,
        chunk_tokens=config.prefill.chunk_tokens,
        max_waiting=config.prefill.max_waiting,
        max_slab_bytes=config.transfer.slab_bytes,
        heartbeat_s=config.scheduler.heartbeat_s,
    )


def decode_worker(config: LegatoConfig, host: str) -> DecodeWorkerConfig:
    return DecodeWorkerConfig(
        host=host,
        max_num_seqs=config.decode.max_num_seqs,
        token_budget=config.decode.chunk_tokens + config.decode.max_num_seqs,
        max_waiting=config.decode.max_waiting,
        reserve_wait_s=config.decode.reserve_wait_s,
        lease_ttl_s=config.transfer.lease_ttl_s,
        heartbeat_s=config.scheduler.heartbeat_s,
    )


def transfer_config(config: LegatoConfig) -> TransferConfig:
    return TransferConfig(
        transport=config.transfer.transport,
        slab_bytes=config.transfer.slab_bytes,
        num_slabs=config.transfer.num_slabs,
        num_connections=config.transfer.num_connections,
    )


def _engine(config: LegatoConfig, kv: KvPoolSettings, pool: PoolSettings) -> EngineConfig:
    return EngineConfig(
        model_ref=config.model.ref,
        model_name=config.model.name,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        block_size=kv.block_size,
        layers_per_group=config.kv.layers_per_group,
        kv_bytes=kv.memory.num_bytes,
        kv_blocks=kv.memory.num_blocks,
        num_threads=pool.threads,
        prefix_caching=config.kv.prefix_cache,
    )
