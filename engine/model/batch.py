"""One step's tensors: what `StepPlan` says about sequences, said about rows of a packed batch.

The runner builds one for each step, from numpy arrays with a few operations per sequence and none per token.

Shape legend: T packed tokens, G layer groups, R output rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kv.cache import KVCache
from engine.sequence import ScheduledSequence, Sequence, StepPlan
from kernels.adapters import RowAdapters
from kernels.interface import Segment

Indices = npt.NDArray[np.int64]

_NO_ROWS = torch.empty(0, dtype=torch.int64)

PromptSpan = tuple[int, list[int]]
"""Output rows of one item, by its index into the plan, and each row's next prompt token: its log-probability is asked
for."""


PooledSpan = tuple[int, int]
"""Output rows of one item, by its index into the plan, of which a vector is asked for, and how many these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows: first the items of one token, by growing context, then the longer ones."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [G, T] int64, addresses for `KVCache.store`
    segments: tuple[Segment, ...]  # in packed order
    output_rows: Tensor  # [R] int64, rows whose final hidden state is wanted: sampling items', then prompt logprobs',
    # then what is pooled
    sampling_items: tuple[int, ...]  # indices into the plan; the first output rows are theirs, as many as
    num_sampled_rows: int = 0  # of all of them together: one each, and one for each of their drafts
    prompt_spans: tuple[PromptSpan, ...]  # these and the next cover the other output rows in order
    pooled_spans: tuple[PooledSpan, ...] = ()
    awaited_rows: Tensor = _NO_ROWS  # [A] int64, rows whose token the step before samples; `token_ids` says 0 there
    awaited_from: Tensor = _NO_ROWS  # [A] int64, which of that step's sampled tokens it is
    adapters: RowAdapters | None = None  # None: no row has one

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def everyone_samples(self) -> bool:
        """Whether the output rows are all rows, in their order."""
        return self.num_sampled_rows == self.num_tokens and not self.prompt_spans

    def output_segments(self) -> tuple[Segment, ...]:
        """Of each segment the rows from its first output row to its last one, for a batch on a CPU."""
        rows = np.sort(self.output_rows.numpy())
        found = []
        for segment in self.segments:
            stop = segment.first_row + segment.num_queries
            own = rows[slice(*np.searchsorted(rows, (segment.first_row, stop)))].tolist()
            if own:
                first, last = own[0], own[-1]
                context_len = segment.context_len - (stop - 1 - last)
                part = replace(segment, first_row=first, num_queries=last + 1 - first, context_len=context_len)
                found.append(part)
        return tuple(found)


def build_batch(
    plan: StepPlan,
    kv_cache: KVCache,
    tables: Mapping[int, npt.NDArray[np.int32]] = MappingProxyType({}),
    awaited: Mapping[Sequence, int] = MappingProxyType({}),
) -> Batch:
    """The batch of a plan with at least one item.

    `tables` are the block tables `[G, columns]` of items, by their index, that do not lie where their sequence says.
    `awaited` are the sequences whose next token is the i-th that the step before samples, which may not be known yet.
    """
    device = kv_cache.tensor.device
    order = sorted(range(len(plan.items)), key=lambda index: _packing_key(plan.items[index]))
    items = [plan.items[index] for index in order]
    counts = np.array([item.num_rows for item in items])
    first_rows = np.cumsum(counts) - counts
    starts = np.array([item.start for item in items])
    positions = np.arange(counts.sum()) + np.repeat(starts - first_rows, counts)
    segments = tuple(map(_segment, items, first_rows.tolist(), map(tables.get, order)))
    rows, sampling_items, num_sampled_rows, spans, pooled_spans = _outputs(items, order, first_rows.tolist())
    token_ids, awaited_rows, awaited_from = _token_ids(items, first_rows, awaited)
    slots = _slot_mapping(segments, positions, kv_cache)
    on_device = _to_device((token_ids, positions, slots, rows, awaited_rows, awaited_from), device)
    return Batch(
        token_ids=on_device[0],
        positions=on_device[1],
        slot_mapping=on_device[2],
        segments=segments,
        output_rows=on_device[3],
        awaited_rows=on_device[4],
        awaited_from=on_device[5],
        sampling_items=sampling_items,
        num_sampled_rows=num_sampled_rows,
        prompt_spans=spans,
        pooled_spans=pooled_spans,
        adapters=_adapters(items, counts, rows, device),
    )


