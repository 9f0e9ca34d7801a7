"""A step's lists of work on the device: sent up in one piece, for one step or to where a CUDA graph reads them.

Shape legend: see `kernels.interface`; S segments, P slots of partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.interface import Segment, StandingLimits
from kernels.triton.attention.decode import NARROW_ROWS, WIDE_ROWS, PartialSums
from kernels.triton.attention.tiles import SEGMENT_FIELDS, SPLIT_TOKENS
from kernels.triton.attention.work_lists import AttentionShape, AttentionWork, Words, plan_work

# Programs of the decode kernels for each processor: what fits at once of the narrow ones. Not measured yet.
_PROGRAMS_PER_PROCESSOR = 4
_ALIGNMENT = 4  # words: a kernel is compiled anew where a pointer is not aligned to 16 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSizes:
    """What the host decides about a step's launches. What is 0 is not launched."""

    narrow: int  # programs
    wide: int
    shared: int
    tiles: int
    merged: int  # segments


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """The lists of an `AttentionWork` on the device, and memory for sums that are merged later."""

    lists: Mapping[str, Tensor]
    partials: PartialSums
    batch_invariant: bool
    sizes: LaunchSizes


def send_up(work: AttentionWork, shape: AttentionShape, device: torch.device) -> DeviceWork:
    packed, lists = _pack(_all_lists(work))
    words = _to_device(packed, device)
    most, heads = num_programs(device), shape.operands.geometry.num_kv_heads
    return DeviceWork(
        lists=_views(words, lists),
        partials=PartialSums.of(max(work.num_slots, 1), shape.operands.geometry, max(work.slot_rows, 1), device),
        batch_invariant=shape.batch_invariant,
        sizes=LaunchSizes(
            narrow=min(len(work.narrow) * heads, most),
            wide=min(len(work.wide) * heads, most),
            shared=min(len(work.shared) * heads, most),
            tiles=len(work.tiles),
            merged=work.num_decodes if work.num_slots else 0,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """The largest step that a CUDA graph is for."""

    num_segments: int
    num_queries: int  # of a segment
    num_columns: int  # of all segments' block tables
    num_splits: int  # of all segments: ceil(context / SPLIT_TOKENS) each, and one more with a window
    num_layer_groups: int

    @classmethod
    def of(cls, limits: StandingLimits, block_size: int) -> DecodeLimits:
        """For segments of one query, however their context is shared out among them."""
        most, context_tokens = limits.num_segments, limits.context_tokens
        return cls(
            num_segments=most,
            num_queries=1,
            num_columns=context_tokens // block_size + most,
            num_splits=context_tokens // SPLIT_TOKENS + 2 * most,
            num_layer_groups=limits.num_layer_groups,
        )


class DecodeBuffers:
    """Work for steps of decode alone, always at the same addresses and with the same launches.

    `work` is what to capture and replay; `fill` before each replay, on the stream of the replay.
    """

    def __init__(self, shape: AttentionShape, limits: DecodeLimits, device: torch.device) -> None:
        self.shape = shape
        self._limits = limits
        rows = limits.num_queries * shape.group
        most = min(limits.num_splits * shape.operands.geometry.num_kv_heads, num_programs(device))
        shares = shape.share_from_bytes is not None and shape.window is None
        sizes = LaunchSizes(
            narrow=0 if shape.batch_invariant else most,
            wide=most if shape.batch_invariant or rows > NARROW_ROWS else 0,
            shared=most if shares else 0,
            tiles=0,
            merged=limits.num_segments,
        )
        packed, lists = _pack(self._room())
        self._words = torch.from_numpy(packed).to(device)
        self.work = DeviceWork(
            lists=_views(self._words, lists),
            partials=PartialSums.of(limits.num_splits, shape.operands.geometry, rows, device),
            batch_invariant=shape.batch_invariant,
            sizes=sizes,
        )

    def fill(self, segments: Sequence[Segment]) -> None:
        """Put a step in. Raises ValueError where it is larger than the limits."""
        work = plan_work(segments, self.shape)
        lists = self._room()
        for name, words in _all_lists(work).items():
            room = lists[name]
            if any(have > most for have, most in zip(words.shape, room.shape, strict=True)):
                raise ValueError(f"a step has {words.shape} {name}, but its CUDA graph has room for {room.shape}")
            room[tuple(slice(0, have) for have in words.shape)] = words
        if work.slot_rows > self.work.partials.slot_rows:
            raise ValueError(f"a step's CUDA graph is for segments of up to {self._limits.num_queries} queries")
        packed, _ = _pack(lists)
        self._words.copy_(_pinned(packed, self._words.device), non_blocking=True)

    def work_for(self, num_segments: int) -> DeviceWork:
        """`work`, at the same addresses, for a graph whose steps have no more than so many segments."""
        assert num_segments <= self._limits.num_segments, "the buffers are too small for such a graph"
        return replace(self.work, sizes=replace(self.work.sizes, merged=num_segments))

    def _room(self) -> dict[str, Words]:
        limits = self._limits
        columns = -(-limits.num_columns // _ALIGNMENT) * _ALIGNMENT
        shapes = {
            "counts": (4,),
            "segments": (limits.num_segments, SEGMENT_FIELDS),
            "table": (limits.num_layer_groups, columns),
            "narrow": (limits.num_splits, 3),
            "wide": (limits.num_splits * -(-limits.num_queries * self.shape.group // WIDE_ROWS), 3),
            "shared": (limits.num_splits, 3),
            "members": (limits.num_splits,),
            "tiles": (0, 2),
        }
        return {name: np.zeros(shape, dtype=np.int32) for name, shape in shapes.items()}


def num_programs(device: torch.device) -> int:
    """Programs that keep the device busy; a few where programs run one after another."""
    if device.type != "cuda":
        return 2
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _all_lists(work: AttentionWork) -> dict[str, Words]:
    return {"counts": work.counts(), **work.lists()}


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


def _to_device(words: Words, device: torch.device) -> Tensor:
    return _pinned(words, device).to(device, non_blocking=True)


def _pinned(words: Words, device: torch.device) -> Tensor:
    """What a copy to `device` can take without the host's waiting: torch keeps the memory until the copy is done."""
    if device.type != "cuda":
        return torch.from_numpy(words)
    pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = words
    return pinned
