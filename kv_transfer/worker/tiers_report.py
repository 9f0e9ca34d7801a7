"""What a worker reports of its memory tiers: numbers that others keep, brought together for its snapshots."""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from engine.steps.loading import LoadedModel
from kv_transfer.messages.fields import Tier
from kv_transfer.messages.workers import TierBlocks, TiersReport
from kv_transfer.tiers.disk.tier import DiskTier
from kv_transfer.tiers.memory import tier_blocks
from kv_transfer.worker.prefix_loading import PrefixLoading


def tiers_report(model: LoadedModel, prefix: PrefixLoading, *, num_in_host: int, num_host_landings: int) -> TiersReport:
    """The tiers of `model` and those below it, and what both roles' schedulers count. Never waits for a disk."""
    lower = prefix.tiers
    return TiersReport(
        blocks=_blocks(model.block_pool, model.host_pool, None if lower is None else lower.disk),
        num_in_host=num_in_host,
        host_bytes_per_s=model.host_bytes_per_s(),
        num_host_landings=num_host_landings,
        hit_tokens=dict(prefix.hit_tokens),
        missed_tokens=prefix.missed_tokens,
        loaded_columns={} if lower is None else dict(lower.loaded_columns),
        failed_columns={} if lower is None else dict(lower.failed_columns),
        host_stored_columns=0 if lower is None else lower.write_through.copied_columns,
        host_dropped_columns=0 if lower is None else lower.write_through.skipped_columns,
        disk=None if lower is None or lower.disk is None else lower.disk.report(),
    )


def _blocks(device: BlockPool, host: BlockPool | None, disk: DiskTier | None) -> dict[Tier, TierBlocks]:
    blocks: dict[Tier, TierBlocks] = {"device": tier_blocks(device)}
    if host is not None:
        blocks["host"] = tier_blocks(host)
    if disk is not None:
        blocks["disk"] = disk.blocks()
    return blocks
