"""Bind: everything that was placed and has not ended, booked at once, corrected by what workers and gateways tell.

The fourth stage of a decision (see the package), and the state that the others read. All that the `WorkerTable` says
of requests is written here. Each placed request is a `Booking`, one entry in the queue of the worker that computes its
prompt until its first token, and one slot of the worker that decodes it until its end. Which request goes where is not
decided here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.scheduler.placement.coming_prefixes import ComingPrefixes, num_common
from cluster.scheduler.placement.estimates import OutputLengths, Overhead, PromptDemand
from cluster.scheduler.placement.worker_table import RESIDUAL_STEP, Fact, Slot, WorkerTable
from engine.cost_model.step_cost import ASSUMED_PREFILL_TOKENS_PER_S, KEPT, StepCost, margin_of
from engine.kv.prefix import HASH_BYTES
from kv_transfer.messages.scheduling import NO_TARGET, Place
from kv_transfer.messages.workers import KnownWorker, WorkerInfo, WorkerSnapshot
from kv_transfer.worker.cost_report import reported_cost

REPLACED_S: Final = (
    600.0  # after this a worker that left has been replaced, or will not be: large models load for minutes
)
# A process to take the place of one that left, until it begins to load: Serve sees to it within 2 to 4 s, and Python
# reads its libraries.
START_S: Final = 8.0
# Of a worker that loads its model: it tells of it twice a second, and is forgotten where it has not for so long;
HEARD_S: Final = 5.0
# and it is expected so soon where it takes longer than others did, or nobody knows how long these took.
SOON_S: Final = 2.0
# Of a worker that reports none. What a sequence adds to a step, and a token of its context, is wrong by as much as you
# like, but with nothing at all, workers would look the same however many decode there.
_ASSUMED_COST: Final = StepCost(
    base_s=0.02,
    prefill_token_s=1.0 / ASSUMED_PREFILL_TOKENS_PER_S,
    prefill_pair_s=0.0,
    decode_s=4e-4,
    context_token_s=2e-7,
    relative_error=0.5,
)


@dataclass(slots=True)
class Booking:
    """`slot`: of `decode`; what is pooled has none, and `decode` is who computes it. `computing`: the worker of the
    prompt; `prefill_s`: predicted, for `uncached_tokens`; `computed_at`: its end.
    Where the request is split, so much of it only, and `rest_s` for the `rest_tokens` which `decode` computes then.
    Of the other tokens, `coming_tokens` are not there yet: prompts before it in the queue bring them. `brings`: hashes
    of the columns that it leaves to those behind it."""

    query: Place
    computing: str
    decode: str
    uncached_tokens: float
    prefill_s: float
    placed_at: float
    slot: int
    computed_at: float
    rest_tokens: float = 0.0
    rest_s: float = 0.0
    coming_tokens: float = 0.0
    brings: bytes = b""
    is_first: bool = False  # nobody was ahead of it there, and it had not to wait for room
    reported: bool = False  # the computing worker's snapshots include it by now

    @property
    def cached_tokens(self) -> float:
        """Of its prompt, or its first part, those that need not be computed."""
        return self.query.num_tokens - self.rest_tokens - self.uncached_tokens

    def find(self, brought: bytes, block_size: int) -> None:
        """The columns with these hashes are there by now."""
        if self.coming_tokens:
            there = block_size * num_common(brought, self.query.prefix_hashes)
            self.coming_tokens = min(self.coming_tokens, max(0.0, self.cached_tokens - there))

    def counts_on(self, brought: bytes, block_size: int) -> bool:
        """Whether columns with these hashes, were they to come, are among those that it lacks."""
        if not self.coming_tokens:
            return False
        there = self.cached_tokens - self.coming_tokens
        return block_size * num_common(brought, self.query.prefix_hashes) > there

    def fall_back(self, block_size: int, ahead: Iterable[bytes], cost: StepCost, chunk_tokens: float) -> None:
        """Count on no more than what is there and what those `ahead` bring, each by the hashes of its columns."""
        cached = self.cached_tokens
        lacks = self.coming_tokens
        for brings in ahead:
            lacks = min(lacks, max(0.0, cached - block_size * num_common(brings, self.query.prefix_hashes)))
            if not lacks:
                return
        before_s = cost.prefill_s(self.uncached_tokens, cached, chunk_tokens)
        self.uncached_tokens += lacks
        self.coming_tokens -= lacks
        after_s = cost.prefill_s(self.uncached_tokens, cached - lacks, chunk_tokens)
        self.prefill_s *= after_s / before_s if before_s else 1.0  # a worker may report that nothing costs anything


@dataclass(slots=True)
class BookedWorker:
    """One worker, as the ledger keeps it."""

    info: WorkerInfo
    snapshot: WorkerSnapshot
    heard_at: float
    queue: OrderedDict[str, Booking]  # prompts to be computed here, first come first served
    decoding: list[Booking]  # by slot; also those whose prompts are being computed
    coming: dict[str, Booking]  # of these, those whose rest is to be computed here once the first part is
    busy_since: float  # the queue's first prompt counts as begun then, behind `extra_s` of unknown work
    left: list[tuple[float, bytes]]  # what prompts brought, and when: its reports of blocks may not tell of it yet
    extra_s: float = 0.0
    is_measured: bool = False  # it reported a cost once: better than any assumption, also when it says nothing

    @property
    def num_unknown(self) -> int:
        """Sequences that it reports beyond those booked on it, and those whose prompts it computes for others."""
        held = self.snapshot.num_running + self.snapshot.num_waiting - self.snapshot.num_handing_over
        num_pooled = sum(booking.query.is_pooled for booking in self.queue.values())
        return max(0, held - len(self.decoding) - num_pooled)

    @property
    def used_tokens(self) -> int:
        """The number of tokens that the worker's blocks hold or are kept for."""
        used = self.info.num_blocks - min(self.snapshot.blocks_available, self.info.num_blocks)
        return used // self.info.layer_groups * self.info.block_size

    @property
    def shared(self) -> float:
        """The part of its decoding contexts that takes no memory, since a prefix that several have is held once: at
        least so much, as some of its blocks are of prompts and reservations. Where some of those who decode rest in
        host memory, nothing is known."""
        context = self.snapshot.context_tokens
        if not context or self.snapshot.num_paused:
            return 0.0
        return max(0.0, 1.0 - self.used_tokens / context)

    @property
    def free_tokens(self) -> int:
        """The number of tokens that the worker's other blocks have room for, as it reported."""
        free = min(self.snapshot.blocks_available, self.info.num_blocks)
        return free // self.info.layer_groups * self.info.block_size

    @property
    def queued_tokens(self) -> float:
        """Prompt tokens that are to be computed here: as booked, or as reported where that is more. What a prompt will
        find cached the worker reports until it begins it."""
        bookings = list(self.queue.values())
        cached = sum(booking.cached_tokens for booking in bookings[1:] if booking.reported)
        booked = sum(booking.uncached_tokens for booking in bookings)
        return max(booked, self.snapshot.queued_prefill_tokens - cached)

    def correct_queue(self, cost: StepCost, chunk_tokens: float, now: float) -> None:
        """The worker says how much is left: what is missing of the bookings is done, what is too much is unknown.

        It counts a step's tokens when the step is over, and those it will find cached until it begins the prompt. So
        this bounds what is done, and between the bounds the clock decides.
        """
        bookings = list(self.queue.values())
        queued_tokens = self.snapshot.queued_prefill_tokens
        began_at = self.busy_since + self.extra_s
        cached = sum(b.query.num_tokens - b.uncached_tokens for b in bookings[1:])
        left = sum(b.uncached_tokens for b in bookings) - queued_tokens
        excess = max(0.0, -left - cached)
        least = sum(b.uncached_tokens for b in bookings if b.reported) - queued_tokens
        most = left + cached + chunk_tokens
        self.extra_s = cost.prefill_s(excess) if excess else 0.0
        elapsed_s = max(_seconds_of(bookings, least), min(_seconds_of(bookings, most), now - began_at))
        self.busy_since = now - (_seconds_of(bookings, least) if excess else elapsed_s)


