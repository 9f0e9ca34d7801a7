"""Paged attention on a GPU: one step's work planned on the host, sent up in one piece, and launched layer by layer.

Nothing here waits for the device. What a launch depends on is known on the host or read on the device.

Segments of few query rows go to the decode kernel, split by split; longer ones to the prefill kernel. Without
`batch_invariant` each is the same alone and in any batch, but the two round differently, and so may splits that several
sequences read together; with it, all kernels take the same tiles in the same order.

Shape legend: see `kernels.interface` and `kernels.triton.attention.tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import CacheGeometry, PagedAttention, Segment, StandingLimits
from kernels.triton.attention.cascade import cascade_attention
from kernels.triton.attention.decode import decode_attention, merge_splits
from kernels.triton.attention.device_work import DecodeBuffers, DecodeLimits, DeviceWork, send_up
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.tiles import Operands, architecture
from kernels.triton.attention.work_lists import AttentionShape, plan_work

SHARE_FROM_BYTES = 16 << 20


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
        """Attention of one layer; `k` and `v` are in the cache already. The first call plans the step, and sends it
        up."""
        if self._work is None:
            shape = AttentionShape(
                operands=Operands.of(q, self._geometry, softcap, self._window),
                num_heads=q.shape[1],
                window=self._window,
                batch_invariant=self._batch_invariant,
                share_from_bytes=self._share_from_bytes,
            )
            self._work = send_up(plan_work(self._segments, shape), shape, self._device)
        return launch(self._work, q, cache_rows, self._geometry, group, self._window, scale, softcap)


class CapturedAttention:
    """Attention over whatever `buffers` were filled with last: what a CUDA graph captures.

    `num_segments`: of the graph's largest step; None: as many as there is room for.
    """

    def __init__(self, buffers: DecodeBuffers, num_segments: int | None = None) -> None:
        self._shape = buffers.shape
        self._work = buffers.work if num_segments is None else buffers.work_for(num_segments)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache_rows: Tensor, *, group: int, scale: float, softcap: float | None
    ) -> Tensor:
        shape = self._shape
        return launch(self._work, q, cache_rows, shape.operands.geometry, group, shape.window, scale, softcap)


@dataclass(frozen=True, slots=True)
class BufferedAttention:
    """`kernels.interface.StandingAttention`: graphs of all sizes read the same buffers."""

    buffers: DecodeBuffers

    def fill(self, segments: Sequence[Segment]) -> None:
        self.buffers.fill(segments)

    def of(self, num_segments: int) -> PagedAttention:
        return CapturedAttention(self.buffers, num_segments)


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


def standing_attention(
    geometry: CacheGeometry,
    limits: StandingLimits,
    *,
    num_heads: int,
    window: int | None,
    softcapped: bool,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    share_from_bytes: int | None = SHARE_FROM_BYTES,
) -> BufferedAttention:
    """See `kernels.interface.GraphKernels.standing_attention`."""
    operands = Operands(
        dtype=dtype,
        geometry=geometry,
        softcapped=softcapped,
        windowed=window is not None,
        architecture=architecture(device),
    )
    shape = AttentionShape(
        operands=operands,
        num_heads=num_heads,
        window=window,
        batch_invariant=batch_invariant,
        share_from_bytes=share_from_bytes,
    )
    return BufferedAttention(DecodeBuffers(shape, DecodeLimits.of(limits, geometry.block_size), device))


def launch(
    work: DeviceWork,
    q: Tensor,
    cache_rows: Tensor,
    geometry: CacheGeometry,
    group: int,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One layer of layer group `group`, `[T, Q, D]`. Rows of no segment hold anything."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes, lists, partials = work.sizes, work.lists, work.partials
    table, segments, counts = lists["table"][group], lists["segments"], lists["counts"]
    if sizes.tiles:
        prefill_attention(
            q, cache_rows, out, table=table, segments=segments, tiles=lists["tiles"], num_tiles=sizes.tiles,
            geometry=geometry, window=window, scale=scale, softcap=softcap, batch_invariant=work.batch_invariant,
        )  # fmt: skip
    for index, (name, num_programs) in enumerate((("narrow", sizes.narrow), ("wide", sizes.wide))):
        if num_programs:
            decode_attention(
                q, cache_rows, out, partials, table=table, segments=segments, items=lists[name],
                num_items=counts[index:], num_programs=num_programs, geometry=geometry, window=window,
                scale=scale, softcap=softcap, wide=name == "wide",
            )  # fmt: skip
    if sizes.shared:
        cascade_attention(
            q, cache_rows, partials, table=table, segments=segments, items=lists["shared"], num_items=counts[2:],
            members=lists["members"], num_programs=sizes.shared, geometry=geometry, scale=scale, softcap=softcap,
        )  # fmt: skip
    if sizes.merged:
        merge_splits(
            out, partials, segments=segments, num_segments=sizes.merged, geometry=geometry, scale=scale,
            softcap=softcap,
        )  # fmt: skip
    return out
