"""Decode steps recorded once for a few batch sizes, and replayed: a step is then launched in one piece.

A step goes into the next larger size, and with drafts into the next larger number of rows a sequence. The rows that it
leaves over are nobody's: their slots are negative, so that they store nothing, and no segment of attention is theirs.
Their results are cut off.

Shape legend: N rows of the largest step, T rows of a step, G layer groups, R output rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.kv.cache import KVCache
from engine.model.batch import Batch
from engine.model.transformer import Model
from kernels.interface import GraphAttention, GraphAttentionLimits, GraphKernels

Replay = Callable[[], Tensor]
"""Computes what was recorded on what its inputs hold now. Gives the same tensor each time, good until the next one."""


Record = Callable[[Callable[[], Tensor]], Replay]
"""Calls what it is given now, which must not wait for the device nor look at values that lie there, and records it.

What one of them has recorded is replayed one after another, never at once."""


def call_again(compute: Callable[[], Tensor]) -> Replay:
    """A `Record` that replays by calling again, with the result where a graph would have it."""
    result = compute()
    return lambda: result.copy_(compute())


def cuda_record(device: torch.device) -> Record:
    """Records CUDA graphs, which share the memory for what they keep between their kernels."""
    pool = torch.cuda.graph_pool_handle()
    stream: torch.cuda.Stream = cast(Any, torch.cuda).Stream(device)  # untyped there

    def record(compute: Callable[[], Tensor]) -> Replay:
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            compute()  # kernels are compiled and libraries take their workspaces now: a capture allows neither
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads do not end the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


def record_for(device: torch.device) -> Record:
    return cuda_record(device) if device.type == "cuda" else call_again


_LAST_DOUBLED = 32  # rows: from there on, what a graph computes for nothing counts more than a graph's memory
_MOST_CONTEXT_TOKENS = 1 << 19  # 8 k for each of 64 sequences; 0.1 MB of block table in each layer group
_NO_SLOT = -1
_QUERIES = (1, 2, 5, 9)  # that a sequence has at most: without drafts, and with up to 1, 4 and 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGraphLimits:
    """The largest step that is replayed; with up to n rows a sequence, an n-th of these sequences and their context.

    Attention's lists are sized for that much, and copied whole in each step."""

    num_seqs: int
    context_tokens: int  # of all sequences together

    @classmethod
    def of(cls, num_seqs: int, max_model_len: int) -> DecodeGraphLimits:
        return cls(num_seqs=num_seqs, context_tokens=min(num_seqs * max_model_len, _MOST_CONTEXT_TOKENS))

    def sizes(self) -> list[int]:
        """1, 2, 4, .. 32, 64, 96, .. up to `num_seqs`, which is always one."""
        doubled = [1 << power for power in range(_LAST_DOUBLED.bit_length())]
        sizes = [*doubled, *range(2 * _LAST_DOUBLED, self.num_seqs, _LAST_DOUBLED)]
        return [*(size for size in sizes if size < self.num_seqs), self.num_seqs]


class DecodeGraphs:
    """What was recorded of one model over one KV cache, which must both stay where they are.

    All of it is recorded, and all its memory taken, when it is made. `inputs` `[2 + G, N]` int64 are what recordings
    read beside attention's lists: token ids, positions, and a row of slots for each layer group.
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, kernels: GraphKernels, limits: DecodeGraphLimits, record: Record
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._limits = limits
        num_groups = kv_cache.layout.num_layer_groups
        # What `inputs` hold in rows that a step leaves over: token 0 at position 0, stored nowhere.
        self._padding = torch.zeros((2 + num_groups, limits.num_seqs), dtype=torch.int64, device=kv_cache.device)
        self._padding[2:] = _NO_SLOT
        self.inputs = self._padding.clone()
        self._rows = torch.arange(limits.num_seqs, device=kv_cache.device)
        self._attentions = {window: self._graph_attention(kernels, window) for window in model.windows}
        most_queries = min(attention.most_queries for attention in self._attentions.values())
        # Largest first: what the others keep between their kernels finds room where that one did.
        self._replays = {
            queries: {size: self._record(record, size, queries) for size in reversed(limits.sizes()) if size >= queries}
            for queries in _QUERIES
            if queries <= min(most_queries, limits.num_seqs)
        }

    def takes(self, batch: Batch) -> bool:
        """Whether it is a step of few rows a sequence, and within the limits."""
        queries = self._queries(batch)
        return (
            queries is not None
            and batch.adapters is None
            and queries * len(batch.segments) <= self._limits.num_seqs
            and queries * sum(segment.context_len for segment in batch.segments) <= self._limits.context_tokens
        )

    def _queries(self, batch: Batch) -> int | None:
        """The least rows per sequence, among the recordings, that this batch fits; None: there is none."""
        most = max(segment.num_queries for segment in batch.segments)
        return min((queries for queries in self._replays if queries >= most), default=None)

    def forward(self, batch: Batch) -> Tensor:
        """Final hidden states of `batch.output_rows`, `[R, E]`, of a step that it takes; good until the next call."""
        num_rows, queries = batch.num_tokens, self._queries(batch)
        assert queries is not None
        replays = self._replays[queries]
        size = min(size for size in replays if size >= num_rows)
        self.inputs[0, :num_rows].copy_(batch.token_ids)
        self.inputs[1, :num_rows].copy_(batch.positions)
        self.inputs[2:, :num_rows].copy_(batch.slot_mapping)
        if size > num_rows:
            self.inputs[:, num_rows:size].copy_(self._padding[:, num_rows:size])
        for attention in self._attentions.values():
            attention.fill(batch.segments, queries)
        hidden = replays[size]()
        return hidden[:num_rows] if batch.everyone_samples else hidden[batch.output_rows]

    def _graph_attention(self, kernels: GraphKernels, window: int | None) -> GraphAttention:
        layout, config = self._kv_cache.layout, self._model.config
        return kernels.graph_attention(
            layout.geometry,
            GraphAttentionLimits(
                num_segments=self._limits.num_seqs,
                context_tokens=self._limits.context_tokens,
                num_layer_groups=layout.num_layer_groups,
            ),
            num_heads=config.num_heads,
            window=window,
            softcapped=config.attention_softcap is not None,
            dtype=self._model.dtype,
        )

    def _record(self, record: Record, size: int, queries: int) -> Replay:
        """Record a step on rows that are nobody's, with attention's lists empty: nothing of the KV is read or
        written."""
        batch = Batch(
            token_ids=self.inputs[0, :size],
            positions=self.inputs[1, :size],
            slot_mapping=self.inputs[2:, :size],
            segments=(),
            output_rows=self._rows[:size],
            sampling_items=(),
            prompt_spans=(),
        )
        num_seqs = min(size, self._limits.num_seqs // queries)
        attentions = {window: attention.of(num_seqs, queries) for window, attention in self._attentions.items()}
        return record(lambda: self._model.forward(batch, self._kv_cache, attentions=attentions))
