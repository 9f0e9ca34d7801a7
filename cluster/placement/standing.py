"""Requests that are on their workers although this scheduler did not place them, as their gateways tell.

Such a request is booked once both of its workers are known. Until then it is kept here, and a request that is told of
more often than once, ends, or is placed anew, counts once. Knows no messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from cluster.placement.ledger import Ledger
from cluster.placement.query import Query

MAX_PENDING: Final = 65_536  # whose workers are not known; beyond it, the oldest is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingQuery:
    """`prefill` None: the decode worker computes the prompt. `num_emitted`: tokens by now, since the first one came at
    `first_at`; 0: the prompt is still to be computed. `weight`: see `Slot.WEIGHT`."""

    query: Query
    prefill: str | None
    decode: str
    num_emitted: int
    first_at: float
    weight: float


class StandingRequests:
    """Those that are not booked yet, each under one of the workers that it lacks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lacking: dict[str, str] = {}  # the worker, by request
        self._pending: dict[str, dict[str, StandingQuery]] = {}  # by worker, then by request

    def __len__(self) -> int:
        return len(self._lacking)

    def told(self, standing: StandingQuery, now: float) -> None:
        request_id = standing.query.request_id
        self.ended(request_id)
        lacking = self._lacks(standing)
        if lacking is None:
            self._book(standing, now)
            return
        if len(self._lacking) == MAX_PENDING:
            self.ended(next(iter(self._lacking)))
        self._lacking[request_id] = lacking
        self._pending.setdefault(lacking, {})[request_id] = standing

    def registered(self, worker_id: str, now: float) -> None:
        """The worker is known from now on."""
        for standing in list(self._pending.get(worker_id, {}).values()):
            self.told(standing, now)

    def first_token(self, request_id: str, now: float) -> None:
        """Unknown ids are fine."""
        standing = self.ended(request_id)
        if standing is not None:
            computed = standing.num_emitted > 0
            self.told(standing if computed else replace(standing, num_emitted=1, first_at=now), now)

    def ended(self, request_id: str) -> StandingQuery | None:
        """It left the cluster, or is placed anew. Returns it, if it was kept here."""
        worker_id = self._lacking.pop(request_id, None)
        if worker_id is None:
            return None
        kept = self._pending[worker_id]
        standing = kept.pop(request_id)
        if not kept:
            del self._pending[worker_id]
        return standing

    def _lacks(self, standing: StandingQuery) -> str | None:
        """A worker that has to be known first. One that has computed the prompt may be gone."""
        needed = [standing.decode]
        if standing.prefill is not None and not standing.num_emitted:
            needed.append(standing.prefill)
        return next((worker_id for worker_id in needed if worker_id not in self._ledger.table), None)

    def _book(self, standing: StandingQuery, now: float) -> None:
        if standing.num_emitted:
            self._ledger.book_decoding(
                standing.query,
                prefill=standing.prefill,
                decode=standing.decode,
                num_emitted=standing.num_emitted,
                first_at=standing.first_at,
                weight=standing.weight,
                now=now,
            )
        else:
            self._ledger.book_computing(
                standing.query, prefill=standing.prefill, decode=standing.decode, weight=standing.weight, now=now
            )
