"""Everything that was placed and has not ended: booked at once, corrected by what workers and gateways tell.

The one writer of the `WorkerTable`. Each placed request is a `Booking` here, one entry in the queue of the worker that
computes its prompt until its first token, and one slot of the worker that decodes it until its end. Knows no policy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from cluster.placement.assumed_cost import assumed_cost
from cluster.placement.booking import Booking, seconds_of
from cluster.placement.demand import PromptDemand
from cluster.placement.output_lengths import OutputLengths
from cluster.placement.overhead import Overhead
from cluster.placement.query import Query
from cluster.placement.worker_table import PROMPTS_OVER_S, Row, Slot, WorkerTable
from engine.step_cost import StepCost, StepWork
from kv_transfer.messages import WorkerInfo, WorkerSnapshot

_MOST_PROMPTS: Final = 0.9  # of its time


@dataclass(slots=True)
class _Worker:
    info: WorkerInfo
    snapshot: WorkerSnapshot
    heard_at: float
    queue: OrderedDict[str, Booking]  # prompts to be computed here, first come first served
    decoding: list[Booking]  # by slot; also those whose prompts are being computed
    busy_since: float  # the queue's first prompt counts as begun then, behind `extra_s` of unknown work
    extra_s: float = 0.0
    is_measured: bool = False  # it reported a cost once: better than any assumption, also when it says nothing


class Ledger:
    def __init__(self) -> None:
        self.table = WorkerTable()
        self.lengths = OutputLengths()
        self.overhead = Overhead()
        self.demand = PromptDemand()
        self._workers: dict[str, _Worker] = {}
        self._bookings: dict[str, Booking] = {}

    # --- workers ---

    def register(
        self,
        info: WorkerInfo,
        snapshot: WorkerSnapshot,
        now: float,
        *,
        cost: StepCost | None = None,
        chunk_tokens: float = float("inf"),
        max_num_seqs: float = float("inf"),
    ) -> None:
        """A worker's new life. What was booked on an earlier one is void."""
        self.lost(info.worker_id, now)
        self._workers[info.worker_id] = _Worker(info, snapshot, now, OrderedDict(), [], now)
        self.table.add(info, chunk_tokens, max_num_seqs, now)
        self._take_in(self._workers[info.worker_id], snapshot, now, cost, None)

    def heartbeat(
        self,
        snapshot: WorkerSnapshot,
        now: float,
        *,
        cost: StepCost | None = None,
        context_tokens: float | None = None,
    ) -> bool:
        """Take a snapshot in, unless a newer one is known. False if the worker is not: it has to register (again)."""
        worker = self._workers.get(snapshot.worker_id)
        if worker is None:
            return False
        if snapshot.sequence_number > worker.snapshot.sequence_number:
            # What was placed before the previous snapshot has reached the worker and counts in this one.
            for booking in worker.queue.values():
                booking.reported = booking.reported or booking.placed_at < worker.heard_at
            self._take_in(worker, snapshot, now, cost, context_tokens)
        return True

    def lost(self, worker_id: str, now: float) -> bool:
        """The worker is gone, and with it all that was booked there. False if it was not known."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return False
        for booking in [*worker.queue.values(), *worker.decoding]:
            self.ended(booking.query.request_id, now)
        del self._workers[worker_id]
        self.table.remove(worker_id)
        return True

    def silent(self, now: float, stale_after_s: float) -> list[str]:
        """The workers that were not heard of for so long."""
        return [name for name, worker in self._workers.items() if now - worker.heard_at > stale_after_s]

    def workers(self) -> Iterable[tuple[WorkerInfo, WorkerSnapshot]]:
        return ((worker.info, worker.snapshot) for worker in self._workers.values())

    def info(self, worker_id: str) -> WorkerInfo:
        return self._workers[worker_id].info

    def queued_tokens(self, worker_id: str, *, before: str) -> float:
        """Prompt tokens to be computed there before that request's: as booked, or as reported where that is more."""
        worker = self._workers[worker_id]
        ahead = takewhile(lambda booking: booking.query.request_id != before, worker.queue.values())
        return max(sum(booking.uncached_tokens for booking in ahead), worker.snapshot.queued_prefill_tokens)

    # --- requests ---

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._bookings

    def __len__(self) -> int:
        return len(self._bookings)

    def bookings(self) -> Iterable[Booking]:
        return self._bookings.values()

    def book(
        self,
        query: Query,
        *,
        prefill: str | None,
        decode: str,
        uncached_tokens: float,
        prefill_s: float,
        weight: float,
        now: float,
    ) -> Booking:
        """Count the request as theirs from now on; an earlier attempt's booking ends. `prefill` None: decode alone."""
        self.ended(query.request_id, now)
        computing = self._workers[prefill or decode]
        decoding, row = self._workers[decode], self.table.row(decode)
        self._advance(decoding, now)
        slot = self.table.take_slot(row)
        booking = Booking(query, prefill or decode, decode, uncached_tokens, prefill_s, now, slot, now)
        if not computing.queue:  # it idled: begins now, or when the unknown work is done
            computing.busy_since = max(now - computing.extra_s, min(now, computing.busy_since))
            booking.is_first = computing.extra_s == 0.0
        computing.queue[query.request_id] = self._bookings[query.request_id] = booking
        decoding.decoding.append(booking)
        expected = self.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        most = max(1, query.max_new_tokens)
        self.table.slots[:, row, slot] = (query.num_tokens, expected, most, now, float("inf"), query.tpot_s, weight)
        self._count(row, 1, query.num_tokens)
        self._count_prompt(computing, uncached_tokens, query.num_tokens - uncached_tokens, now)
        self._plan_queue(computing, now)
        return booking

    def first_token(self, request_id: str, now: float) -> None:
        """Its prompt is computed and it decodes from now on. Unknown ids, and a second time, are fine."""
        booking = self._bookings.get(request_id)
        if booking is None:
            return
        computing = self._workers.get(booking.computing)
        if computing is not None and request_id in computing.queue:
            if booking.is_first and len(computing.queue) == 1:
                self.overhead.observe(now - booking.placed_at - booking.prefill_s)
            self._leave_queue(computing, request_id, now, computed=True)
            self._advance(self._workers[booking.decode], now)
            slots = self.table.slots[:, self.table.row(booking.decode), booking.slot]
            slots[Slot.FIRST_AT] = now
            slots[Slot.JOINED_STEP] = self.table.rows[Row.STEPS, self.table.row(booking.decode)]
            self._set_step_s(self._workers[booking.decode], now)

    def ended(self, request_id: str, now: float, num_output_tokens: int | None = None) -> None:
        """It left the cluster, or is placed anew. `num_output_tokens`: what it put out, if it came to its end."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        # The prefill worker may be gone since: with the prompt computed, that is no matter.
        computing, decoding = self._workers.get(booking.computing), self._workers[booking.decode]
        if computing is not None and request_id in computing.queue:
            self._leave_queue(computing, request_id, now, computed=False)
        self._advance(decoding, now)
        row = self.table.row(booking.decode)
        last = self.table.free_slot(row, booking.slot)
        decoding.decoding[last].slot = booking.slot
        decoding.decoding[booking.slot] = decoding.decoding[last]
        decoding.decoding.pop()
        self._count(row, -1, -booking.query.num_tokens)
        self._set_step_s(decoding, now)
        if num_output_tokens:
            self.lengths.observe(booking.query.tenant, booking.query.slo_class, num_output_tokens)
            self.table.residuals = self.lengths.residuals

    # --- arithmetic ---

    def _take_in(
        self,
        worker: _Worker,
        snapshot: WorkerSnapshot,
        now: float,
        cost: StepCost | None,
        context_tokens: float | None,
    ) -> None:
        row = self.table.row(snapshot.worker_id)
        self._advance(worker, now)
        worker.snapshot, worker.heard_at = snapshot, now
        if cost is not None or not worker.is_measured:
            self.table.set_cost(row, cost or assumed_cost(snapshot))
            worker.is_measured = cost is not None
        self.table.rows[Row.DRAINING, row] = snapshot.draining
        self._correct_queue(worker, snapshot.queued_prefill_tokens, now)
        self._correct_decodes(worker, row, context_tokens)
        self._plan_queue(worker, now)
        self._set_step_s(worker, now)

    def _correct_queue(self, worker: _Worker, queued_tokens: float, now: float) -> None:
        """The worker says how much is left: what is missing of the bookings is done, what is too much is unknown.

        It counts a step's tokens when the step is over, and those it will find cached until it begins the prompt. So
        this bounds what is done, and between the bounds the clock decides.
        """
        bookings = list(worker.queue.values())
        row = self.table.row(worker.info.worker_id)
        began_at = worker.busy_since + worker.extra_s
        cached = sum(b.query.num_tokens - b.uncached_tokens for b in bookings[1:])
        left = sum(b.uncached_tokens for b in bookings) - queued_tokens
        excess = max(0.0, -left - cached)
        least = sum(b.uncached_tokens for b in bookings if b.reported) - queued_tokens
        most = left + cached + float(self.table.rows[Row.CHUNK_TOKENS, row])
        worker.extra_s = self.table.cost(row).prefill_s(excess) if excess else 0.0
        elapsed_s = max(seconds_of(bookings, least), min(seconds_of(bookings, most), now - began_at))
        worker.busy_since = now - (seconds_of(bookings, least) if excess else elapsed_s)

    def _correct_decodes(self, worker: _Worker, row: int, context_tokens: float | None) -> None:
        """Sequences that the worker has beyond those booked on it were placed before this scheduler's time."""
        if worker.info.role != "decode":
            return
        snapshot, rows = worker.snapshot, self.table.rows
        extra = max(0, snapshot.num_running + snapshot.num_waiting - len(worker.decoding))
        if context_tokens is None:
            used = worker.info.num_blocks - min(snapshot.blocks_available, worker.info.num_blocks)
            context_tokens = used // worker.info.layer_groups * worker.info.block_size
        rows[Row.EXTRA_DECODES, row] = extra
        rows[Row.EXTRA_CONTEXT, row] = max(0.0, context_tokens - rows[Row.BOOKED_CONTEXT, row]) if extra else 0.0

    def _leave_queue(self, computing: _Worker, request_id: str, now: float, *, computed: bool) -> None:
        was_first = next(iter(computing.queue)) == request_id
        del computing.queue[request_id]
        if was_first or computed:
            computing.busy_since, computing.extra_s = now, 0.0 if computed else computing.extra_s
        self._plan_queue(computing, now)

    def _plan_queue(self, worker: _Worker, now: float) -> None:
        """When each prompt will have been computed, one after the other."""
        at = worker.busy_since + worker.extra_s
        for booking in worker.queue.values():
            at = max(at + booking.prefill_s, now)
            booking.computed_at = at
            self.table.slots[Slot.FIRST_AT, self.table.row(booking.decode), booking.slot] = at
        row = self.table.row(worker.info.worker_id)
        self.table.rows[Row.DRAINED_AT, row] = at

    def _count(self, row: int, requests: int, tokens: int) -> None:
        self.table.rows[Row.BOOKED, row] += requests
        self.table.rows[Row.BOOKED_CONTEXT, row] += tokens

    def _advance(self, worker: _Worker, now: float) -> None:
        """Count the decode steps that were done since."""
        facts = self.table.rows[:, self.table.row(worker.info.worker_id)]
        if facts[Row.STEP_S] > 0.0:
            facts[Row.STEPS] += max(0.0, now - facts[Row.AS_OF]) / facts[Row.STEP_S]
        facts[Row.AS_OF] = now

    def _count_prompt(self, worker: _Worker, num_tokens: float, num_cached: float, now: float) -> None:
        row = self.table.row(worker.info.worker_id)
        cost, facts = self.table.cost(row), self.table.rows[:, row]
        recent_s = PROMPTS_OVER_S * float(self.table.prompt_share(row, now))
        added_s = cost.step_s(StepWork.of_prefill(num_tokens, num_cached)) - cost.base_s
        facts[Row.PROMPTS_S], facts[Row.PROMPTS_AT] = recent_s + added_s, now
        self._set_step_s(worker, now)

    def _set_step_s(self, worker: _Worker, now: float) -> None:
        """With those that decode now, and their contexts, and as much time for prompts as lately."""
        row = self.table.row(worker.info.worker_id)
        facts, slots = self.table.rows[:, row], self.table.slots[:, row, : self.table.num_used(row)]
        joined = slots[Slot.JOINED_STEP] < float("inf")
        emitted = (facts[Row.STEPS] - slots[Slot.JOINED_STEP])[joined]
        context = (slots[Slot.TOKENS][joined] + emitted).sum() + facts[Row.EXTRA_CONTEXT]
        decodes = joined.sum() + facts[Row.EXTRA_DECODES]
        step_s = facts[Row.BASE_S] + facts[Row.DECODE_S] * decodes + facts[Row.CONTEXT_TOKEN_S] * context
        share = min(_MOST_PROMPTS, float(self.table.prompt_share(row, now)))
        facts[Row.STRETCH] = 1.0 / (1.0 - share)
        facts[Row.STEP_S] = step_s * facts[Row.STRETCH]
