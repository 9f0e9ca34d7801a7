"""One worker, as the ledger keeps it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile

from cluster.scheduler.placement.booking import Booking, seconds_of
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot


@dataclass(slots=True)
class BookedWorker:
    info: WorkerInfo
    snapshot: WorkerSnapshot
    heard_at: float
    queue: OrderedDict[str, Booking]  # prompts to be computed here, first come first served
    decoding: list[Booking]  # by slot; also those whose prompts are being computed
    busy_since: float  # the queue's first prompt counts as begun then, behind `extra_s` of unknown work
    extra_s: float = 0.0
    is_measured: bool = False  # it reported a cost once: better than any assumption, also when it says nothing

    @property
    def num_unknown(self) -> int:
        """Sequences that it reports beyond those booked on it."""
        return max(0, self.snapshot.num_running + self.snapshot.num_waiting - len(self.decoding))

    @property
    def used_tokens(self) -> int:
        """That its blocks hold or are kept for."""
        used = self.info.num_blocks - min(self.snapshot.blocks_available, self.info.num_blocks)
        return used // self.info.layer_groups * self.info.block_size

    def queued_tokens(self, before: str) -> float:
        """Prompt tokens ahead of that request: as booked, or as reported where that is more."""
        ahead = takewhile(lambda booking: booking.query.request_id != before, self.queue.values())
        return max(sum(booking.uncached_tokens for booking in ahead), self.snapshot.queued_prefill_tokens)

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
        elapsed_s = max(seconds_of(bookings, least), min(seconds_of(bookings, most), now - began_at))
        self.busy_since = now - (seconds_of(bookings, least) if excess else elapsed_s)
