"""The prompts that a decode worker computes itself: placed here, preempted, or without the prefix that they counted on.

Keeps who waits for blocks and who is being computed in chunks, both first come, first served, for `DecodeScheduler`,
which says how much of a step prompts may have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.kv.allocation import BlockAllocator
from engine.sequence import BlockCopy, ScheduledSequence, Sequence


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
        """Those that have no blocks."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """That they need room for, in whole columns."""
        size = self._allocator.block_size
        return sum(self._allocator.num_columns_for(seq.num_tokens) * size for seq in self._waiting)

    @property
    def num_uncomputed(self) -> int:
        """With blocks or without."""
        return len(self._waiting) + len(self._computing)

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(seq.num_uncomputed for seq in (*self._waiting, *self._computing))

    @property
    def num_unplanned_tokens(self) -> int:
        """Without those that a step in flight computes."""
        return sum(seq.num_unplanned for seq in (*self._unplanned, *self._waiting))

    @property
    def needs_host_memory(self) -> bool:
        """Whether chunks or blocks of the next step may have to do with another tier."""
        return any(seq.host_groups for seq in self._computing) or bool(
            self._waiting and self._allocator.host_pool is not None
        )

    @property
    def oldest(self) -> Sequence | None:
        """Who is next, with blocks or without; None if there is nothing to compute."""
        return next(iter((*self._unplanned, *self._waiting)), None)

    @property
    def _unplanned(self) -> list[Sequence]:
        """Those with blocks, but for the ones whose last chunk is in flight or that share no step."""
        return [seq for seq in self._computing if not (seq.num_awaited or seq.num_alone)]

    @property
    def suspects(self) -> list[Sequence]:
        """Those with blocks that share no step."""
        return [seq for seq in self._computing if seq.num_alone]

    @property
    def staged_columns(self) -> int:
        """What chunks of all that have blocks need of the staging ring."""
        return sum(map(self._staged_columns, self._computing))

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """It has lost its blocks, and is before all others when there are some again."""
        if seq in self._computing:
            self._computing.remove(seq)
        self._waiting.appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """It is computed, or dropped."""
        (self._computing if seq in self._computing else self._waiting).remove(seq)

    def start(self, budget: int, num_places: int) -> list[tuple[Sequence, tuple[BlockCopy, ...]]]:
        """Give blocks to waiting sequences, in order, while the token budget goes beyond those that have some.

        Returns each with the copies that its prefix hit needs in this step.
        """
        started: list[tuple[Sequence, tuple[BlockCopy, ...]]] = []
        planned = sum(seq.num_unplanned for seq in self._unplanned)
        while self._waiting and planned < budget and len(started) < num_places:
            seq = self._waiting[0]
            host_groups = self._host_groups_for(seq.num_tokens)
            if host_groups is None or (host_groups and any(other.host_groups for other in self._computing)):
                break  # one prompt at a time has the ring
            copies = self._allocator.open(seq, use_cache=not seq.wants_prompt_logprobs, host_groups=host_groups)
            grown = self._allocator.grow(seq, seq.num_tokens)
            assert grown, "the pool had room for the whole sequence, so it has for what a prefix hit leaves"
            self._computing.append(self._waiting.popleft())
            planned += seq.num_uncomputed
            started.append((seq, copies))
        return started

    def chunks(self, budget: int, ring_left: int) -> list[ScheduledSequence]:
        """Oldest first; those in host memory only while their columns fit what decodes leave of the staging ring."""
        return self._chunks(self._unplanned, budget, ring_left)

    def chunk_alone(self, seq: Sequence, budget: int, ring_left: int) -> list[ScheduledSequence]:
        """The next chunk of one that shares no step."""
        return self._chunks([seq], budget, ring_left)

    def _chunks(self, seqs: list[Sequence], budget: int, ring_left: int) -> list[ScheduledSequence]:
        chunks = []
        for seq in seqs:
            num_tokens = min(budget, seq.num_unplanned)
            if num_tokens <= 0:
                break
            num_columns = self._staged_columns(seq)
            if num_columns > ring_left:
                continue
            ring_left -= num_columns
            budget -= num_tokens
            chunks.append(ScheduledSequence(seq, num_tokens))
        return chunks

    def _staged_columns(self, seq: Sequence) -> int:
        return self._allocator.num_columns_for(seq.num_tokens) if seq.host_groups else 0
