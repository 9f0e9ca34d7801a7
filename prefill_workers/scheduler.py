"""Which chunks of which prompts a prefill worker computes in its next step.

A pure class: driven by calls, does no I/O, knows no clock. First come, first served; a long prompt is cut into chunks
under the token budget. Where a step would be short, the next prompt shares it; beyond that it would only make the first
one wait. Only a prompt whose prefix or adapter is being loaded lets others pass. One that may be what makes steps fail
(`Sequence.num_alone`) shares its steps with nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from engine.cost_model.step_cost import StepCost
from engine.cost_model.step_room import StepRoom
from engine.kv.allocation import BlockAllocator
from engine.model.adapters import Need
from engine.sequence import BlockCopy, SampledToken, ScheduledSequence, Sequence, SequenceKey, StepOutput, StepPlan

Room = tuple[int, int, int]
"""Blocks available on the device and in host memory, and columns of the staging ring."""

KEPT_SHARE: Final = 0.5
"""Of the device's blocks, for prompts that decode has no room for yet."""


class PrefillState(Enum):
    LOADING = "accepted; its prefix is being brought into host memory"
    WAITING = "accepted; has no blocks yet"
    RUNNING = "has its blocks; chunks are being computed"
    HANDING_OVER = "computed; the blocks are held until decode has verified them"
    BROKEN = "cannot be computed, or has lost its prefix in a failed step; the blocks are held until nobody reads them"


@dataclass(slots=True)
class _Entry:
    seq: Sequence
    state: PrefillState
    is_reserved: bool  # decode has room for it; else it may have to be kept here
    doomed: bool = False  # to be released when the step in flight is over


def _device_only(seq: Sequence) -> frozenset[int]:
    return frozenset()


