"""How much of a device's memory is left for KV: what is free once the model is there, less what the largest step takes.

Measured once, at the start; from then on a worker's memory is constant. Knows the runner; owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from engine.drafting.speculation import MOST_SLOTS
from engine.kv.cache import KVLayout
from engine.kv.sizes import KVMemory, KVSizes, size_tiers
from engine.memory.host import give_back_freed, memory_bytes
from engine.sampling.params import SamplingParams
from engine.sequence import BlockTable, ScheduledSequence, Sequence, StepPlan
from engine.steps.runner import ModelRunner

_DRAWN = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=0)  # the kind that takes most memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The most tokens of a step, and the most sequences that decode in it."""

    num_tokens: int = 2048
    num_seqs: int = 64

    @property
    def num_rows(self) -> int:
        """The most rows that have logits at a time: one of each sequence, and those of drafts. A step may sample more,
        where many short prompts end in it, and tell the log-probabilities of a long one; these are for the runner to
        cut."""
        return max(self.num_seqs, min(self.num_seqs + MOST_SLOTS, self.num_tokens))

    def num_blocks(self, layout: KVLayout) -> int:
        """The number of blocks that `largest_step` needs."""
        return layout.num_layer_groups * (-(-self.num_tokens // layout.block_size) + self.num_rows)


def sizes_to_measure_with(layout: KVLayout, memory: KVMemory, largest: StepSize) -> KVSizes:
    """What a runner needs to be asked how much of its device is left. Raises ValueError if the memory says its size."""
    if memory.kv_blocks is not None or memory.kv_bytes is not None:
        raise ValueError("give the size of the KV cache as a share, or in bytes, or in blocks")
    return KVSizes(pool_blocks=largest.num_blocks(layout), host_blocks=0, ring=None)


def sizes_left(
    runner: ModelRunner,
    memory: KVMemory,
    *,
    share: float,
    largest: StepSize,
    adapter_bytes: int,
    record: Callable[[], None] | None,
) -> KVSizes:
    """KV gets what is left of `share` of the device's memory, which only a runner that is up can be asked: beside the
    largest step, the staging ring, adapters that are yet to come and, if there are some, recorded decode steps."""
    left = kv_bytes_left(runner, largest, share) - memory.staging_bytes - adapter_bytes
    if record is not None:
        left -= recording_bytes(runner, record)
    return size_tiers(runner.sequence_kv.layout, replace(memory, kv_bytes=max(left, 0)))


def kv_bytes_left(runner: ModelRunner, largest: StepSize, share: float) -> int:
    """Bytes left for KV of all heads: of `share` of the device's memory, what neither others nor the model nor its
    largest step take.

    The runner's cache must have room for that step, and counts as free: it is to be replaced. Raises ValueError where
    nothing is left.
    """
    device = runner.kv_cache.device
    plan = largest_step(runner.kv_cache.layout, largest)
    runner.execute(plan)  # what libraries make once is not a step's
    step_bytes = peak_bytes(device, lambda: runner.execute(plan))
    # Or what it has freed would count as taken, once more than the step.
    if runner.group is None:
        give_back_freed(device)
    else:
        runner.group.give_back_freed()
    free, total = device_memory(device)
    left = min(_left_to_a_rank(runner, place, step_bytes, share) for place in set(runner.devices))
    if left <= 0:
        raise ValueError(
            f"of {share:.0%} of the memory of {device}, {total / 1e9:.1f} GB in all, nothing is left for KV: the model"
            f" has {runner.weight_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free, and a step of {largest.num_tokens}"
            f" tokens takes {step_bytes / 1e9:.1f} GB; allow a larger share, or shorter steps (chunk_tokens)"
        )
    return left // runner.kv_cache.layout.block_bytes * runner.sequence_kv.layout.block_bytes


def _left_to_a_rank(runner: ModelRunner, device: torch.device, step_bytes: int, share: float) -> int:
    """Bytes left for the KV of a rank's own heads, where ranks that compute on one device share what is left of it."""
    num_ranks = runner.devices.count(device)
    free, total = device_memory(device)
    return int(free - (1.0 - share) * total) // num_ranks + runner.kv_cache.num_bytes - step_bytes


def recording_bytes(runner: ModelRunner, record: Callable[[], None]) -> int:
    """What recorded decode steps keep of the memory of a CUDA device. They are forgotten again."""
    device = runner.kv_cache.device

    def free() -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # but for the graphs' own pool, which torch would count as free
        return int(torch.cuda.mem_get_info(device)[0])

    before = free()
    record()
    after = free()
    runner.forget_recordings()
    free()
    return before - after


def largest_step(layout: KVLayout, size: StepSize) -> StepPlan:
    """As many sequences of one token as rows may have logits, which sample, and one prompt that takes what they leave,
    on blocks that nobody else uses. The prompt is pooled: then all final hidden states are there beside the logits, as
    where a prompt's log-probabilities are told."""
    counts = [1] * size.num_rows + [size.num_tokens - size.num_rows] * (size.num_tokens > size.num_rows)
    items, first = [], 0
    for index, count in enumerate(counts):
        num_blocks = layout.num_layer_groups * -(-count // layout.block_size)
        blocks = np.arange(first, first + num_blocks, dtype=np.int32).reshape(layout.num_layer_groups, -1)
        first += num_blocks
        seq = Sequence(
            request_id="profile",
            attempt=0,
            params=_DRAWN,
            prompt_token_ids=[0] * count,
            pooling="mean" if index == size.num_rows else None,
            block_table=BlockTable.of(blocks),
        )
        items.append(ScheduledSequence(seq, count))
    return StepPlan(tuple(items))


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """The most that tensors made in a call take at once, beside those that were there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events: list[Any] = cast(Any, profiled).profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device that are free, those included that torch keeps for tensors to come, and all there are."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    total = memory_bytes()
    return min(psutil.virtual_memory().available, total), total
