"""Paged attention on a GPU: one step's work planned on the host, sent up in one piece, and launched layer by layer.

Nothing here waits for the device. What a launch depends on is known on the host or read on the device.

Segments of few query rows go to the decode kernel, split by split; longer ones to the prefill kernel. Without
`batch_invariant` each is the same alone and in any batch, but the two round differently, and so may splits that several
sequences read together; with it, all kernels take the same tiles in the same order.

Shape legend: see `kernels.interface` and `kernels.attention_tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention_work import NO_WINDOW, AttentionShape, AttentionWork, Words, plan_work
from kernels.cascade_attention import cascade_attention
from kernels.decode_attention import PartialSums, decode_attention, merge_splits
from kernels.interface import CacheGeometry, Segment
from kernels.prefill_attention import prefill_attention

SHARE_FROM_BYTES = 16 << 20
# Programs of the decode kernels for each processor: what fits at once of the narrow ones. Not measured yet.
_PROGRAMS_PER_PROCESSOR = 4
_ALIGNMENT = 4  # words: a kernel is compiled anew where a pointer is not aligned to 16 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSizes:
    """What the host decides about a step's launches. A list of no items is not launched."""

    narrow: int  # programs
    wide: int
    shared: int
    tiles: int
    decodes: int  # segments to merge; 0: all have one split


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """A step's lists on the device, and memory for its partial sums."""

    lists: Mapping[str, Tensor]
    counts: Tensor  # [4]
    partials: PartialSums
    sizes: LaunchSizes


class GpuAttention:
    """One step's attention. The work is planned at the first layer, when the number of query heads is known."""

    def __init__(
        self,
        segments: Sequence[Segment],
        geometry: CacheGeometry,
        *,
        window: int | None,
        device: torch.device,
        batch_invariant: bool,
        share_from_bytes: int | None,
    ) -> None:
        self._segments = segments
        self._geometry = geometry
        self._window = window
        self._device = device
        self._batch_invariant = batch_invariant
        self._share_from_bytes = share_from_bytes
        self._work: DeviceWork | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache_rows: Tensor, *, group: int, scale: float, softcap: float | None
    ) -> Tensor:
        if self._work is None:
            self._work = send_up(plan_work(self._segments, self._shape(q)), self._geometry, self._device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        window = NO_WINDOW if self._window is None else self._window
        launch(
            self._work, q, cache_rows, out,
            geometry=self._geometry, group=group, window=window, scale=scale, softcap=softcap,
            batch_invariant=self._batch_invariant,
        )  # fmt: skip
        return out

    def _shape(self, q: Tensor) -> AttentionShape:
        return AttentionShape(
            geometry=self._geometry,
            num_heads=q.shape[1],
            dtype=q.dtype,
            window=self._window,
            batch_invariant=self._batch_invariant,
            share_from_bytes=self._share_from_bytes,
        )


def plan_attention(
    segments: Sequence[Segment],
    geometry: CacheGeometry,
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    share_from_bytes: int | None = SHARE_FROM_BYTES,
) -> GpuAttention:
    """See `kernels.interface.Kernels.plan_attention`; segments may come in any order."""
    del dtype  # the queries tell
    return GpuAttention(
        segments,
        geometry,
        window=window,
        device=device,
        batch_invariant=batch_invariant,
        share_from_bytes=share_from_bytes,
    )


def launch(
    work: DeviceWork,
    q: Tensor,
    cache_rows: Tensor,
    out: Tensor,
    *,
    geometry: CacheGeometry,
    group: int,
    window: int,
    scale: float,
    softcap: float | None,
    batch_invariant: bool,
) -> None:
    """One layer of layer group `group`: fill `out [T, Q, D]`."""
    sizes, lists, partials = work.sizes, work.lists, work.partials
    table, segments = lists["table"][group], lists["segments"]
    if sizes.tiles:
        prefill_attention(
            q, cache_rows, out, table=table, segments=segments, tiles=lists["tiles"], num_tiles=sizes.tiles,
            geometry=geometry, window=window, scale=scale, softcap=softcap, batch_invariant=batch_invariant,
        )  # fmt: skip
    for index, (name, num_programs) in enumerate((("narrow", sizes.narrow), ("wide", sizes.wide))):
        if num_programs:
            decode_attention(
                q, cache_rows, out, partials, table=table, segments=segments, items=lists[name],
                num_items=work.counts[index:], num_programs=num_programs, geometry=geometry, window=window,
                scale=scale, softcap=softcap, wide=name == "wide",
            )  # fmt: skip
    if sizes.shared:
        cascade_attention(
            q, cache_rows, partials, table=table, segments=segments, items=lists["shared"],
            num_items=work.counts[2:], members=lists["members"], num_programs=sizes.shared, geometry=geometry,
            scale=scale, softcap=softcap,
        )  # fmt: skip
    if sizes.decodes:
        merge_splits(
            out, partials, segments=segments, num_segments=sizes.decodes, geometry=geometry, scale=scale,
            softcap=softcap,
        )  # fmt: skip


def num_programs(device: torch.device) -> int:
    """Programs that keep the device busy; a few where programs run one after another."""
    if device.type != "cuda":
        return 2
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def send_up(work: AttentionWork, geometry: CacheGeometry, device: torch.device) -> DeviceWork:
    most = num_programs(device)
    heads = geometry.num_kv_heads
    sizes = LaunchSizes(
        narrow=min(len(work.narrow) * heads, most),
        wide=min(len(work.wide) * heads, most),
        shared=min(len(work.shared) * heads, most),
        tiles=len(work.tiles),
        decodes=work.num_decodes if work.num_slots else 0,
    )
    packed, places = _pack({"counts": work.counts(), **work.lists()})
    words = _to_device(packed, device)
    lists = {name: words[start : start + count].view(shape) for name, (start, count, shape) in places.items()}
    partials = PartialSums.of(max(work.num_slots, 1), geometry, max(work.slot_rows, 1), device)
    return DeviceWork(lists=lists, counts=lists["counts"], partials=partials, sizes=sizes)


def _pack(lists: Mapping[str, Words]) -> tuple[Words, Mapping[str, tuple[int, int, tuple[int, ...]]]]:
    """All lists in one, and where each one went: first word, words, shape."""
    places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    stop = 0
    for name, words in lists.items():
        places[name] = (stop, words.size, words.shape)
        stop += -(-words.size // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(max(stop, 1), dtype=np.int32)
    for name, words in lists.items():
        start, count, _ = places[name]
        packed[start : start + count] = words.reshape(-1)
    return packed, places


def _to_device(words: Words, device: torch.device) -> Tensor:
    """One copy, which the host does not wait for: torch keeps the pinned memory until it is done."""
    if device.type != "cuda":
        return torch.from_numpy(words)
    pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = words
    return pinned.to(device, non_blocking=True)
