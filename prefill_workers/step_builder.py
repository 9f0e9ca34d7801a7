"""One step as it is filled: chunks under the token budget, host-resident sequences under the staging ring's columns."""

from __future__ import annotations

import math

from engine.kv.allocation import BlockAllocator
from engine.sequence import BlockCopy, ScheduledSequence, Sequence, StepPlan


class StepFilling:
    """Sequences are offered in order; each gets what the ones before it have left.

    The first one may fill the budget; others are added only up to `shared_tokens` in all.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        token_budget: int,
        staging_columns: int,
        shared_tokens: float = math.inf,
    ) -> None:
        self._allocator = allocator
        self._tokens_left = token_budget
        self._shared_tokens = shared_tokens
        self._columns_left = staging_columns
        self._items: list[ScheduledSequence] = []
        self._copies: list[BlockCopy] = []

    @property
    def is_full(self) -> bool:
        return self._tokens_left == 0

    def admits(self, seq: Sequence) -> bool:
        """Whether the step may be shared by this one and those that it has."""
        return not self._items or not (seq.num_alone or self._items[0].seq.num_alone)

    @property
    def columns_left(self) -> int:
        """Of the staging ring."""
        return self._columns_left

    def add(self, seq: Sequence, copies: tuple[BlockCopy, ...] = ()) -> None:
        """Its next chunk, or nothing where that does not fit."""
        num_tokens = min(self._tokens_left, seq.num_uncomputed)
        staged = self._allocator.num_columns_for(seq.num_computed + num_tokens) if seq.host_groups else 0
        if num_tokens == 0 or staged > self._columns_left:
            return
        if not self._items:
            self._tokens_left = max(num_tokens, int(min(self._tokens_left, self._shared_tokens)))
        self._items.append(ScheduledSequence(seq, num_tokens))
        self._copies += copies
        self._tokens_left -= num_tokens
        self._columns_left -= staged

    def plan(self) -> StepPlan:
        return StepPlan(tuple(self._items), tuple(self._copies))
