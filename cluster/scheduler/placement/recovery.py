"""Requests that are on their workers although the ledger cannot have them: as their gateways tell who placed them
elsewhere, or as they stood when the scheduler lost sight of a worker.

Such a request is booked once both of its workers are known. Until then it is kept here, and a request that is told of
more often than once, ends, or is placed anew, counts once. What stood on a worker's earlier life is not booked on a
later one: that it is lost, or where it goes on, its gateway tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.scheduler.placement.ledger import Booking, Ledger
from cluster.scheduler.placement.worker_table import Fact, Slot
from kv_transfer.messages.scheduling import StandingRequest
from kv_transfer.messages.workers import WorkerInfo

MAX_PENDING: Final = 65_536  # whose workers are not known; beyond it, the oldest is forgotten


@dataclass(frozen=True, slots=True)
class _Kept:
    """`request`: as it stood at `as_of`. `lives`: of its workers, where only these are meant."""

    request: StandingRequest
    as_of: float
    lives: Mapping[str, WorkerInfo] = field(default_factory=dict)

    def num_emitted_at(self, now: float) -> int:
        """The number of tokens that it has put out by now, at the pace it had: a request out of sight goes on."""
        num_emitted, decoded_s = self.request.num_emitted, self.request.since_first_s
        if num_emitted == 0 or decoded_s == 0.0:
            return num_emitted
        most = max(num_emitted, self.request.place.max_new_tokens)
        return min(most, round(num_emitted * (decoded_s + now - self.as_of) / decoded_s))


class RecoveredRequests:
    """The recovered requests that are not booked yet, each under one of the workers that it lacks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lacking: dict[str, str] = {}  # the worker, by request
        self._pending: dict[str, dict[str, _Kept]] = {}  # by worker, then by request

    def __len__(self) -> int:
        return len(self._lacking)

    def add(self, request: StandingRequest, now: float) -> None:
        """Take in what a request's gateway says of it."""
        self.ended(request.place.request_id)
        self._book_or_keep(_Kept(request, now), now)

    def on_worker_registered(self, worker_id: str, now: float) -> None:
        """The worker is known from now on."""
        for request_id, kept in list(self._pending.get(worker_id, {}).items()):
            self.ended(request_id)
            self._book_or_keep(kept, now)

    def on_worker_lost(self, worker_id: str, now: float) -> None:
        """The worker is out of sight; its bookings are about to be void. Unknown ones are fine."""
        for booking in self._ledger.booked_on(worker_id):
            self.ended(booking.query.request_id)
            self._keep(worker_id, self._as_booked(booking, now))

    def first_token(self, request_id: str, now: float) -> None:
        """Unknown ids are fine."""
        kept = self.ended(request_id)
        if kept is not None:
            if not kept.request.num_emitted:
                kept = replace(kept, request=replace(kept.request, num_emitted=1, since_first_s=0.0), as_of=now)
            self._book_or_keep(kept, now)

    def ended(self, request_id: str) -> _Kept | None:
        """Forget a request that left the cluster, or is placed anew. Returns it, if it was kept here."""
        worker_id = self._lacking.pop(request_id, None)
        if worker_id is None:
            return None
        of_worker = self._pending[worker_id]
        kept = of_worker.pop(request_id)
        if not of_worker:
            del self._pending[worker_id]
        return kept

    def _book_or_keep(self, kept: _Kept, now: float) -> None:
        lacking = self._lacks(kept)
        if lacking is None:
            self._book(kept, now)
        else:
            self._keep(lacking, kept)

    def _keep(self, lacking: str, kept: _Kept) -> None:
        if len(self._lacking) == MAX_PENDING:
            self.ended(next(iter(self._lacking)))
        request_id = kept.request.place.request_id
        self._lacking[request_id] = lacking
        self._pending.setdefault(lacking, {})[request_id] = kept

    def _lacks(self, kept: _Kept) -> str | None:
        """A worker that has to be known first. One that has computed the prompt may be gone."""
        request = kept.request
        needed = [request.decode]
        if request.prefill is not None and not request.num_emitted:
            needed.append(request.prefill)
        return next((worker_id for worker_id in needed if not self._is_there(worker_id, kept.lives)), None)

    def _is_there(self, worker_id: str, lives: Mapping[str, WorkerInfo]) -> bool:
        if worker_id not in self._ledger.table:
            return False
        info = self._ledger.info(worker_id)
        return lives.get(worker_id, info) == info

    def _as_booked(self, booking: Booking, now: float) -> _Kept:
        table = self._ledger.table
        num_emitted, since_first_s, weight = 0, 0.0, 1.0
        if not booking.query.is_pooled:
            row = table.row(booking.decode)
            table.advance(row, now)
            slot = table.slots[:, row, booking.slot]
            weight = float(slot[Slot.WEIGHT])
            if slot[Slot.JOINED_STEP] < float("inf"):
                num_emitted = max(1, round(float(table.facts[Fact.STEPS, row] - slot[Slot.JOINED_STEP])))
                since_first_s = max(0.0, now - float(slot[Slot.FIRST_AT]))
        request = StandingRequest(
            place=booking.query,
            prefill=None if booking.computing == booking.decode else booking.computing,
            decode=booking.decode,
            num_emitted=num_emitted,
            since_first_s=since_first_s,
            slo_probability=weight,
        )
        there = [worker_id for worker_id in (booking.computing, booking.decode) if worker_id in table]
        return _Kept(request, now, {worker_id: self._ledger.info(worker_id) for worker_id in there})

    def _book(self, kept: _Kept, now: float) -> None:
        request = kept.request
        if request.num_emitted and request.place.is_pooled:
            return  # it has all that there is
        if request.num_emitted:
            self._ledger.book_decoding(
                request.place,
                prefill=request.prefill,
                decode=request.decode,
                num_emitted=kept.num_emitted_at(now),
                first_at=kept.as_of - request.since_first_s,
                weight=request.slo_probability,
                now=now,
            )
        else:
            self._ledger.book_computing(
                request.place,
                prefill=request.prefill,
                decode=request.decode,
                weight=request.slo_probability,
                now=now,
            )