class PrefillScheduler:
    """Owns the sequences of one prefill worker from acceptance until their blocks are released.

    The caller alternates `plan()` and `finish_step()`; everything else may come at any moment in between. Blocks that
    the step in flight touches are never released before it is over.

    `host_groups(seq)`: which layer groups of a prompt may rest in host memory when the device lacks blocks for all;
    none where a step can stage no columns of them.
    `longest`: prompt in tokens; for one of these there is always room beside those kept without a reservation. Else it
    could wait for their blocks, and they for those that decode holds for it.
    `cost()`: what nearly all steps stay below, by which prompts share one; None: they do as far as the token budget
    goes.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        token_budget: int,
        max_waiting: int,
        longest: int = 0,
        staging_columns: int = 0,
        host_groups: Callable[[Sequence], frozenset[int]] = _device_only,
        cost: Callable[[], StepCost | None] = lambda: None,
    ) -> None:
        self._allocator = allocator
        self._token_budget = token_budget
        self._max_waiting = max_waiting
        self._longest = longest
        self._staging_columns = staging_columns
        self._host_groups = host_groups
        self._cost = cost
        self._entries: dict[SequenceKey, _Entry] = {}
        self._waiting: dict[SequenceKey, _Entry] = {}  # in order of arrival; also those that load
        self._running: list[Sequence] = []
        self._in_flight: set[SequenceKey] = set()
        self.num_host_landings = 0
        self._lacking: tuple[SequenceKey, Room] | None = None  # who found too little, and how much there was

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._entries

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def oldest_wait_s(self) -> float:
        """Since the first of those that wait came; 0 without any."""
        return max((entry.seq.waited_s for entry in self._waiting.values()), default=0.0)

    @property
    def num_running(self) -> int:
        return len(self._entries) - len(self._waiting)

    @property
    def num_held(self) -> int:
        """All that are here, for whatever reason."""
        return len(self._entries)

    @property
    def num_in_host(self) -> int:
        """The number of sequences with blocks that rest in host memory at least in part."""
        return sum(bool(entry.seq.host_groups) for entry in self._entries.values())

    @property
    def num_uncomputed_tokens(self) -> int:
        """Work that was accepted and not done."""
        waiting = sum(entry.seq.num_uncomputed for entry in self._waiting.values())
        return waiting + sum(seq.num_uncomputed for seq in self._running)

    def adapter_users(self) -> Iterator[tuple[Sequence, Need]]:
        """All that are to be computed, and how much each needs its adapter."""
        for entry in self._entries.values():
            if entry.state is PrefillState.RUNNING:
                yield entry.seq, Need.NOW
            elif entry.state is PrefillState.WAITING and entry.is_reserved:
                yield entry.seq, Need.SOON
            elif entry.state in (PrefillState.WAITING, PrefillState.LOADING):
                yield entry.seq, Need.LATER

    def can_add(self) -> bool:
        return len(self._waiting) < self._max_waiting

    def sequence(self, key: SequenceKey) -> Sequence | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.seq

    def add(self, seq: Sequence, *, loading: bool = False, is_reserved: bool = True) -> None:
        """`loading`: it keeps its place in the queue, but enters only after `loaded`. Not `is_reserved`: it is computed
        as far as `KEPT_SHARE` goes, and the others after `reserved`."""
        assert seq.key not in self._entries, f"request {seq.request_id} is here already"
        entry = _Entry(seq, PrefillState.LOADING if loading else PrefillState.WAITING, is_reserved)
        self._entries[seq.key] = self._waiting[seq.key] = entry

    def reserved(self, key: SequenceKey) -> None:
        """Decode has room for it now. Unknown ids are fine."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_reserved = True

    def loaded(self, key: SequenceKey) -> None:
        """Note that a sequence's prefix is in host memory, or is to be computed after all. Unknown ids are fine."""
        entry = self._waiting.get(key)
        if entry is not None:
            entry.state = PrefillState.WAITING

    def plan(self) -> StepPlan:
        """The next step. The prefix hits of who enters with it are known now."""
        step = StepFilling(
            self._allocator,
            token_budget=self._token_budget,
            staging_columns=self._staging_columns,
            cost=self._cost(),
        )
        for seq in self._running:
            if not step.may_share(seq):
                break
            step.add(seq)
        else:
            self._admit(step)
        plan = step.plan()
        self._in_flight = {item.seq.key for item in plan.items}
        return plan

    def finish_step(self, plan: StepPlan, output: StepOutput) -> list[tuple[Sequence, SampledToken | None]]:
        """Take a step's results in; returns the sequences that are now computed, with their first tokens; parts of
        prompts have none."""
        computed = []
        doomed = self._end_step()
        for item, sampled in zip(plan.items, output.sampled, strict=True):
            entry = self._entries[item.seq.key]
            if item.seq.key in doomed:
                self._drop(entry)
                continue
            self._allocator.complete_move(item.seq, ok=True)
            item.seq.num_computed += item.num_tokens
            self._allocator.publish(item.seq)
            if item.seq.num_uncomputed == 0 and entry.state is PrefillState.RUNNING:
                self._running.remove(item.seq)
                entry.state = PrefillState.HANDING_OVER
                computed.append((item.seq, sampled))
        return computed

    def abandon_step(self) -> None:
        """The step in flight failed: nothing of it counts. What had a prefix to be copied in it cannot go on."""
        in_flight = self._in_flight
        for key in self._end_step():
            self._drop(self._entries[key])
        for key in in_flight & self._entries.keys():
            entry = self._entries[key]
            if self._allocator.is_moving(entry.seq) and entry.state is PrefillState.RUNNING:
                self._break(entry)

    def suspect(self, plan: StepPlan, whom: SequenceKey | None) -> list[Sequence]:
        """A step failed, and one of its sequences may be the reason, or is known to be: that one, or else each, shares
        no step any more.

        Returns those that cannot go on here, because the step was to bring their prefix.
        """
        for item in plan.items:
            if whom is None or item.seq.key == whom:
                item.seq.num_alone = max(item.seq.num_alone, 1)
        entries = [self._entries.get(item.seq.key) for item in plan.items]
        return [entry.seq for entry in entries if entry is not None and entry.state is PrefillState.BROKEN]

    def stop_computing(self, key: SequenceKey) -> None:
        """Compute it no further than the step in flight; `release` follows. Unknown ids are fine."""
        entry = self._entries.get(key)
        if entry is not None and entry.state is PrefillState.RUNNING:
            self._break(entry)

    def release(self, key: SequenceKey) -> None:
        """Forget a sequence and free its blocks, at once or when the step in flight is over. Unknown ids are fine."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if key in self._in_flight:
            entry.doomed = True
        else:
            self._drop(entry)

    def _break(self, entry: _Entry) -> None:
        entry.state = PrefillState.BROKEN
        self._running.remove(entry.seq)

    def _end_step(self) -> set[SequenceKey]:
        doomed = {key for key in self._in_flight if self._entries[key].doomed}
        self._in_flight = set()
        return doomed

    def _admit(self, step: StepFilling) -> None:
        """Give blocks to waiting sequences, in order, while the running ones leave token budget."""
        ready = [e for e in self._waiting.values() if e.state is PrefillState.WAITING and e.seq.has_adapter]
        for entry in ready:
            if step.is_full or not step.may_share(entry.seq):
                break
            if not (entry.is_reserved or self._may_keep(entry.seq)):
                continue
            copies = self._open(entry.seq, step.columns_left)
            if copies is None:
                break
            del self._waiting[entry.seq.key]
            self.num_host_landings += bool(entry.seq.host_groups)
            entry.state = PrefillState.RUNNING
            self._running.append(entry.seq)
            step.add(entry.seq, copies)

    def _may_keep(self, seq: Sequence) -> bool:
        """Whether it may be computed before decode has room for it, and be kept here until then."""
        columns = self._allocator.num_columns_for  # whole ones are held, however short a prompt is
        kept = [e.seq for e in self._entries.values() if not e.is_reserved and e.seq.lease is not None]
        pool = self._allocator.pool.num_blocks // self._allocator.layer_groups
        num_kept = sum(columns(other.num_tokens) for other in (*kept, seq))
        return num_kept <= min(KEPT_SHARE * pool, pool - columns(self._longest))

    def _open(self, seq: Sequence, columns_left: int) -> tuple[BlockCopy, ...] | None:
        """Blocks on the device, else split over both tiers; None and nothing taken if there are too few."""
        room = self._room(columns_left)
        lacking, then = self._lacking or (None, room)
        if lacking == seq.key and all(now <= before for now, before in zip(room, then, strict=True)):
            return None
        copies = self._try(seq, frozenset()) if self._may_fit_device(seq) else None
        if copies is None and self._allocator.num_columns_for(seq.num_tokens) <= columns_left:
            host_groups = self._host_groups(seq)
            copies = self._try(seq, host_groups) if host_groups else None
        self._lacking = None if copies is not None else (seq.key, room)
        return copies

    def _may_fit_device(self, seq: Sequence) -> bool:
        """False where opening it there would only evict what the prefix cache holds."""
        pool, num_found = self._allocator.pool, 0
        if self._allocator.prefix_caching:
            hashes = self._allocator.hashes(seq, (seq.num_tokens - 1) // self._allocator.block_size)
            keys = ((digest, group) for digest in hashes for group in range(self._allocator.layer_groups))
            num_found = sum(pool.find(key) is not None for key in keys)
        return self._allocator.num_blocks_for(seq.num_tokens) - num_found <= pool.num_available

    def _try(self, seq: Sequence, host_groups: frozenset[int]) -> tuple[BlockCopy, ...] | None:
        copies = self._allocator.open(seq, use_cache=seq.skips_prefix, host_groups=host_groups)
        if self._allocator.grow(seq, seq.num_tokens):
            return copies
        self._allocator.release(seq)
        seq.num_cached = 0
        return None

    def _room(self, columns_left: int) -> Room:
        host_pool = self._allocator.host_pool
        on_host = 0 if host_pool is None else host_pool.num_available
        return self._allocator.pool.num_available, on_host, columns_left

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.seq.key]
        if entry.state in (PrefillState.WAITING, PrefillState.LOADING):
            del self._waiting[entry.seq.key]
            return
        if entry.state is PrefillState.RUNNING:
            self._running.remove(entry.seq)
        self._allocator.release(entry.seq)


class StepFilling:
    """One step as it is filled: chunks under the token budget, host-resident prompts under the staging ring's columns.

    Sequences are offered in order; each gets what the ones before it have left.

    The first one may fill the budget; others are added as far as `StepRoom` says that sharing saves time.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        token_budget: int,
        staging_columns: int,
        cost: StepCost | None,
    ) -> None:
        self._allocator = allocator
        self._room = StepRoom(cost, most_tokens=token_budget)
        self.columns_left = staging_columns  # of the ring, that this step has not used
        self._items: list[ScheduledSequence] = []
        self._copies: list[BlockCopy] = []

    @property
    def is_full(self) -> bool:
        return not self._room.is_open

    def may_share(self, seq: Sequence) -> bool:
        """Whether this one may be computed in the step beside those that it has: a suspect is computed alone."""
        return not self._items or not (seq.num_alone or self._items[0].seq.num_alone)

    def add(self, seq: Sequence, copies: tuple[BlockCopy, ...] = ()) -> None:
        """Plan the sequence's next chunk, or nothing where that does not fit. With `copies`, which bring its prefix to
        the device and are made in no other step than this, at least a token: behind a long prefix one may cost more
        than there is room for."""
        num_tokens = self._room.chunk(seq.num_uncomputed, seq.num_computed)
        if copies:
            num_tokens = max(num_tokens, 1)
        staged = self._allocator.num_columns_for(seq.num_computed + num_tokens) if seq.host_groups else 0
        if num_tokens == 0 or staged > self.columns_left:
            return
        self._room.add(num_tokens, seq.num_computed)
        self._items.append(ScheduledSequence(seq, num_tokens))
        self._copies += copies
        self.columns_left -= staged

    def plan(self) -> StepPlan:
        return StepPlan(tuple(self._items), tuple(self._copies))


