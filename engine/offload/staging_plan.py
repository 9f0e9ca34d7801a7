"""Which blocks of the staging ring stand in for host-resident layer groups in one step: no bytes, only addresses.

The i-th host group of a step lies in ring slot `i mod R`; within a slot the staged sequences lie one after the other,
each at the same offset in every slot. See docs/decisions/0006.

Shape legend: G layer groups, R ring slots, C columns of a block table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kv.cache import KVLayout
from engine.sequence import ScheduledSequence, Sequence, StepPlan

Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingConfig:
    """The shape of the ring: with one slot nothing overlaps, with two a group is fetched while another computes."""

    num_groups: int  # R, layer groups that lie in the ring at once
    num_blocks: int  # of each slot: block columns of all host-resident sequences that one step may touch

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_blocks < 1:
            raise ValueError(
                f"a staging ring of {self.num_groups} slots of {self.num_blocks} blocks holds nothing; give it at"
                " least one slot of one block"
            )

    @property
    def total_blocks(self) -> int:
        return self.num_groups * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSequence:
    """One sequence of a step with groups on the host, and its part of every slot."""

    seq: Sequence
    offset: int  # of its first column in a slot
    num_columns: int  # that hold its tokens after the step
    num_held: int  # of these, those that hold earlier tokens
    first_written: int  # the first column that the step's tokens change

    def host_blocks(self, group: int, first: int, stop: int) -> Blocks:
        assert self.seq.host_table is not None, f"{self.seq.request_id} has groups on the host and no table there"
        return self.seq.host_table.view[group, first:stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPairs:
    """Blocks of one layer group in the host's cache and in the device's, `[n]` each, pairwise."""

    host: Blocks
    device: Blocks

    def __len__(self) -> int:
        return len(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingPlan:
    """Where the host-resident groups of one step lie in the ring."""

    groups: tuple[int, ...]  # all of the step that rest on the host, ascending
    first_block: dict[int, int]  # of the slot of each group, in the device cache
    staged: tuple[StagedSequence, ...]
    tables: dict[int, Blocks]  # [G, C] of each staged item of the plan, by its index, with ring blocks filled in

    def fetched(self, group: int, block_size: int, window: int | None) -> BlockPairs:
        """Blocks that hold the earlier tokens which the step's tokens see in this group."""
        spans = []
        for staged in self._of(group):
            first = 0 if window is None else max(0, staged.seq.num_computed + 1 - window) // block_size
            spans.append((staged, first, staged.num_held))
        return self._pairs(group, spans)

    def written(self, group: int) -> BlockPairs:
        """Blocks that the step's tokens change."""
        return self._pairs(group, [(staged, staged.first_written, staged.num_columns) for staged in self._of(group)])

    def _of(self, group: int) -> list[StagedSequence]:
        return [staged for staged in self.staged if group in staged.seq.host_groups]

    def _pairs(self, group: int, spans: list[tuple[StagedSequence, int, int]]) -> BlockPairs:
        """Columns [first, stop) of each sequence."""
        base = self.first_block[group]
        host = [staged.host_blocks(group, first, stop) for staged, first, stop in spans]
        in_slot = _numbers(tuple((staged.offset + first, staged.offset + stop) for staged, first, stop in spans))
        return BlockPairs(host=np.concatenate(host), device=base + in_slot)


@functools.lru_cache(maxsize=8)  # those of one group of a step are those of the next
def _numbers(spans: tuple[tuple[int, int], ...]) -> Blocks:
    """All numbers of [first, stop) of each, one after the other."""
    numbers: Blocks = np.concatenate([np.arange(first, stop, dtype=np.int32) for first, stop in spans])
    numbers.flags.writeable = False
    return numbers


def plan_staging(plan: StepPlan, layout: KVLayout, ring: StagingConfig | None, ring_start: int) -> StagingPlan | None:
    """The staging plan of a step, None if nothing rests on the host. The ring begins at device block `ring_start`.

    Raises ValueError if the host-resident sequences need more columns than a slot has.
    """
    indices = [index for index, item in enumerate(plan.items) if item.seq.host_groups]
    if not indices:
        return None
    staged = _line_up([plan.items[index] for index in indices], layout.block_size)
    needed, available = staged[-1].offset + staged[-1].num_columns, ring.num_blocks if ring else 0
    if ring is None or needed > available:
        raise ValueError(
            f"the host-resident sequences of a step need {needed} block columns, and the staging ring has"
            f" {available}; schedule fewer of them at a time or give the ring more memory"
        )
    groups = tuple(sorted(frozenset[int]().union(*(entry.seq.host_groups for entry in staged))))
    slots = {group: ring_start + i % ring.num_groups * ring.num_blocks for i, group in enumerate(groups)}
    tables = {
        index: _table(entry, layout.num_layer_groups, slots) for index, entry in zip(indices, staged, strict=True)
    }
    return StagingPlan(groups=groups, first_block=slots, staged=staged, tables=tables)


def _line_up(items: list[ScheduledSequence], block_size: int) -> tuple[StagedSequence, ...]:
    staged = []
    offset = 0
    for item in items:
        before, after = item.start, item.stop
        num_columns = -(-after // block_size)
        staged.append(
            StagedSequence(
                seq=item.seq,
                offset=offset,
                num_columns=num_columns,
                num_held=-(-before // block_size),
                first_written=before // block_size,
            )
        )
        offset += num_columns
    return tuple(staged)


def _table(staged: StagedSequence, num_groups: int, slots: dict[int, int]) -> Blocks:
    """[G, C]"""
    seq, count = staged.seq, staged.num_columns
    table = np.full((num_groups, count), -1, dtype=np.int32)
    if len(seq.host_groups) < num_groups:
        assert seq.block_table is not None, f"{seq.request_id} has groups on the device and no table there"
        table[:] = seq.block_table.view[:, :count]
    for group in seq.host_groups:
        first = slots[group] + staged.offset
        table[group] = np.arange(first, first + count, dtype=np.int32)
    return table
