"""Which chunks of which prompts a prefill worker computes in its next step.

A pure class: driven by calls, does no I/O, knows no clock. First come, first served; a long prompt is cut into chunks
under the token budget, and what the budget leaves goes to the next prompt in the same step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from engine.allocation import BlockAllocator
from engine.sequence import SampledToken, ScheduledSequence, Sequence, SequenceKey, StepOutput, StepPlan


class PrefillState(Enum):
    WAITING = "accepted; has no blocks yet"
    RUNNING = "has its blocks; chunks are being computed"
    HANDING_OVER = "computed; the blocks are held until decode has verified them"


@dataclass(slots=True)
class _Entry:
    seq: Sequence
    state: PrefillState
    doomed: bool = False  # to be released when the step in flight is over


class PrefillScheduler:
    """Owns the sequences of one prefill worker from acceptance until their blocks are released.

    The caller alternates `plan()` and `finish_step()`; everything else may come at any moment in between. Blocks that
    the step in flight touches are never released before it is over.
    """

    def __init__(self, allocator: BlockAllocator, *, token_budget: int, max_waiting: int) -> None:
        self._allocator = allocator
        self._token_budget = token_budget
        self._max_waiting = max_waiting
        self._entries: dict[SequenceKey, _Entry] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._in_flight: set[SequenceKey] = set()

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._entries

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._entries) - len(self._waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Work that was accepted and not done."""
        return sum(seq.num_uncomputed for seq in (*self._waiting, *self._running))

    def can_add(self) -> bool:
        return len(self._waiting) < self._max_waiting

    def sequence(self, key: SequenceKey) -> Sequence | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.seq

    def add(self, seq: Sequence) -> None:
        assert seq.key not in self._entries, f"request {seq.request_id} is here already"
        self._entries[seq.key] = _Entry(seq, PrefillState.WAITING)
        self._waiting.append(seq)

    def plan(self) -> tuple[StepPlan, list[Sequence]]:
        """The next step, and the sequences that enter with it (their prefix hits are known now)."""
        admitted = self._admit()
        items: list[ScheduledSequence] = []
        budget = self._token_budget
        for seq in self._running:
            num_tokens = min(budget, seq.num_uncomputed)
            if num_tokens == 0:
                break
            items.append(ScheduledSequence(seq, num_tokens))
            budget -= num_tokens
        self._in_flight = {item.seq.key for item in items}
        return StepPlan(tuple(items)), admitted

    def finish_step(self, plan: StepPlan, output: StepOutput) -> list[tuple[Sequence, SampledToken]]:
        """Take a step's results in; returns the first tokens of the sequences that are now computed."""
        first_tokens = []
        doomed = self._end_step()
        for item, sampled in zip(plan.items, output.sampled, strict=True):
            entry = self._entries[item.seq.key]
            if item.seq.key in doomed:
                self._drop(entry)
                continue
            item.seq.num_computed += item.num_tokens
            self._allocator.publish(item.seq)
            if sampled is not None:
                self._running.remove(item.seq)
                entry.state = PrefillState.HANDING_OVER
                first_tokens.append((item.seq, sampled))
        return first_tokens

    def abandon_step(self) -> None:
        """The step in flight failed: nothing of it counts."""
        for key in self._end_step():
            self._drop(self._entries[key])

    def release(self, key: SequenceKey) -> None:
        """Forget a sequence and free its blocks, at once or when the step in flight is over. Unknown ids are fine."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if key in self._in_flight:
            entry.doomed = True
        else:
            self._drop(entry)

    def _end_step(self) -> set[SequenceKey]:
        doomed = {key for key in self._in_flight if self._entries[key].doomed}
        self._in_flight = set()
        return doomed

    def _admit(self) -> list[Sequence]:
        """Give blocks to waiting sequences, in order, while the running ones leave token budget."""
        admitted = []
        planned = sum(seq.num_uncomputed for seq in self._running)
        while self._waiting and planned < self._token_budget:
            seq = self._waiting[0]
            self._allocator.open(seq, use_cache=not seq.wants_prompt_logprobs)
            if not self._allocator.grow(seq, seq.num_tokens):
                self._allocator.release(seq)
                seq.num_cached = 0
                break
            self._waiting.popleft()
            self._entries[seq.key].state = PrefillState.RUNNING
            self._running.append(seq)
            admitted.append(seq)
            planned += seq.num_uncomputed
        return admitted

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.seq.key]
        if entry.state is PrefillState.WAITING:
            self._waiting.remove(entry.seq)
            return
        if entry.state is PrefillState.RUNNING:
            self._running.remove(entry.seq)
        self._allocator.release(entry.seq)
