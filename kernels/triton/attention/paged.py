"""Paged attention on a GPU: one step's work planned on the host, sent up in one piece, and launched layer by layer.

Nothing here waits for the device. What a launch depends on is known on the host or read on the device.

Segments of few query rows go to the decode kernel, split by split; longer ones to the prefill kernel. Without
`batch_invariant` each is the same alone and in any batch, but the two round differently, and so may splits that several
sequences read together; with it, all kernels take the same tiles in the same order.

Lists of work go to memory of their own, or to where a CUDA graph reads them.

Shape legend: see `kernels.interface` and `kernels.triton.attention.tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kernels.interface import CacheGeometry, GraphAttentionLimits, Segment
from kernels.triton.attention.cascade import cascade_attention
from kernels.triton.attention.decode import (
    NARROW_ROWS,
    WIDE_ROWS,
    PartialSums,
    decode_attention,
    merge_splits,
)
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.tiles import SEGMENT_FIELDS, SPLIT_TOKENS, Operands
from kernels.triton.attention.work_lists import AttentionShape, AttentionWork, Words, plan_work

SHARE_FROM_BYTES = 16 << 20
# Programs of the decode kernels for each processor: what fits at once of the narrow ones, and the best of 2, 3, 4 and 8
# on an H200.
_PROGRAMS_PER_PROCESSOR = 4
_ALIGNMENT = 4  # words: a kernel is compiled anew where a pointer is not aligned to 16 bytes


@dataclass(slots=True)
class GpuAttention:
    """One step's attention, see `kernels.interface.Kernels.plan_attention`; segments may come in any order.

    The work is planned at the first layer, when the number of query heads is known.
    """

    segments: Sequence[Segment]
    geometry: CacheGeometry
    _: KW_ONLY
    window: int | None
    device: torch.device
    batch_invariant: bool = False
    share_from_bytes: int | None = SHARE_FROM_BYTES
    _work: DeviceWork | None = field(default=None, init=False)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_rows: Tensor,
        *,
        group: int,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer; `k` and `v` are in the cache already. The first call plans the step, and sends it
        up."""
        if self._work is None:
            shape = AttentionShape(
                operands=Operands.of(q, self.geometry, softcap, self.window),
                num_heads=q.shape[1],
                window=self.window,
                batch_invariant=self.batch_invariant,
                share_from_bytes=self.share_from_bytes,
            )
            self._work = send_up(plan_work(self.segments, shape), shape, self.device)
        return self._work.attend(q, k, v, cache_rows, group=group, scale=scale, softcap=softcap, sinks=sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """The lists of an `AttentionWork` on the device, and what the host decides about their launches.

    What is 0 is not launched.
    """

    shape: AttentionShape
    lists: Mapping[str, Tensor]
    partials: PartialSums  # memory for sums that are merged later
    narrow: int  # programs
    wide: int
    shared: int
    tiles: int
    merged: int  # segments
    decode_rows: int  # of the widest of these, for a key head

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_rows: Tensor,
        *,
        group: int,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One layer of layer group `group`, `[T, Q, Dv]`. Rows of no segment hold anything."""
        shape = self.shape
        geometry, window = shape.operands.geometry, shape.window
        out = q.new_empty(*q.shape[:-1], geometry.value_dim)
        lists, partials = self.lists, self.partials
        table, segments, counts = lists["table"][group], lists["segments"], lists["counts"]
        if self.tiles:
            prefill_attention(
                q, cache_rows, out, table=table, segments=segments, tiles=lists["tiles"], num_tiles=self.tiles,
                geometry=geometry, window=window, scale=scale, softcap=softcap, sinks=sinks,
                batch_invariant=shape.batch_invariant,
            )  # fmt: skip
        for index, (name, programs) in enumerate((("narrow", self.narrow), ("wide", self.wide))):
            if programs:
                decode_attention(
                    q, cache_rows, out, partials, table=table, segments=segments, items=lists[name],
                    num_items=counts[index:], num_programs=programs, geometry=geometry, window=window,
                    scale=scale, softcap=softcap, sinks=sinks, wide=name == "wide",
                )  # fmt: skip
        if self.shared:
            cascade_attention(
                q, cache_rows, partials, table=table, segments=segments, items=lists["shared"], num_items=counts[2:],
                members=lists["members"], num_programs=self.shared, geometry=geometry, scale=scale, softcap=softcap,
            )  # fmt: skip
        if self.merged:
            merge_splits(
                out, partials, segments=segments, num_segments=self.merged, num_rows=self.decode_rows,
                geometry=geometry, scale=scale, softcap=softcap, sinks=sinks,
            )  # fmt: skip
        return out


def send_up(work: AttentionWork, shape: AttentionShape, device: torch.device) -> DeviceWork:
    packed, places = _pack(work.lists())
    words = _pinned(packed, device).to(device, non_blocking=True)
    most, heads = num_programs(device), shape.operands.geometry.num_kv_heads
    return DeviceWork(
        shape=shape,
        lists=_views(words, places),
        partials=PartialSums.of(max(work.num_slots, 1), shape.num_heads, shape.operands.geometry.value_dim, device),
        narrow=min(len(work.narrow) * heads, most),
        wide=min(len(work.wide) * heads, most),
        shared=min(len(work.shared) * heads, most),
        tiles=len(work.tiles),
        merged=work.num_decodes if work.num_slots else 0,
        decode_rows=work.decode_rows,
    )


class DecodeBuffers:
    """`kernels.interface.GraphAttention`: work for steps of decode alone, always at the same addresses and with the
    same launches. Graphs of all sizes read the same buffers. With n queries a segment, there are n times fewer segments
    and tokens of context, so that lists and partial sums take no more room than those of one."""

    def __init__(self, shape: AttentionShape, limits: GraphAttentionLimits, device: torch.device) -> None:
        self._shape = shape
        self._limits = limits
        # However the context is shared out among the segments; with a window, one begins amid a split.
        self._num_splits = limits.context_tokens // SPLIT_TOKENS + 2 * limits.num_segments
        self._most_programs = most = min(self._num_splits * shape.operands.geometry.num_kv_heads, num_programs(device))
        shares = shape.share_from_bytes is not None and shape.window is None
        packed, places = _pack(self._room())
        self._words = torch.from_numpy(packed).to(device)
        self.work = DeviceWork(
            shape=shape,
            lists=_views(self._words, places),
            partials=PartialSums.of(self._num_splits, shape.num_heads, shape.operands.geometry.value_dim, device),
            narrow=0 if shape.batch_invariant else most,
            wide=0,  # see `of`
            shared=most if shares else 0,
            tiles=0,
            merged=limits.num_segments,
            decode_rows=shape.group,
        )

    @property
    def most_queries(self) -> int:
        return self._shape.most_rows // self._shape.group

    def fill(self, segments: Sequence[Segment], num_queries: int) -> None:
        """Put a step in, before it is replayed and on the stream of the replay. Raises ValueError beyond the limits."""
        work = plan_work(segments, self._shape)
        lists = self._room()
        for name, words in work.lists().items():
            room = lists[name]
            if any(have > most for have, most in zip(words.shape, room.shape, strict=True)):
                raise ValueError(f"a step has {words.shape} {name}, but its CUDA graph has room for {room.shape}")
            room[tuple(slice(0, have) for have in words.shape)] = words
        if work.decode_rows > num_queries * self._shape.group:
            raise ValueError(f"a step's CUDA graph is for segments of up to {num_queries} queries")
        if work.num_slots > self._num_splits:
            raise ValueError(f"a step has {work.num_slots} partial sums, but its CUDA graph has room for fewer")
        packed, _ = _pack(lists)
        self._words.copy_(_pinned(packed, self._words.device), non_blocking=True)

    def of(self, num_segments: int, num_queries: int) -> DeviceWork:
        """The work of a graph whose steps have no more than so many segments of so many queries."""
        assert num_segments * num_queries <= self._limits.num_segments, "the buffers are too small for such a graph"
        assert num_queries <= self.most_queries, "so many queries are prefill's"
        shape = self._shape
        return replace(
            self.work,
            merged=num_segments,
            shared=self.work.shared if num_segments > 1 else 0,
            decode_rows=num_queries * shape.group,
            wide=self._most_programs if shape.batch_invariant or num_queries * shape.group > NARROW_ROWS else 0,
        )

    def _room(self) -> dict[str, Words]:
        limits, num_splits = self._limits, self._num_splits
        num_columns = limits.context_tokens // self._shape.operands.geometry.block_size + limits.num_segments
        shapes = {
            "counts": (4,),
            "segments": (limits.num_segments, SEGMENT_FIELDS),
            "table": (limits.num_layer_groups, -(-num_columns // _ALIGNMENT) * _ALIGNMENT),
            "narrow": (num_splits, 3),
            "wide": (num_splits * -(-self._shape.group // WIDE_ROWS), 3),
            "shared": (num_splits, 3),
            "members": (num_splits,),
            "tiles": (0, 2),
        }
        return {name: np.zeros(shape, dtype=np.int32) for name, shape in shapes.items()}


def num_programs(device: torch.device) -> int:
    """Programs that keep the device busy; a few where programs run one after another."""
    if device.type != "cuda":
        return 2
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


_Places = Mapping[str, tuple[int, tuple[int, ...]]]


def _pack(lists: Mapping[str, Words]) -> tuple[Words, _Places]:
    """All lists in one, and where each one went: first word, shape."""
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    stop = 0
    for name, words in lists.items():
        places[name] = (stop, words.shape)
        stop += -(-words.size // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(stop, dtype=np.int32)
    for name, words in lists.items():
        start = places[name][0]
        packed[start : start + words.size] = words.reshape(-1)
    return packed, places


def _views(words: Tensor, places: _Places) -> Mapping[str, Tensor]:
    return {name: words[start : start + int(np.prod(shape))].view(shape) for name, (start, shape) in places.items()}


def _pinned(words: Words, device: torch.device) -> Tensor:
    """What a copy to `device` can take without the host's waiting: torch keeps the memory until the copy is done."""
    if device.type != "cuda":
        return torch.from_numpy(words)
    pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = words
    return pinned
