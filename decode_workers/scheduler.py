"""What a decode worker computes in its next step: continuous batching with reservations, local prefill, preemption.

A pure class: driven by calls, does no I/O, and is told the time. Every step advances all running sequences by one
token, or, where some of them rest in host memory, those whose turn it is. Beside them, sequences that must be computed
here (placed locally, or preempted) get chunks, as long as all who decode can bear by what they were promised. Those
that may be what makes steps fail (`Sequence.num_alone`) have steps of their own between these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from decode_workers.local_prefill import LocalPrefill
from decode_workers.offload_policy import NoOffload, OffloadPolicy, StepSelection
from decode_workers.pacing import longest_before_s
from engine.cost_model.step_cost import KEPT, StepCost, StepWork
from engine.cost_model.step_room import StepRoom
from engine.drafting.drafter import Drafted
from engine.drafting.speculation import Candidate, Speculation
from engine.kv.allocation import BlockAllocator
from engine.model.adapters import Need
from engine.sequence import (
    FinishReason,
    SampledToken,
    ScheduledSequence,
    Sequence,
    SequenceKey,
    StepOutput,
    StepPlan,
    TokenLogprobs,
    finish_reason,
)

_NO_DRAFTS: Final[Mapping[Sequence, tuple[int, ...]]] = MappingProxyType({})
_STEPS_AHEAD: Final = 16
"""Where steps overlap, of so many one knows its tokens, so that drafts can be tried."""


class DecodeState(Enum):
    """What a decode worker's sequence is doing."""

    RESERVED = "has blocks for its prompt; the KV, or the first part of it, is on its way from another worker"
    WAITING = "has no blocks; to be computed here, from the first token or from where a prefix hit ends"
    PREFILLING = "has its blocks, perhaps with what another worker computed; chunks are being computed here"
    HANDING_OVER = "computed here for another decode worker; the blocks are held until that one has verified them"
    RUNNING = "all KV but the newest token's is here, in one tier or another; one more token each step or turn"
    ENDED = "has its last token, or is wanted no more; the blocks are held until no step or hand-off uses them"


@dataclass(slots=True)
class Entry:
    """A sequence of a scheduler. `is_source`: a hand-off reads its blocks, or will, until `release`."""

    seq: Sequence
    state: DecodeState
    is_source: bool = False


@dataclass(slots=True)
class Emission:
    """A token that a step brought. With `finish` set the sequence has ended. `sampled` None: no token, but the part of
    it is computed that another worker goes on from, or the sequence has its `embedding`."""

    seq: Sequence
    index: int
    sampled: SampledToken | None
    finish: FinishReason | None
    prompt_logprobs: list[TokenLogprobs] | None  # with the first token of a sequence that asked for them
    drafted: Drafted | None = None

    @property
    def token(self) -> SampledToken:
        """The sampled token. The first part of a split prompt and an embedding have none: not to be asked for there."""
        assert self.sampled is not None, f"a part of {self.seq.request_id} has no token"
        return self.sampled


class StepInFlight:
    """A step from its plan to its end. `moving`: the sequences for which it copies blocks; `ended`: those of whom no
    more is wanted since, and whose blocks it may use still."""

    def __init__(self, plan: StepPlan, moving: list[Sequence], began_at: float | None) -> None:
        self.plan = plan
        self.moving = moving
        self.began_at = began_at  # None: it was planned ahead of another one
        self.ended: list[Entry] = []

    @property
    def has_drafts(self) -> bool:
        return any(item.drafts for item in self.plan.items)

    def uses(self, seq: Sequence) -> bool:
        return any(item.seq is seq for item in self.plan.items) or any(other is seq for other in self.moving)