def host_groups(
    seq: Sequence,
    allocator: BlockAllocator,
    *,
    staging_columns: int,
    chunk_tokens: int,
    block_bytes: int,
    host_bytes_per_s: Callable[[], float],
    prefill_s: Callable[[int], float],
) -> frozenset[int]:
    """Which layer groups of a prompt rest in host memory when the device has no room for all of it.

    LayerKV (arXiv 2410.00428): keep the smallest number of layers x on the device for which moving the others takes no
    longer than computing, T_offload(L - x) <= T_prefill(n), by what steps cost and copies take. So a prompt is admitted
    by compute, not by free KV memory. Empty if it can only be computed on the device: it has more than
    `staging_columns` block columns, or there is no host memory. `prefill_s(n)`: predicted, for n tokens.
    """
    num_tokens, num_groups = seq.num_tokens, allocator.layer_groups
    num_columns = allocator.num_columns_for(num_tokens)
    if num_columns > staging_columns or allocator.host_pool is None:
        return frozenset()
    bytes_per_token = block_bytes / allocator.block_size
    group_s = moved_tokens(num_tokens, chunk_tokens) * bytes_per_token / host_bytes_per_s()
    num_hidden = int(prefill_s(num_tokens) / group_s)  # groups whose transfer fits into the time that computing takes
    # With less room than what they leave, the transfer shows a little; waiting for the device would show more.
    kept = min(max(num_groups - num_hidden, 0), allocator.pool.num_available // num_columns, num_groups - 1)
    return allocator.all_groups - spread(kept, num_groups)


def moved_tokens(num_tokens: int, chunk_tokens: int) -> int:
    """The number of tokens that cross the link for one host-resident group: each is written back once, and fetched for
    every later chunk."""
    num_chunks = -(-num_tokens // chunk_tokens)
    return num_tokens + chunk_tokens * num_chunks * (num_chunks - 1) // 2


def spread(count: int, num_groups: int) -> frozenset[int]:
    """`count` of the groups, evenly among them, so that those between can be fetched while these compute."""
    return frozenset((2 * i + 1) * num_groups // (2 * count) for i in range(count))
