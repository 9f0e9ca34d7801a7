"""The prompts that a decode worker computes itself: placed here, preempted, without the prefix that they counted on, or
begun by another worker.

Keeps who waits for blocks and who is being computed in chunks, both first come, first served, for `DecodeScheduler`,
which says how much of a step prompts may have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.cost_model.step_room import StepRoom
from engine.kv.allocation import BlockAllocator
from engine.model.adapters import AdapterSlot
from engine.sequence import BlockCopy, ScheduledSequence, Sequence


@dataclass(slots=True)
class Chunks:
    """A step's chunks, and the sequences that get blocks with it, each with the copies that its prefix hit needs."""

    ring_left: int  # columns of the staging ring
    items: list[ScheduledSequence] = field(default_factory=list)
    started: list[tuple[Sequence, tuple[BlockCopy, ...]]] = field(default_factory=list)


class LocalPrefill:
    """Owns the order in which prompts get blocks and chunks.

    `host_groups_for(num_tokens)`: the layer groups that a prompt keeps in host memory; None: no tier has room for it.
    """

    def __init__(self, allocator: BlockAllocator, host_groups_for: Callable[[int], frozenset[int] | None]) -> None:
        self._allocator = allocator
        self._host_groups_for = host_groups_for
        self._waiting: deque[Sequence] = deque()
        self._computing: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """The number of prompts that have no blocks."""
        return len(self._waiting)

    @property
    def num_keeping_no_place(self) -> int:
        """The number of those whose adapter is not loaded, and that are not next when it is."""
        return len(self._waiting) - len(self._keeping_room)

    @property
    def oldest_wait_s(self) -> float:
        """Since the first of those came that have no blocks and never had any; 0 without any."""
        return max((seq.waited_s for seq in self._waiting if seq.began_at is None), default=0.0)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens that those need room for who lack nothing else, or an adapter that is overdue, in whole
        columns."""
        size = self._allocator.block_size
        return sum(self._allocator.num_columns_for(seq.num_tokens) * size for seq in self._keeping_room)

    @property
    def num_uncomputed(self) -> int:
        """The number of prompts that are not computed, with blocks or without."""
        return len(self._waiting) + len(self._computing)

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(seq.num_uncomputed for seq in (*self._waiting, *self._computing))

    @property
    def needs_host_memory(self) -> bool:
        """Whether chunks or blocks of the next step may have to do with another tier."""
        return any(seq.host_groups for seq in self._computing) or bool(
            self._waiting and self._allocator.host_pool is not None
        )

    @property
    def oldest(self) -> Sequence | None:
        """The prompt that is next, with blocks or without; None if there is nothing to compute. One whose adapter is
        being loaded lets others pass."""
        return next(iter((*self._unplanned, *self._startable)), None)

    @property
    def oldest_may_begin(self) -> bool:
        """Whether that one has blocks, or would find them now."""
        oldest = self.oldest
        return oldest is not None and bool(self._unplanned or self._host_groups_for(oldest.num_tokens) is not None)

    @property
    def _unplanned(self) -> list[Sequence]:
        """The prompts with blocks, but for those whose last chunk is in flight or that share no step."""
        shared = [s for s in self._computing if not (s.num_awaited or s.num_alone) and s.has_adapter]
        return [s for s in shared if s.num_unplanned]

    @property
    def _startable(self) -> list[Sequence]:
        """The prompts that lack nothing but blocks."""
        return [seq for seq in self._waiting if seq.has_adapter]

    @property
    def _keeping_room(self) -> list[Sequence]:
        """Those, and the first of each adapter that is overdue."""
        overdue = {seq.adapter: seq for seq in reversed(self._waiting) if seq.adapter and seq.adapter.is_overdue}
        return [*self._startable, *overdue.values()]

    def may_begin(self) -> Iterator[Sequence]:
        """Of those that have no blocks, the first of each adapter, as far as it would find some now if its adapter were
        loaded. Nobody begins before an earlier one that lacks nothing but blocks."""
        seen: set[AdapterSlot | None] = set()
        for seq in self._waiting:
            if seq.adapter in seen:
                continue
            seen.add(seq.adapter)
            if self._groups_to_begin(seq) is not None:
                yield seq
            elif seq.has_adapter:
                return

    @property
    def suspects(self) -> list[Sequence]:
        """The prompts with blocks that share no step."""
        return [seq for seq in self._computing if seq.num_alone and seq.has_adapter]

    @property
    def staged_columns(self) -> int:
        """What chunks of all that have blocks need of the staging ring, but for those whose adapter is being loaded:
        what is kept for them nobody could use."""
        return sum(self._staged_columns(seq) for seq in self._computing if seq.has_adapter)

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def go_on(self, seq: Sequence) -> None:
        """Go on with a prompt that has its blocks, and in them its first tokens."""
        self._computing.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """Put a prompt that has lost its blocks before all others."""
        if seq in self._computing:
            self._computing.remove(seq)
        self._waiting.appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a prompt that is computed, or dropped."""
        (self._computing if seq in self._computing else self._waiting).remove(seq)

    def fill(self, room: StepRoom, ring_left: int, num_places: int) -> Chunks:
        """The chunks of the next step, oldest first; those in host memory only while their columns fit what decodes
        leave of the staging ring. At most `num_places` of those that wait get blocks, as far as there is room; who
        shares no step gets its chunks by `chunk_alone`, from the next step on."""
        chunks = Chunks(ring_left=ring_left)
        for seq in self._unplanned:
            self._add(seq, room, chunks)
        for seq in self._startable:
            if not room.is_open or len(chunks.started) >= num_places:
                break
            host_groups = self._groups_to_begin(seq)
            if host_groups is None:
                break
            copies = self._allocator.open(seq, use_cache=seq.skips_prefix, host_groups=host_groups)
            grown = self._allocator.grow(seq, seq.num_tokens)
            assert grown, "the pool had room for the whole sequence, so it has for what a prefix hit leaves"
            self._waiting.remove(seq)
            self._computing.append(seq)
            chunks.started.append((seq, copies))
            if not seq.num_alone:
                self._add(seq, room, chunks)
        return chunks

    def chunk_alone(self, seq: Sequence, room: StepRoom, ring_left: int) -> list[ScheduledSequence]:
        """The next chunk of one that shares no step."""
        chunks = Chunks(ring_left=ring_left)
        self._add(seq, room, chunks)
        return chunks.items

    def _groups_to_begin(self, seq: Sequence) -> frozenset[int] | None:
        """The layer groups that it would keep in host memory if it began now; None: there is no room for it, or another
        prompt has the ring."""
        host_groups = self._host_groups_for(seq.num_tokens)
        is_taken = bool(host_groups) and any(other.host_groups for other in self._computing)
        return None if is_taken else host_groups

    def _add(self, seq: Sequence, room: StepRoom, chunks: Chunks) -> None:
        num_columns = self._staged_columns(seq)
        num_cached = seq.num_computed + seq.num_computing
        num_tokens = room.chunk(seq.num_unplanned, num_cached) if num_columns <= chunks.ring_left else 0
        if num_tokens:
            chunks.ring_left -= num_columns
            chunks.items.append(ScheduledSequence(seq, num_tokens))
            room.add(num_tokens, num_cached)

    def _staged_columns(self, seq: Sequence) -> int:
        return self._allocator.num_columns_for(seq.num_tokens) if seq.host_groups else 0