def _adapters(
    items: list[ScheduledSequence], counts: Indices, output_rows: Indices, device: torch.device
) -> RowAdapters | None:
    """The adapters of the rows of items, of which each has so many."""
    found = [item.adapter for item in items]
    present = {id(adapter): adapter for adapter in found if adapter is not None}
    if not present:
        return None
    numbers = {key: number for number, key in enumerate(present)}
    of_item = [-1 if adapter is None else numbers[id(adapter)] for adapter in found]
    of_row = np.repeat(np.array(of_item, dtype=np.int64), counts)
    of_output = torch.from_numpy(of_row[output_rows])
    return RowAdapters(tuple(present.values()), torch.from_numpy(of_row), of_output, device)


def _to_device(arrays: tuple[Indices, ...], device: torch.device) -> list[Tensor]:
    """The arrays as parts of one tensor, which goes up in one copy; on a CPU as they are.

    From pinned memory the copy does not wait for what the device still computes. torch's allocator gives that memory to
    nobody else before the copy is done.
    """
    if device.type == "cpu":  # where a step of one sequence would wait for these copies a hundredth of its time
        return [torch.from_numpy(array) for array in arrays]
    sizes = [array.size for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy())
    parts = torch.split(buffer.to(device, non_blocking=True), sizes)
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _packing_key(item: ScheduledSequence) -> tuple[bool, int]:
    return item.num_rows > 1, item.stop


def _segment(item: ScheduledSequence, first_row: int, table: npt.NDArray[np.int32] | None) -> Segment:
    if table is None:
        assert item.seq.block_table is not None, f"sequence {item.seq.request_id} is scheduled without blocks"
        table = item.seq.block_table.view
    return Segment(
        first_row=first_row,
        num_queries=item.num_rows,
        context_len=item.stop,
        block_table=table,
    )


def _token_ids(
    items: list[ScheduledSequence], first_rows: Indices, awaited: Mapping[Sequence, int]
) -> tuple[Indices, Indices, Indices]:
    """`[T]` ids, 0 for those not known yet; the rows `[A]` of these, and which of the awaited tokens `[A]` they are."""
    known = [[*item.seq.tokens(item.start, item.start + item.num_tokens), *item.drafts] for item in items]
    lacking = [k for k, item in enumerate(items) if len(known[k]) < item.num_rows]
    for k in lacking:
        known[k] += [0]
    rows = [int(first_rows[k]) + items[k].num_tokens - 1 for k in lacking]
    sources = [awaited[items[k].seq] for k in lacking]
    num_tokens = sum(item.num_rows for item in items)
    return (
        np.fromiter(chain.from_iterable(known), dtype=np.int64, count=num_tokens),
        np.array(rows, dtype=np.int64),
        np.array(sources, dtype=np.int64),
    )


def _slot_mapping(
    segments: tuple[Segment, ...], positions: npt.NDArray[np.int64], kv_cache: KVCache
) -> npt.NDArray[np.int64]:
    """`[G, T]`"""
    columns, offsets = np.divmod(positions, kv_cache.layout.block_size)
    slots = np.empty((kv_cache.layout.num_layer_groups, len(positions)), dtype=np.int64)
    for segment in segments:
        rows = slice(segment.first_row, segment.first_row + segment.num_queries)
        slots[:, rows] = segment.block_table[:, columns[rows]]
    slots *= kv_cache.slots_per_block
    slots += offsets
    return slots


def _outputs(
    items: list[ScheduledSequence], order: list[int], first_rows: list[int]
) -> tuple[npt.NDArray[np.int64], tuple[int, ...], int, tuple[PromptSpan, ...], tuple[PooledSpan, ...]]:
    """Output rows, the plan's items that sample, in how many of the rows, and the spans of prompt logprobs and of what
    is pooled."""
    sampling = [k for k, item in enumerate(items) if item.samples]
    sampled = [range(first_rows[k] + items[k].num_tokens - 1, first_rows[k] + items[k].num_rows) for k in sampling]
    rows = [np.fromiter(chain.from_iterable(sampled), dtype=np.int64)]
    spans = []
    for k, item in enumerate(items):
        if item.seq.params.prompt_logprobs is None:
            continue
        following = item.start + 1
        next_ids = item.seq.prompt_token_ids[following : following + item.num_tokens]
        spans.append((order[k], next_ids))
        rows.append(np.arange(first_rows[k], first_rows[k] + len(next_ids)))
    pooled = [k for k, item in enumerate(items) if item.num_pooled]
    for k in pooled:
        stop = first_rows[k] + items[k].num_rows
        rows.append(np.arange(stop - items[k].num_pooled, stop))
    pooled_spans = tuple((order[k], items[k].num_pooled) for k in pooled)
    return np.concatenate(rows), tuple(order[k] for k in sampling), len(rows[0]), tuple(spans), pooled_spans