class Ledger:
    """What the scheduler believes to be placed where, in numbers (`table`) and by request and worker.

    `lengths`, `overhead` and `demand` are learned here, from what ends and what comes. `coming`, to read: the prefixes
    that prompts in workers' queues bring. `joins_at`: when a worker is expected that is on its way here; inf: none is.
    `now` never goes back."""

    def __init__(self) -> None:
        self.table = WorkerTable()
        self.coming = ComingPrefixes()
        self.lengths = OutputLengths()
        self.overhead = Overhead()
        self.demand = PromptDemand()
        self._workers: dict[str, BookedWorker] = {}
        self._bookings: dict[str, Booking] = {}
        self.joins_at = math.inf
        self._gone: dict[int, float] = {}  # by decode workers' `max_model_len`: when the last one left
        self._replaced_at = math.inf  # when the first decode worker that left should have been replaced
        self._loading: dict[str, tuple[float, float]] = {}  # decode workers: since when, and when it was told last
        self._load_s = 0.0  # that the newest decode worker took; 0: nobody told

    # --- workers ---

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        """Begin a worker's new life. What was booked on an earlier one is void."""
        self.unregister(info.worker_id, now, may_be_replaced=False)  # it is here itself
        self.joins_at = math.inf
        if info.role == "decode":
            self._replaced_at = math.inf
            self._loading.pop(info.worker_id, None)
            self._load_s = info.load_s or self._load_s
        self._workers[info.worker_id] = BookedWorker(info, snapshot, now, OrderedDict(), [], {}, now, [])
        self.table.add(info, now)
        self._take_in(self._workers[info.worker_id], snapshot, now, None)

    def loading(self, worker_id: str, now: float) -> None:
        """Note that a decode worker is loading this model."""
        self._loading = {name: told for name, told in self._loading.items() if now - told[1] <= HEARD_S}
        since, _ = self._loading.get(worker_id, (now, now))
        self._loading[worker_id] = since, now

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        """Take a snapshot in, unless a newer one is known. False if the worker is not: it has to register (again)."""
        worker = self._workers.get(snapshot.worker_id)
        if worker is None:
            return False
        if snapshot.sequence_number > worker.snapshot.sequence_number:
            # What was placed before the previous snapshot has reached the worker and counts in this one.
            for booking in worker.queue.values():
                booking.reported = booking.reported or booking.placed_at < worker.heard_at
            # Of what was computed by then it has told what blocks there are, as it does with every report.
            while worker.left and worker.left[0][0] < worker.heard_at:
                self.coming.remove(snapshot.worker_id, worker.left.pop(0)[1])
            # A worker that does not count its context tokens reports none, whatever runs there.
            counts_context = snapshot.context_tokens > 0 or snapshot.num_running == 0
            self._take_in(worker, snapshot, now, snapshot.context_tokens if counts_context else None)
        return True

    def unregister(self, worker_id: str, now: float, *, may_be_replaced: bool = True) -> bool:
        """Forget a worker that is gone, and all that was booked there. Returns False if it was not known.
        `may_be_replaced`: another like it may be on its way."""
        if worker_id not in self._workers:
            return False
        worker = self._workers[worker_id]
        for booking in worker.queue.values():
            booking.coming_tokens = 0.0  # so that nobody looks for what is left when those ahead of it end
        for booking in self.booked_on(worker_id):
            self.ended(booking.query.request_id, now)
        for _, brought in worker.left:
            self.coming.remove(worker_id, brought)
        info = self._workers.pop(worker_id).info
        if info.role == "decode" and may_be_replaced:
            self._gone[info.max_model_len] = now
            if info.load_s:
                earlier_at = self._replaced_at if self._replaced_at > now else math.inf
                self._replaced_at = min(earlier_at, now + START_S + info.load_s)
        self.table.remove(worker_id)
        return True

    def booked_on(self, worker_id: str) -> list[Booking]:
        """The requests that a worker computes, in their order, and those that decode there or will; some of them
        twice."""
        worker = self._workers.get(worker_id)
        return [] if worker is None else [*worker.queue.values(), *worker.decoding]

    def idle_at(self, worker_id: str, now: float) -> float:
        """When all that was placed there will have ended, as predicted; inf where nobody knows, as sequences run there
        that were placed before this scheduler's time."""
        row = self.table.row(worker_id)
        self.table.advance(row, now)
        facts = self.table.facts[:, row]
        if facts[Fact.EXTRA_DECODES] > 0.0:
            return math.inf
        slots = self.table.slots[:, row, : int(facts[Fact.BOOKED])]
        output, most, residuals = slots[Slot.OUTPUT], slots[Slot.MAX_OUTPUT], self.table.residuals
        emitted = np.clip(facts[Fact.STEPS] - slots[Slot.JOINED_STEP], 0.0, most)  # of those yet to join: none
        age = np.minimum(emitted / output / RESIDUAL_STEP, len(residuals) - 1.0).astype(np.intp)
        left = np.minimum(output * residuals[age], most - emitted)
        ends = np.maximum(slots[Slot.FIRST_AT], now) + left * facts[Fact.STEP_S]
        return max(now, float(facts[Fact.DRAINED_AT]), float(ends.max(initial=now)))

    def longest_gone(self, now: float) -> int:
        """The most tokens that a decode worker could hold which left lately, so that another like it may be on its way;
        0: none did."""
        self._gone = {longest: at for longest, at in self._gone.items() if now - at <= REPLACED_S}
        return max(self._gone, default=0)

    def decode_expected_at(self, now: float) -> float:
        """When the next decode worker is expected where none takes requests: one that is on its way here, that loads
        its model, or in the place of one that has left or is about to, once that has loaded. inf: nobody knows."""
        leaving_s = [
            worker.info.load_s
            for worker in self._workers.values()
            if worker.info.role == "decode" and worker.snapshot.stopping and worker.info.load_s
        ]
        loaded_at = [
            max(since + self._load_s, now + SOON_S)
            for since, told_at in self._loading.values()
            if now - told_at <= HEARD_S
        ]
        moments = (self.joins_at, self._replaced_at, now + START_S + min(leaving_s, default=math.inf), *loaded_at)
        return min((at for at in moments if at > now), default=math.inf)

    def or_joined(self, at: float, now: float) -> float:
        """`at`, or when a worker joins that is on its way here, if that is sooner."""
        return min(at, self.joins_at) if self.joins_at > now else at

    def silent(self, now: float, stale_after_s: float) -> list[str]:
        """The workers that were not heard of for so long."""
        return [name for name, worker in self._workers.items() if now - worker.heard_at > stale_after_s]

    def workers(self) -> Iterable[KnownWorker]:
        return ((worker.info, worker.snapshot) for worker in self._workers.values())

    def info(self, worker_id: str) -> WorkerInfo:
        return self._workers[worker_id].info

    def queue(self, worker_id: str) -> list[str]:
        """The requests whose prompts it computes, in their order."""
        return list(self._workers[worker_id].queue)

    def queued_tokens(self, worker_id: str) -> float:
        """Prompt tokens that are to be computed there: as booked, or as reported where that is more."""
        return self._workers[worker_id].queued_tokens

    def free_tokens(self, worker_id: str) -> int:
        """See `BookedWorker`. What was placed there since is not in it."""
        return self._workers[worker_id].free_tokens

    # --- requests ---

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._bookings

    def __len__(self) -> int:
        return len(self._bookings)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is placed anywhere, and no worker reports what nobody placed."""
        return not self._bookings and not self.table.facts[Fact.EXTRA_DECODES].any()

    def bookings(self) -> Iterable[Booking]:
        return self._bookings.values()

    def book(
        self,
        query: Place,
        *,
        prefill: str | None,
        decode: str,
        uncached_tokens: float,
        prefill_s: float,
        weight: float,
        now: float,
        rest_tokens: float = 0.0,
        rest_s: float = 0.0,
        coming_tokens: float = 0.0,
    ) -> Booking:
        """Count the request as theirs from now on; an earlier attempt's booking ends. `prefill` None: decode alone.
        `rest_tokens`: of its prompt, those at the end that `decode` computes in `rest_s`; `prefill` the others.
        `coming_tokens`: see `Booking`."""
        booking = self._take_slot(query, prefill or decode, decode, uncached_tokens, prefill_s, weight, now)
        computing, decoding = self._workers[booking.computing], self._workers[decode]
        booking.rest_tokens, booking.rest_s, booking.coming_tokens = rest_tokens, rest_s, coming_tokens
        for _, brought in computing.left:  # of these, what the worker is yet to tell of
            booking.find(brought, computing.info.block_size)
        is_idle = self._join_queue(computing, booking, now)
        booking.is_first = is_idle and computing.extra_s == 0.0 and not rest_tokens
        num_first = query.num_tokens - rest_tokens
        row, decode_row = self.table.row(booking.computing), self.table.row(decode)
        self.table.count_prompt(row, uncached_tokens, num_first - uncached_tokens, now)
        if rest_tokens:
            decoding.coming[query.request_id] = booking
            self.table.count_prompt(decode_row, rest_tokens, num_first, now)
            self._plan_queue(decoding, now)
        self._plan_queue(computing, now)
        for changed in {row, decode_row}:
            self.table.predict_step(changed, now)
        return booking

    def book_computing(self, query: Place, *, prefill: str | None, decode: str, weight: float, now: float) -> Booking:
        """A request that is there already, with its prompt still to be computed. What of it is cached or done by now,
        the worker's reports tell."""
        row = self.table.row(prefill or decode)
        chunk_tokens = float(self.table.facts[Fact.CHUNK_TOKENS, row])
        booking = self.book(
            query,
            prefill=prefill,
            decode=decode,
            uncached_tokens=query.num_tokens,
            prefill_s=self.table.cost(row).prefill_s(query.num_tokens, 0.0, chunk_tokens),
            weight=weight,
            now=now,
        )
        booking.is_first = False  # it began before
        computing = self._workers[booking.computing]
        self._correct_queue(computing, now)
        self._plan_queue(computing, now)
        self._count_as_known(booking, 0)
        self.table.predict_step(self.table.row(decode), now)
        return booking

    def book_decoding(
        self,
        query: Place,
        *,
        prefill: str | None,
        decode: str,
        num_emitted: int,
        first_at: float,
        weight: float,
        now: float,
    ) -> Booking:
        """A request that decodes there already: `num_emitted` tokens since `first_at`."""
        booking = self._take_slot(query, prefill or decode, decode, 0.0, 0.0, weight, now)
        row = self.table.row(decode)
        slots = self.table.slots[:, row, booking.slot]
        slots[Slot.FIRST_AT], slots[Slot.JOINED_STEP] = first_at, self.table.facts[Fact.STEPS, row] - num_emitted
        self._count_as_known(booking, num_emitted)
        self.table.predict_step(row, now)
        return booking

    def part_computed(self, request_id: str, now: float) -> None:
        """Note that the first part of a prompt is computed, and the rest is begun where the request decodes. Unknown
        ids, and a second time, are fine."""
        booking = self._bookings.get(request_id)
        if booking is None or not booking.rest_tokens:
            return
        computing, decoding = self._workers.get(booking.computing), self._workers[booking.decode]
        if computing is not None and request_id in computing.queue:
            self._leave_queue(computing, request_id, now, computed=True)
        del decoding.coming[request_id]
        booking.computing, booking.placed_at, booking.reported = booking.decode, now, False
        booking.uncached_tokens, booking.prefill_s = booking.rest_tokens, booking.rest_s
        booking.rest_tokens = booking.rest_s = booking.coming_tokens = 0.0
        self._join_queue(decoding, booking, now)
        self._plan_queue(decoding, now)

    def first_token(self, request_id: str, now: float) -> None:
        """Note that the prompt is computed and the request decodes from now on. Unknown ids, and a second time, are
        fine."""
        self.part_computed(request_id, now)  # what was told of that, if anything, was lost
        booking = self._bookings.get(request_id)
        if booking is None:
            return
        computing = self._workers.get(booking.computing)
        if computing is not None and request_id in computing.queue:
            if booking.is_first and len(computing.queue) == 1:
                self.overhead.observe(now - booking.placed_at - booking.prefill_s)
            self._leave_queue(computing, request_id, now, computed=True)
            if booking.query.is_pooled:
                return
            row = self.table.row(booking.decode)
            self.table.advance(row, now)
            slots = self.table.slots[:, row, booking.slot]
            slots[Slot.FIRST_AT], slots[Slot.JOINED_STEP] = now, self.table.facts[Fact.STEPS, row]
            self.table.predict_step(row, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int | None = None) -> None:
        """Forget a request that left the cluster, or is placed anew. `num_output_tokens`: what it put out, if it came
        to its end."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        # The prefill worker may be gone since: with the prompt computed, that is no matter.
        computing = self._workers.get(booking.computing)
        if computing is not None and request_id in computing.queue:
            self._leave_queue(computing, request_id, now, computed=False)
        if booking.query.is_pooled:
            return
        decoding = self._workers[booking.decode]
        if decoding.coming.pop(request_id, None) is not None:
            self._plan_queue(decoding, now)
        row = self.table.row(booking.decode)
        self.table.advance(row, now)
        last = self.table.free_slot(row, booking.slot)
        decoding.decoding[last].slot = booking.slot
        decoding.decoding[booking.slot] = decoding.decoding[last]
        decoding.decoding.pop()
        self.table.facts[Fact.BOOKED_CONTEXT, row] -= booking.query.num_tokens
        self.table.predict_step(row, now)
        if num_output_tokens:
            self.lengths.observe(booking.query.tenant, booking.query.slo_class, num_output_tokens)
            self.table.residuals = self.lengths.residuals

    # --- arithmetic ---

    def _take_slot(
        self,
        query: Place,
        computing: str,
        decode: str,
        uncached_tokens: float,
        prefill_s: float,
        weight: float,
        now: float,
    ) -> Booking:
        self.ended(query.request_id, now)
        if query.is_pooled:
            booking = Booking(query, computing, computing, uncached_tokens, prefill_s, now, -1, now)
            self._bookings[query.request_id] = booking
            return booking
        decoding, row = self._workers[decode], self.table.row(decode)
        self.table.advance(row, now)
        slot = self.table.take_slot(row)
        booking = Booking(query, computing, decode, uncached_tokens, prefill_s, now, slot, now)
        self._bookings[query.request_id] = booking
        decoding.decoding.append(booking)
        expected = self.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        most, (tpot_s, gap_s) = max(1, query.max_new_tokens), self._kept_pace(query, row)
        self.table.slots[:, row, slot] = (query.num_tokens, expected, most, now, float("inf"), tpot_s, weight, gap_s)
        self.table.facts[Fact.BOOKED_CONTEXT, row] += query.num_tokens
        return booking

    def _kept_pace(self, query: Place, row: int) -> tuple[float, float]:
        """The targets of TPOT and gap that others there are to heed. One that the worker could not keep with nobody
        else holds nobody up, as it does not there (`decode_workers.pacing`): a mean by what its steps take in the mean,
        a gap by what nearly all of them take."""
        alone_s = float(self.table.alone_s(row, query.num_tokens))
        tpot_s, gap_s = query.tpot_target_s, query.gap_target_s
        num_tokens = float(self.table.facts[Fact.TOKENS_PER_STEP, row])
        longest_s = margin_of(float(self.table.facts[Fact.RELATIVE_ERROR, row])) * alone_s
        return (
            tpot_s if tpot_s * num_tokens >= alone_s else NO_TARGET,
            gap_s if KEPT * gap_s >= longest_s else NO_TARGET,
        )

    def _join_queue(self, computing: BookedWorker, booking: Booking, now: float) -> bool:
        """Put a prompt behind all others. Returns whether there are none."""
        is_idle = not computing.queue
        if is_idle:  # begins now, or when the unknown work is done
            computing.busy_since = max(now - computing.extra_s, min(now, computing.busy_since))
        computing.queue[booking.query.request_id] = booking
        booking.brings = _brought(booking, computing.info)
        self.coming.add(computing.info.worker_id, booking.brings)
        self._count_lent(booking, 1)
        return is_idle

    def _count_lent(self, booking: Booking, sign: int) -> None:
        """Count the memory that a worker keeps for a prompt that it computes for another one. `sign`: 1 or -1."""
        if booking.computing != booking.decode:
            lent = booking.query.num_tokens - booking.rest_tokens
            self.table.facts[Fact.LENT_TOKENS, self.table.row(booking.computing)] += sign * lent

    def _count_as_known(self, booking: Booking, num_emitted: int) -> None:
        """Take a request out of the unknown load, EXTRA_DECODES and EXTRA_CONTEXT: the worker's report includes it, and
        it is booked now."""
        if booking.query.is_pooled:
            return
        facts, row = self.table.facts, self.table.row(booking.decode)
        extra = self._workers[booking.decode].num_unknown
        context = facts[Fact.EXTRA_CONTEXT, row] - booking.query.num_tokens - num_emitted
        facts[Fact.EXTRA_DECODES, row] = min(extra, facts[Fact.EXTRA_DECODES, row])
        facts[Fact.EXTRA_CONTEXT, row] = max(0.0, context) if extra else 0.0

    def _take_in(
        self, worker: BookedWorker, snapshot: WorkerSnapshot, now: float, context_tokens: float | None
    ) -> None:
        row, cost = self.table.row(snapshot.worker_id), reported_cost(worker.info.role, snapshot.step_cost)
        self.table.advance(row, now)
        worker.snapshot, worker.heard_at = snapshot, now
        if cost is not None or not worker.is_measured:
            self.table.set_cost(row, cost or _ASSUMED_COST)
            worker.is_measured = cost is not None
        self.table.facts[Fact.DRAINING, row] = snapshot.draining
        self.table.facts[Fact.SHARED, row] = worker.shared
        self.table.set_adapters(snapshot.worker_id, snapshot.adapters, snapshot.adapter_load_s)
        self.table.set_unreachable(snapshot.worker_id, snapshot.unreachable)
        self.table.set_tokens_per_step(row, snapshot.tokens_per_step / max(1.0, snapshot.drafts_stretch))
        self._correct_queue(worker, now)
        self._correct_decodes(worker, row, context_tokens)
        self._plan_queue(worker, now)
        self.table.predict_step(row, now)

    def _correct_queue(self, worker: BookedWorker, now: float) -> None:
        row = self.table.row(worker.info.worker_id)
        worker.correct_queue(self.table.cost(row), float(self.table.facts[Fact.CHUNK_TOKENS, row]), now)

    def _correct_decodes(self, worker: BookedWorker, row: int, context_tokens: float | None) -> None:
        """Sequences that the worker has beyond those booked on it were placed before this scheduler's time."""
        if worker.info.role != "decode":
            return
        facts, extra = self.table.facts, worker.num_unknown
        context = worker.used_tokens if context_tokens is None else context_tokens
        facts[Fact.EXTRA_DECODES, row] = extra
        facts[Fact.EXTRA_CONTEXT, row] = max(0.0, context - facts[Fact.BOOKED_CONTEXT, row]) if extra else 0.0

    def _leave_queue(self, computing: BookedWorker, request_id: str, now: float, *, computed: bool) -> None:
        was_first = next(iter(computing.queue)) == request_id
        booking = computing.queue.pop(request_id)
        self._count_lent(booking, -1)
        self._count_brought(computing, booking.brings, now, computed=computed)
        if was_first or computed:
            computing.busy_since, computing.extra_s = now, 0.0 if computed else computing.extra_s
        self._plan_queue(computing, now)

    def _count_brought(self, computing: BookedWorker, brought: bytes, now: float, *, computed: bool) -> None:
        """What a prompt that has left the queue brought is there now; or, where it was not `computed`, it is left to
        those behind it, of whom the first computes it for the others."""
        if not brought:
            return
        worker_id, block_size = computing.info.worker_id, computing.info.block_size
        if computed:
            computing.left.append((now, brought))
            for booking in computing.queue.values():
                booking.find(brought, block_size)
            return
        self.coming.remove(worker_id, brought)
        row = self.table.row(worker_id)
        cost, chunk_tokens = self.table.cost(row), float(self.table.facts[Fact.CHUNK_TOKENS, row])
        ahead: list[bytes] = []
        for booking in computing.queue.values():
            if booking.counts_on(brought, block_size):  # the others need not look at all that is ahead
                booking.fall_back(block_size, ahead, cost, chunk_tokens)
            ahead.append(booking.brings)

    def _plan_queue(self, worker: BookedWorker, now: float) -> None:
        """Plan when each prompt will have been computed, one after the other; then what is coming."""
        at = worker.busy_since + worker.extra_s
        for booking in worker.queue.values():
            at = max(at + booking.prefill_s, now)
            booking.computed_at = at
            if not booking.query.is_pooled:
                self.table.slots[Slot.FIRST_AT, self.table.row(booking.decode), booking.slot] = at + booking.rest_s
        row = self.table.row(worker.info.worker_id)
        coming_s = sum(booking.rest_s for booking in worker.coming.values())
        self.table.facts[Fact.DRAINED_AT, row] = max(at, now) + coming_s if coming_s else at


def _brought(booking: Booking, worker: WorkerInfo) -> bytes:
    """The hashes of the columns that a prompt leaves to those behind it: none where the worker keeps nothing, or has
    blocks of another size than those that the prompt's are named by."""
    query = booking.query
    num_named = (query.num_tokens - 1) // worker.block_size
    if query.is_pooled or not worker.keeps_prefixes or len(query.prefix_hashes) != HASH_BYTES * num_named:
        return b""
    num_columns = int(query.num_tokens - booking.rest_tokens) // worker.block_size
    return query.prefix_hashes[: HASH_BYTES * num_columns]


def _seconds_of(bookings: Iterable[Booking], num_tokens: float) -> float:
    """Predicted, for the first so many uncached tokens of these prompts, one after the other."""
    seconds = 0.0
    for booking in bookings:
        if num_tokens <= 0:
            break
        seconds += booking.prefill_s * min(1.0, num_tokens / max(booking.uncached_tokens, 1.0))
        num_tokens -= booking.uncached_tokens
    return seconds