class DecodeScheduler:
    """Owns the sequences of one decode worker from reservation to their last token, or, of those whose prompts it
    computes for another one, until that has their KV.

    `allocator` gives them their blocks; `tiers` decides where they rest, and how many there may be at once. None: on
    the device only. A step has at most `token_budget` tokens, and as many of prompts as all who decode can bear by what
    they were promised, going by `cost()`: what nearly all steps stay below, None as long as that is not known.
    `speculation`: who guesses tokens, and counts what comes of it; None: nobody does.

    The caller alternates `plan()` and `finish_step()`, or has the next step planned by `plan_ahead()` before the one in
    flight is finished; everything else may come at any moment in between. Steps are finished in the order of their
    plans. Blocks that a step in flight computes on or copies are never released before it is over.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        tiers: OffloadPolicy | None = None,
        cost: Callable[[], StepCost | None] = lambda: None,
        speculation: Speculation | None = None,
    ) -> None:
        self.allocator = allocator
        most_decodes = min(max_num_seqs, max(token_budget - 1, 1))  # beside all of them a prompt has a token
        self.tiers: OffloadPolicy | NoOffload = tiers or NoOffload(allocator, max_in_flight=most_decodes)
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._cost = cost
        self.speculation = speculation
        self._pacer = self.tiers.pacer
        self._entries: dict[SequenceKey, Entry] = {}
        self._local = LocalPrefill(allocator, self._host_groups_for)
        self._running: list[Sequence] = []  # oldest first: preemption takes from the end
        self._in_flight: deque[StepInFlight] = deque()  # one, or two where the next is planned ahead; they end in order
        self._was_alone = False  # the step planned last was a suspect's
        self._num_ahead = 0  # steps that were, or would have been, planned ahead
        self.num_preemptions = 0
        self.on_preempted: Callable[[Sequence], None] = lambda seq: None
        self.num_host_landings = 0

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._entries

    @property
    def num_running(self) -> int:
        return len(self._entries) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        return self._local.num_waiting

    @property
    def oldest_wait_s(self) -> float:
        """See `LocalPrefill`."""
        return self._local.oldest_wait_s

    @property
    def num_paused(self) -> int:
        """The number of running sequences that rest in host memory at least in part and take turns."""
        return sum(bool(seq.host_groups) for seq in self._running)

    @property
    def num_in_host(self) -> int:
        """The number of sequences with blocks that rest in host memory at least in part."""
        return sum(bool(entry.seq.host_groups) for entry in self._entries.values())

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens of all sequences that decode."""
        return sum(seq.num_tokens for seq in self._running)

    @property
    def num_uncomputed(self) -> int:
        """Sequences to be computed here, with blocks or without."""
        return self._local.num_uncomputed

    @property
    def num_uncomputed_tokens(self) -> int:
        return self._local.num_uncomputed_tokens

    def sequence(self, key: SequenceKey) -> Sequence | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.seq

    def state(self, key: SequenceKey) -> DecodeState | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.state

    def adapter_users(self) -> Iterator[tuple[Sequence, Need]]:
        """All that are to be computed, and how much each needs its adapter."""
        needs = {
            DecodeState.RESERVED: Need.LATER,
            DecodeState.WAITING: Need.SOON,
            DecodeState.PREFILLING: Need.NOW,
            DecodeState.RUNNING: Need.NOW,
        }
        has_places = self.num_running < self.tiers.max_in_flight
        may_begin = {seq.key for seq in self._local.may_begin()} if has_places else set[SequenceKey]()
        for entry in self._entries.values():
            if (need := needs.get(entry.state)) is not None:
                yield entry.seq, Need.NOW if entry.seq.key in may_begin else need

    def can_reserve(self, num_tokens: int) -> bool:
        """Whether a hand-over of `num_tokens` tokens fits now, with room for its first decode step.

        Sequences that wait here for blocks come first, or newcomers would starve them: while there are any, the device
        must have room for all of these, too. Those that lack their adapter keep neither room nor a place, but for the
        first one of an adapter that has waited for long: it would have to wait for these again.
        """
        if len(self._entries) - self._local.num_keeping_no_place >= self.tiers.max_in_flight:
            return False
        waited_for = self._local.num_waiting_tokens
        if waited_for:  # beside whoever runs, each with a column more: this one will, and so will those that are coming
            coming = (DecodeState.RESERVED, DecodeState.PREFILLING)
            num_coming = 1 + sum(entry.state in coming for entry in self._entries.values())
            waited_for += num_coming * self.allocator.block_size
        host_groups = self._host_groups_for(num_tokens + 1 + waited_for)
        return host_groups is not None and not (waited_for and host_groups)

    def make_way(self, num_tokens: int) -> bool:
        """Ask where `can_reserve` says no, for one that lacks nothing but room: whether it has that now. Where nobody
        that has blocks can be computed, as all lack their adapters, and one has been read for a turn, they give theirs,
        the youngest first: an adapter may be away for as long as a server of files does not answer."""
        return self._make_way(num_tokens + 1, lambda: self.can_reserve(num_tokens))

    def reserve(self, seq: Sequence) -> None:
        """Lease blocks for all tokens of `seq` and its next one. Ask `can_reserve` first."""
        host_groups = self._host_groups_for(seq.num_tokens + 1)
        assert host_groups is not None, "reserve() without can_reserve()"
        self.allocator.open(seq, use_cache=False, host_groups=host_groups)
        grown = self.allocator.grow(seq, seq.num_tokens + 1)
        assert grown, "reserve() without can_reserve()"
        self.num_host_landings += bool(host_groups)
        self._entries[seq.key] = Entry(seq, DecodeState.RESERVED)

    def renew(self, key: SequenceKey, seq: Sequence) -> bool:
        """A newer attempt takes over the reservation with its blocks. False if it needs more than there are, or rests
        in host memory and has become too long to be computed from there."""
        entry = self._entries[key]
        assert entry.state is DecodeState.RESERVED, f"cannot renew a sequence that is {entry.state.name}"
        num_columns = self.allocator.num_columns_for(seq.num_tokens + 1)
        if entry.seq.host_groups and num_columns > self.tiers.staging_columns:
            return False
        if not self.allocator.grow(entry.seq, seq.num_tokens + 1):
            return False
        self.allocator.reassign(entry.seq, seq)
        del self._entries[key]
        self._entries[seq.key] = Entry(seq, DecodeState.RESERVED)
        return True

    def admit(self, key: SequenceKey, first_token: int | None, now: float | None = None) -> None:
        """The reserved sequence's KV is here and verified: decode from `first_token` on. None: that of its
        `num_received` tokens is, and the others are to be computed here.

        `now`: on the clock of `plan`; its next token is due from then on. None: from the next plan on.
        """
        entry = self._entries[key]
        assert entry.state is DecodeState.RESERVED, f"cannot admit a sequence that is {entry.state.name}"
        seq = entry.seq
        seq.num_computed = seq.num_tokens if first_token is not None else seq.num_received
        self.allocator.publish(seq)
        if first_token is None:
            entry.state = DecodeState.PREFILLING
            self._local.go_on(seq)
            return
        seq.output_token_ids.append(first_token)
        entry.state = DecodeState.RUNNING
        self._running.append(seq)
        if now is not None:
            self._pacer.follow([seq], now)

    def add(self, seq: Sequence, *, hands_over: bool = False) -> None:
        """A sequence to compute here: entirely, or, where it `hands_over`, its prompt for another decode worker. The
        blocks of such a one are held until `release`, however it ends."""
        assert seq.key not in self._entries, f"request {seq.request_id} is here already"
        self._entries[seq.key] = Entry(seq, DecodeState.WAITING, hands_over)
        self._local.add(seq)

    def abandon_step(self) -> None:
        """The step in flight, of two the older one, failed: nothing of it counts."""
        self._release_ended(self._end_step(ok=False))

    def drop(self, key: SequenceKey) -> None:
        """Forget a sequence and free its blocks, at once or when nothing uses them any more. Unknown ids are fine."""
        entry = self._entries.get(key)
        if entry is not None and entry.state is not DecodeState.ENDED:
            self._end(entry)

    def release(self, key: SequenceKey) -> None:
        """No hand-off reads the sequence's blocks any more; it is dropped. Unknown ids are fine."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.is_source = False
        if entry.state is not DecodeState.ENDED:
            self._end(entry)
        elif not self._is_in_use(entry):
            self._release(entry.seq)

    def plan(self, now: float = 0.0) -> StepPlan:
        """The next step: running sequences' next tokens, then chunks of what must be computed here, then moves.

        `now`: seconds on any clock that does not go back; it matters to those that were promised a time, and with
        `tiers`.
        """
        assert not self._in_flight, "a step is in flight: finish it, or plan ahead of its results"
        self._pacer.follow(self._running, now)
        if not self._was_alone and (plan := self._plan_alone(now)):
            return plan
        plan = self._plan([seq for seq in self._running if not seq.num_alone and seq.has_adapter], now)
        plan = (self._plan_alone(now) or plan) if plan.is_empty else plan
        return self._plan([], now) if plan.is_empty and self._make_way_for_prompt() else plan

    def plan_ahead(self, now: float = 0.0) -> StepPlan:
        """The step after the one in flight, planned as if that one ended well and brought nobody's end but those that
        lengths foretell. `StepLoop` asks for it where steps overlap.

        It computes nothing twice: a sequence's next token has a place in it before its value is known. Empty where the
        next step has to wait: where blocks have to move or be taken from someone, or where there is nothing to do.
        """
        assert len(self._in_flight) == 1, "a step is planned ahead of one that is in flight"
        if self._in_flight[0].began_at is None:
            self._in_flight[0].began_at = now  # the one before it has just ended
        self._pacer.follow(self._running, now)
        running = [seq for seq in self._running if not self._is_last_in_flight(seq) and seq.has_adapter]
        waits = (
            bool(self._suspects())
            or any(step.moving or step.has_drafts for step in self._in_flight)
            or self._is_due_to_draft(running)
            or self._local.needs_host_memory
            or not self.tiers.all_stay_on_device(running)
        )
        return StepPlan(()) if waits else self._plan(running, now)

    def _is_due_to_draft(self, running: list[Sequence]) -> bool:
        """Whether the step after the one in flight should know its tokens, to guess what follows them."""
        if self.speculation is None or not running:
            return False
        if self.speculation.is_resting:  # else one step's rest would be that of all that are planned ahead behind it
            return True
        self._num_ahead += 1
        return self._num_ahead % _STEPS_AHEAD == 0

    def stuck(self) -> list[Sequence]:
        """Prompts for others that wait for blocks, where all blocks are kept for prompts that others compute: they
        might wait for each other. Asked where there is no step to make."""
        if any(entry.state not in (DecodeState.WAITING, DecodeState.RESERVED) for entry in self._entries.values()):
            return []
        waiting = (e.seq for e in self._entries.values() if e.is_source and e.state is DecodeState.WAITING)
        return [seq for seq in waiting if seq.has_adapter]

    def suspect(self, plan: StepPlan, whom: SequenceKey | None) -> list[Sequence]:
        """A step failed, and one of its sequences may be the reason, or is known to be: that one, or else each,
        computes alone until it has a token more.

        Returns those that cannot go on here: the step was to bring the prefix of what is to be handed over.
        """
        items = [item for item in plan.items if whom is None or item.seq.key == whom]
        for item in items:
            item.seq.num_alone = max(item.seq.num_alone, 1)
        if self.speculation is not None:
            self.speculation.failed(items)
        return [e.seq for e in self._entries.values() if e.is_source and e.state is DecodeState.ENDED]

    def _suspects(self) -> list[Sequence]:
        """Sequences that have blocks here and compute alone, since a step of theirs failed."""
        return [seq for seq in self._running if seq.num_alone and seq.has_adapter] + self._local.suspects

    def _plan_alone(self, now: float) -> StepPlan | None:
        """A step of the first suspect that can have one. Every other step is the others', who are not to wait long."""
        self._was_alone = False
        for seq in self._suspects():
            if seq in self._running:
                selection = self._select([seq], now)
                items = [ScheduledSequence(ready, 1) for ready in selection.ready]
            else:
                selection = StepSelection(ring_left=self.tiers.staging_columns)
                others = [other for other in self._running if not other.num_alone]
                room = self._room(self._running, others, self._token_budget, now)  # they are to decode right after it
                items = self._local.chunk_alone(seq, room, selection.ring_left)
                if items:
                    self._pacer.note_prefill(wanted=self._local.oldest is not None, computed=False)
            plan = StepPlan(tuple(items), tuple(selection.copies))
            if not plan.is_empty:
                self._begin_step(plan, selection.moving, now)
                self._was_alone = True
                return plan
        return None

    def _plan(self, running: list[Sequence], now: float) -> StepPlan:
        self._was_alone = False
        selection = self._select(running, now)
        # Of the oldest: later prompts on the device could go on for ever while it waits for the ring.
        oldest = self._local.oldest
        is_wanted = oldest is not None or bool(self._local.suspects)
        most_tokens = self._token_budget - len(selection.ready)
        room = None if oldest is None else self._room(running, selection.ready, most_tokens, now)
        drafts = self._drafts(selection, now, room)
        if room is not None and drafts:
            room = self._room(running, selection.ready, most_tokens, now, drafts)
        prompts = [] if room is None else self._prompts(selection, room)
        items = [ScheduledSequence(seq, 1, drafts.get(seq, ())) for seq in selection.ready] + prompts
        self._pacer.note_prefill(wanted=is_wanted, computed=any(item.seq is oldest for item in items))
        drawing_s = 0.0 if self.speculation is None or not drafts else self.speculation.drawing_s
        plan = StepPlan(tuple(items), tuple(selection.copies), drawing_s)
        if not plan.is_empty:
            self._begin_step(plan, selection.moving, None if self._in_flight else now)
        return plan

    def _drafts(
        self, selection: StepSelection, now: float, room: StepRoom | None
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """Guesses of what follows the selected sequences' next tokens, as many as promised gaps bear; where prompts
        will have some of `room`, in half of it at most, of the tokens and of the time, and only for those that were
        promised a TPOT. None where the sequences' newest tokens are not known yet."""
        if self.speculation is None or self._in_flight or not selection.ready:
            return _NO_DRAFTS
        if self.speculation.skips(selection.ready):
            return _NO_DRAFTS
        work = StepWork(decodes=len(selection.ready), context_tokens=sum(seq.num_tokens for seq in selection.ready))
        # A column more for everyone, and another one.
        may_grow = self.allocator.pool.num_available >= 2 * len(self._running) * self.allocator.layer_groups
        most = self._token_budget - len(selection.ready)
        longest_s = min((KEPT * seq.gap_s for seq in self._running if seq.gap_s is not None), default=math.inf)
        beside_prompts = room is not None and room.is_open and self._local.oldest_may_begin
        candidates = []
        for seq in selection.ready:
            # Several tokens lengthen the steps of a promised mean, and prompts have what that brings. Nobody else's
            # become longer: prompts would only have less of them, and a draft costs less where there are none.
            may_have_drafts = seq.tpot_s is not None or not beside_prompts
            num_drafts = self._room_for_drafts(seq, may_grow) if may_have_drafts else 0
            candidates.append(Candidate(seq, num_drafts, self._pacer.is_late(seq, now)))
        if room is not None and beside_prompts:
            most, longest_s = most // 2, min(longest_s, room.half_s)
        drafts = self.speculation.plan(candidates, work, most=most, longest_s=longest_s, beside_prompts=beside_prompts)
        for seq, token_ids in drafts.items():
            grown = self.allocator.grow(seq, seq.num_tokens + len(token_ids))
            assert grown, "drafts were planned for which there is no room"
        return drafts

    def _room_for_drafts(self, seq: Sequence, may_grow: bool) -> int:
        """Positions after its newest token's: of the columns that it has, of which the ring is planned for those that
        have tokens, and of one more. Its last token needs none to follow."""
        assert seq.block_table is not None
        columns = seq.block_table.num_columns + may_grow
        if seq.host_groups or self.allocator.is_moving(seq):
            columns = self.allocator.num_columns_for(seq.num_tokens)
        return min(
            columns * self.allocator.block_size - seq.num_tokens,
            seq.params.max_tokens - seq.num_output_tokens - 1,
            self._max_model_len - seq.num_tokens - 1,
        )

    def _prompts(self, selection: StepSelection, room: StepRoom) -> list[ScheduledSequence]:
        """Chunks beside the selected decodes and their drafts."""
        chunks = self._local.fill(room, selection.ring_left, self.tiers.max_in_flight - self.num_running)
        for seq, copies in chunks.started:
            self._entries[seq.key].state = DecodeState.PREFILLING
            self.num_host_landings += bool(seq.host_groups)
            if copies:
                selection.move(seq, copies)
        return chunks.items

    def _room(
        self,
        running: list[Sequence],
        decoding: list[Sequence],
        most_tokens: int,
        now: float,
        drafts: Mapping[Sequence, tuple[int, ...]] = _NO_DRAFTS,
    ) -> StepRoom:
        """The room that prompts have in the next step, in which `decoding` advance by a token, with these drafts after
        it. It stays so short that every sequence in `running` has its next token in time. Where no other step is to be
        made, prompts get theirs, however soon others come: nobody would count how long they wait."""
        cost = self._cost()
        most_tokens -= sum(map(len, drafts.values()))
        if cost is None:
            return StepRoom(None, most_tokens=most_tokens)
        beside = StepWork(decodes=len(decoding), context_tokens=sum(seq.num_tokens_ahead for seq in decoding))
        decodes_s = cost.step_s(beside)
        begins_at = now
        for step in self._in_flight:
            ends_at = (now if step.began_at is None else step.began_at) + cost.step_s(StepWork.of_plan(step.plan))
            begins_at = max(begins_at, ends_at)
        longest_s = self._pacer.longest_step_s(running, begins_at, decodes_s, cost.margin)
        allowed_s = min(longest_s, longest_before_s(self._coming, decodes_s))
        is_due = self._pacer.prefill_is_overdue or not (running or self._in_flight)
        for seq, token_ids in drafts.items():
            beside = beside.plus_prefill(len(token_ids), seq.num_tokens)
        if self.speculation is not None and drafts:
            allowed_s -= self.speculation.drawing_s
        return StepRoom(
            cost,
            most_tokens=most_tokens,
            beside=beside,
            allowed_s=max(allowed_s, 2 * decodes_s + cost.prefill_base_s) if is_due else allowed_s,
            is_due=is_due,
        )

    @property
    def _coming(self) -> Iterator[Sequence]:
        """The sequences whose whole KV is on its way, and those whose last chunk is in flight: they decode in none of
        the steps that are planned by now."""
        for entry in self._entries.values():
            is_last_in_flight = entry.state is DecodeState.PREFILLING and entry.seq.num_awaited
            is_awaited = entry.state is DecodeState.RESERVED and not entry.seq.num_received
            if is_awaited or is_last_in_flight:
                yield entry.seq

    def finish_step(self, plan: StepPlan, output: StepOutput) -> list[Emission]:
        """Take a step's results in; finished sequences leave, and their blocks are free when no step uses them."""
        if plan.is_empty:
            return []
        emissions = []
        step = self._end_step(ok=True)
        assert step.plan is plan, "steps are finished in the order in which they were planned"
        for index, part in output.pooled.items():
            plan.items[index].seq.pool(plan.items[index].start, part)
        for index, (item, sampled, logprobs) in enumerate(
            zip(plan.items, output.sampled, output.prompt_logprobs, strict=True)
        ):
            entry = self._entries[item.seq.key]
            if entry.state is DecodeState.ENDED:
                continue
            item.seq.num_computed += item.num_tokens
            self.allocator.publish(item.seq)
            if logprobs and item.seq.wants_prompt_logprobs:
                item.seq.prompt_logprobs += logprobs
            if item.drafts:
                assert sampled is not None, f"nothing was sampled of {item.seq.request_id}, which has drafts"
                emissions += self._emit_all(entry, len(item.drafts), [sampled, *output.following.get(index, ())])
            elif sampled is not None:
                emissions.append(self._emit(entry, sampled))
            elif item.seq.is_part and item.seq.num_uncomputed == 0:
                self._local.remove(item.seq)
                entry.state = DecodeState.HANDING_OVER
                emissions.append(Emission(item.seq, 0, None, None, None))
            elif item.seq.pooling is not None and item.seq.num_uncomputed == 0:
                self._end(entry)
                emissions.append(Emission(item.seq, 0, None, "stop", None))
        if self.speculation is not None:
            self.speculation.computed(plan, output)
        self._release_ended(step)
        return emissions

    def _emit_all(self, entry: Entry, num_drafts: int, sampled: list[SampledToken]) -> list[Emission]:
        """What a step with drafts brought: up to the token that ends the sequence, if one does. The KV of each draft
        that was right stands; that of the others is written again."""
        seq = entry.seq
        assert self.speculation is not None, f"{seq.request_id} has drafts, and nobody made them"
        drafter = self.speculation.verified(seq, num_drafts, len(sampled) - 1)
        emissions: list[Emission] = []
        for token in sampled:
            if emissions:
                seq.num_computed += 1
                self.allocator.publish(seq)
            emissions.append(self._emit(entry, token))
            if emissions[-1].finish is not None:
                break
        num_accepted = min(len(emissions), len(sampled) - 1)  # a right draft may be the sequence's last token
        emissions[-1].drafted = Drafted(drafter, num_accepted, num_drafts - num_accepted)
        return emissions

    def _begin_step(self, plan: StepPlan, moving: list[Sequence], began_at: float | None) -> None:
        self._in_flight.append(StepInFlight(plan, moving, began_at))
        for item in plan.items:
            item.seq.num_computing += item.num_tokens
            item.seq.num_awaited += item.samples

    def _end_step(self, *, ok: bool) -> StepInFlight:
        """End the oldest step in flight. Its tokens are in flight no more. With `ok` false, the prefixes that it was to
        copy did not arrive."""
        step = self._in_flight.popleft()
        for item in step.plan.items:
            item.seq.num_computing -= item.num_tokens
            item.seq.num_awaited -= item.samples
        for seq in step.moving:
            entry = self._entries[seq.key]
            if entry.is_source and not ok:  # something of it may be on its way: the blocks stay as they are
                if entry.state is not DecodeState.ENDED:
                    self._end(entry)
            elif not self.allocator.complete_move(seq, ok) and entry.state is not DecodeState.ENDED:
                self._put_back(seq)  # its prefix did not come, and its blocks are gone
        return step

    def _release_ended(self, step: StepInFlight) -> None:
        """Release the sequences that have ended and were kept for this step alone."""
        for entry in step.ended:
            if not self._is_in_use(entry):
                self._release(entry.seq)

    def _is_in_use(self, entry: Entry) -> bool:
        """Whether a step uses what this sequence holds, or a hand-off."""
        return entry.is_source or any(step.uses(entry.seq) for step in self._in_flight)

    def _is_last_in_flight(self, seq: Sequence) -> bool:
        """Whether the last token that the sequence may have is on its way."""
        num_output = len(seq.output_token_ids) + seq.num_awaited
        return num_output >= seq.params.max_tokens or seq.num_tokens_ahead >= self._max_model_len

    def _emit(self, entry: Entry, sampled: SampledToken) -> Emission:
        """The sequence has this token from now on, and with `finish` set no more."""
        seq = entry.seq
        prompt_logprobs = seq.prompt_logprobs or None
        if prompt_logprobs:
            seq.prompt_logprobs = []
        if entry.state is DecodeState.PREFILLING:
            self._local.remove(seq)
            if entry.is_source:
                entry.state = DecodeState.HANDING_OVER
            else:
                entry.state = DecodeState.RUNNING
                self._running.append(seq)
        if seq.num_alone:
            seq.num_alone -= 1
        seq.output_token_ids.append(sampled.token_id)
        finish = finish_reason(seq, self._eos_token_ids, None if entry.is_source else self._max_model_len)
        if finish is not None:
            self._end(entry)
        return Emission(seq, len(seq.output_token_ids) - 1, sampled, finish, prompt_logprobs)

    def _host_groups_for(self, num_tokens: int) -> frozenset[int] | None:
        """The layer groups that a newcomer keeps in host memory; None: no tier has room for it now."""
        return self.tiers.host_groups_for(num_tokens, self._running)

    def _select(self, running: list[Sequence], now: float) -> StepSelection:
        """Choose who decodes in the next step; whoever is preempted for it is taken out of `running`. Who lacks its
        adapter may lack it for as long as another one's streams last, and keeps no block that one of these needs."""
        idle = [seq for seq in self._running if not seq.has_adapter]
        limit = min(self._max_num_seqs, self._token_budget)
        reserved_columns = self._columns_for_overdue_prompt()
        if reserved_columns:
            limit = min(limit, self._token_budget - 1)  # one token at least is that prompt's
        ring_columns = self.tiers.staging_columns - reserved_columns

        def preempt(seq: Sequence) -> None:
            self._preempt(seq)
            (running if seq in running else idle).remove(seq)

        selection = self.tiers.select(running, now, limit=limit, ring_columns=ring_columns, preempt=preempt, idle=idle)
        selection.ring_left += reserved_columns  # which that prompt takes now
        return selection

    def _make_way_for_prompt(self) -> bool:
        oldest = self._local.oldest
        if oldest is None or self._local.oldest_may_begin:
            return False
        return self._make_way(oldest.num_tokens, lambda: self._local.oldest_may_begin)

    def _make_way(self, num_tokens: int, fits: Callable[[], bool]) -> bool:
        has_blocks = (DecodeState.RESERVED, DecodeState.PREFILLING, DecodeState.RUNNING)
        others = [entry for entry in self._entries.values() if entry.state is not DecodeState.WAITING]
        if self._in_flight or any(entry.state not in has_blocks or entry.seq.has_adapter for entry in others):
            return False
        idle = [seq for seq in self._running if seq.adapter is not None and seq.adapter.is_stalled]
        device_blocks = {seq: self.allocator.num_device_blocks(seq) for seq in reversed(idle)}
        num_blocks = self.allocator.pool.num_available + sum(device_blocks.values())
        if self.allocator.num_blocks_for(num_tokens) > num_blocks:
            return False
        for seq, num_freed in device_blocks.items():
            if num_freed and not fits():
                self._preempt(seq)
        return fits()

    def _columns_for_overdue_prompt(self) -> int:
        """Columns of the staging ring that a prompt gets before all who decode, as it has waited too long."""
        return min(self._local.staged_columns, self.tiers.staging_columns) if self._pacer.prefill_is_overdue else 0

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks back; the tokens stay, and their KV will be computed again (from a prefix hit, if any)."""
        self.num_preemptions += 1
        self.on_preempted(seq)
        self._running.remove(seq)
        self.allocator.release(seq)
        self._put_back(seq)

    def _put_back(self, seq: Sequence) -> None:
        self._entries[seq.key].state = DecodeState.WAITING
        self._local.put_back(seq)

    def _end(self, entry: Entry) -> None:
        """Take a sequence out of everything; its blocks are free as soon as no step in flight uses them."""
        seq = entry.seq
        self._pacer.forget(seq.key)
        if entry.state in (DecodeState.WAITING, DecodeState.PREFILLING):
            self._local.remove(seq)
        if entry.state is DecodeState.RUNNING:
            self._running.remove(seq)
        if self.speculation is not None and seq.output_token_ids:  # preempted ones too
            self.speculation.ended(seq)
        entry.state = DecodeState.ENDED
        if not self._is_in_use(entry):
            self._release(seq)
        for step in self._in_flight:
            if step.uses(seq):
                step.ended.append(entry)

    def _release(self, seq: Sequence) -> None:
        del self._entries[seq.key]
        if seq.lease is not None:
            self.allocator.release(seq)
