"""A step's attention as lists of work for the kernels: which tiles, which splits, whose blocks. Pure numpy, no device.

What is done with a segment depends on its own numbers only, except for splits that are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.interface import Segment
from kernels.triton.attention.cascade import SharedSplit, plan_shared_splits
from kernels.triton.attention.decode import MAX_ROWS, NARROW_ROWS, WIDE_ROWS
from kernels.triton.attention.prefill import prefill_tile
from kernels.triton.attention.tiles import SEGMENT_FIELDS, SPLIT_TOKENS, Operands, SegmentField

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What stays the same from step to step."""

    operands: Operands
    num_heads: int
    window: int | None
    batch_invariant: bool
    # Shared splits are read once if that saves so many bytes in one layer: another launch costs a few microseconds, in
    # which an H100 reads some 10 MB. None: never.
    share_from_bytes: int | None

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.operands.geometry.num_kv_heads

    @property
    def most_rows(self) -> int:
        """The most rows of a segment that the decode kernel takes: a single query's in any case."""
        return max(MAX_ROWS, self.group)

    @property
    def split_bytes(self) -> int:
        geometry = self.operands.geometry
        return (
            geometry.num_planes
            * SPLIT_TOKENS
            * geometry.num_kv_heads
            * geometry.head_dim
            * self.operands.dtype.itemsize
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """One step's lists, as the kernels read them."""

    segments: Words  # [S, SEGMENT_FIELDS]: decode's first
    table: Words  # [G, columns]
    narrow: Words  # [.., 3] decode's items in narrow tiles: segment, split, first row
    wide: Words  # [.., 3] in wide tiles
    shared: Words  # [.., 3] cascade's items: first member, members, split
    members: Words  # [..] segments of cascade's items
    tiles: Words  # [.., 2] prefill's tiles: segment, first row
    num_decodes: int
    num_slots: int  # of partial sums
    decode_rows: int  # of the widest of decode's segments, for a key head

    def lists(self) -> Mapping[str, Words]:
        """The lists by name; `counts` are what the device reads in place of a launch parameter."""
        names = ("segments", "table", "narrow", "wide", "shared", "members", "tiles")
        counts = np.array([len(self.narrow), len(self.wide), len(self.shared), 0], dtype=np.int32)
        return {"counts": counts} | {name: getattr(self, name) for name in names}


def plan_work(segments: Sequence[Segment], shape: AttentionShape) -> AttentionWork:
    decodes = [segment for segment in segments if segment.num_queries * shape.group <= shape.most_rows]
    prefills = [segment for segment in segments if segment.num_queries * shape.group > shape.most_rows]
    ordered = decodes + prefills
    records, table = _records(ordered, shape)
    num_decodes = len(decodes)
    num_slots = _give_slots(records[:num_decodes])
    shared = _shared_splits(decodes, shape)
    shared_items, members = _shared_items(shared, records, shape)
    items = _items(records[:num_decodes], shared)
    narrow = records[items[:, 0], SegmentField.NUM_QUERIES] * shape.group <= (
        0 if shape.batch_invariant else NARROW_ROWS
    )
    return AttentionWork(
        segments=records,
        table=table,
        narrow=_in_tiles(items[narrow], records, NARROW_ROWS, shape),
        wide=_in_tiles(items[~narrow], records, WIDE_ROWS, shape),
        shared=shared_items,
        members=members,
        tiles=_tiles(records, num_decodes, shape),
        num_decodes=num_decodes,
        num_slots=num_slots,
        decode_rows=max((segment.num_queries for segment in decodes), default=0) * shape.group,
    )


def _records(segments: list[Segment], shape: AttentionShape) -> tuple[Words, Words]:
    """The segments' words without slots, and their block tables side by side, cut to the columns that are seen."""
    records = np.zeros((len(segments), SEGMENT_FIELDS), dtype=np.int32)
    num_queries = np.array([segment.num_queries for segment in segments], dtype=np.int32)
    context_len = np.array([segment.context_len for segment in segments], dtype=np.int32)
    records[:, SegmentField.FIRST_ROW] = [segment.first_row for segment in segments]
    records[:, SegmentField.NUM_QUERIES] = num_queries
    records[:, SegmentField.CONTEXT_LEN] = context_len
    window = context_len if shape.window is None else shape.window
    first_seen = np.maximum(context_len - num_queries + 1 - window, 0)
    first_columns = first_seen // shape.operands.geometry.block_size
    num_columns = -(-context_len // shape.operands.geometry.block_size) - first_columns
    stops = np.cumsum(num_columns)
    # Tables are addressed by a sequence's own columns, also where the first ones are left out.
    records[:, SegmentField.TABLE_START] = stops - num_columns - first_columns
    first_split = first_seen // SPLIT_TOKENS
    records[:, SegmentField.FIRST_SPLIT] = first_split
    records[:, SegmentField.NUM_SPLITS] = (context_len - 1) // SPLIT_TOKENS - first_split + 1
    pieces = zip(segments, first_columns.tolist(), num_columns.tolist(), strict=True)
    tables = [segment.block_table[:, first : first + count] for segment, first, count in pieces]
    num_spare = -int(stops[-1]) % 4  # so that every layer group's row begins at a multiple of 16 bytes
    tables.append(np.zeros((len(tables[0]), num_spare), dtype=np.int32))
    return records, np.concatenate(tables, axis=1, dtype=np.int32)


def _give_slots(decodes: Words) -> int:
    """Slots of partial sums for each query of the splits of a segment that has several; returns how many."""
    num_splits = decodes[:, SegmentField.NUM_SPLITS]
    slots = np.where(num_splits > 1, num_splits * decodes[:, SegmentField.NUM_QUERIES], 0)
    stops = np.cumsum(slots)
    decodes[:, SegmentField.FIRST_SLOT] = stops - slots
    return int(stops[-1]) if len(stops) else 0


def _items(decodes: Words, shared: list[SharedSplit]) -> Words:
    """`[.., 2]` every split of every segment but the shared ones."""
    counts = decodes[:, SegmentField.NUM_SPLITS]
    segment = np.repeat(np.arange(len(decodes)), counts)
    ordinal = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.stack((segment, ordinal + decodes[segment, SegmentField.FIRST_SPLIT]), axis=1).astype(np.int32)
    if not shared:
        return items
    own = np.ones(len(items), dtype=bool)
    starts = np.cumsum(counts) - counts
    for part in shared:
        members = np.array(part.members)
        own[starts[members] + part.split - decodes[members, SegmentField.FIRST_SPLIT]] = False
    return items[own]


def _in_tiles(items: Words, records: Words, rows: int, shape: AttentionShape) -> Words:
    """`[.., 3]` each of the items `[.., 2]` once per tile of its segment's rows."""
    counts = -(-records[items[:, 0], SegmentField.NUM_QUERIES] * shape.group // rows)
    item = np.repeat(np.arange(len(items)), counts)
    ordinal = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.concatenate((items[item], ordinal[:, None] * rows), axis=1, dtype=np.int32)


def _shared_splits(decodes: list[Segment], shape: AttentionShape) -> list[SharedSplit]:
    """The shared splits that are worth a launch. With a window, prefixes fall out of sight, and nothing is shared."""
    if shape.share_from_bytes is None or shape.window is not None or len(decodes) < 2:
        return []
    shared = [
        part
        for part in plan_shared_splits(decodes, shape.operands.geometry.block_size)
        if _members_per_tile(decodes[part.members[0]].num_queries, shape) > 1
    ]
    saved = sum(len(part.members) - 1 for part in shared) * shape.split_bytes
    return shared if shared and saved >= shape.share_from_bytes else []


def _members_per_tile(num_queries: int, shape: AttentionShape) -> int:
    return WIDE_ROWS // (num_queries * shape.group)


def _shared_items(shared: list[SharedSplit], records: Words, shape: AttentionShape) -> tuple[Words, Words]:
    """`[.., 3]` first member, members, split; and the members they point at."""
    items: list[tuple[int, int, int]] = []
    members: list[int] = []
    for part in shared:
        at_once = _members_per_tile(int(records[part.members[0], SegmentField.NUM_QUERIES]), shape)
        for first in range(0, len(part.members), at_once):
            chosen = part.members[first : first + at_once]
            items.append((len(members), len(chosen), part.split))
            members += chosen
    return np.array(items, dtype=np.int32).reshape(-1, 3), np.array(members, dtype=np.int32)


def _tiles(records: Words, first: int, shape: AttentionShape) -> Words:
    """`[.., 2]` tiles of the segments from `first` on; those with the most keys come first, so that none ends late."""
    rows = prefill_tile(shape.operands, shape.batch_invariant).rows
    prefills = records[first:]
    num_queries, context_len = prefills[:, SegmentField.NUM_QUERIES], prefills[:, SegmentField.CONTEXT_LEN]
    counts = -(-num_queries * shape.group // rows)
    segment = np.repeat(np.arange(len(prefills)), counts)
    ordinal = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    last_key = context_len[segment] - num_queries[segment] + (ordinal + 1) * rows // shape.group
    order = np.argsort(-last_key, kind="stable")
    return np.stack((segment + first, ordinal * rows), axis=1).astype(np.int32)[order]
