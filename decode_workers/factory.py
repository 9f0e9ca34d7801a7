"""Puts a decode worker's scheduler and steps together for a loaded model: only wires."""

from __future__ import annotations

from collections.abc import Callable

from decode_workers.offload_policy import Residency
from decode_workers.pacing import LayerKvConfig
from decode_workers.scheduler import DecodeScheduler
from engine.kv.allocation import BlockAllocator
from engine.sequence import StepPlan
from engine.steps.loading import LoadedModel
from engine.steps.loop import AsyncScheduling


def decode_scheduler(
    model: LoadedModel,
    *,
    max_num_seqs: int,
    token_budget: int,
    layerkv: LayerKvConfig | None,
) -> DecodeScheduler:
    """Sequences rest in host memory only if `layerkv` says how and the model has a host pool and a staging ring."""
    allocator = BlockAllocator(
        model.block_pool,
        layer_groups=model.layout.num_layer_groups,
        block_size=model.layout.block_size,
        prefix_caching=model.prefix_caching,
        host_pool=model.host_pool,
    )
    return DecodeScheduler(
        allocator,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        tiers=_residency(model, allocator, layerkv),
    )


def step_overlap(
    model: LoadedModel, plan_ahead: Callable[[], StepPlan], *, wanted: bool | None
) -> AsyncScheduling | None:
    """The next step is prepared while one computes. `wanted` None: on a GPU, which idles otherwise; not on a CPU."""
    if wanted is None:
        wanted = model.runner.kv_cache.device.type != "cpu"
    if not wanted:
        return None
    return AsyncScheduling(runner=model.runner, plan=plan_ahead)


def _residency(model: LoadedModel, allocator: BlockAllocator, layerkv: LayerKvConfig | None) -> Residency | None:
    if layerkv is None or model.host_pool is None or not model.staging_columns:
        return None

    def host_bytes_per_s() -> float:
        stats = model.runner.transfer_stats
        return 0.0 if stats is None else stats.host_bytes_per_s

    return Residency(
        allocator,
        layerkv,
        staging_columns=model.staging_columns,
        block_bytes=model.layout.block_bytes,
        cost=model.costs.cost,
        host_bytes_per_s=host_bytes_per_s,
    )
