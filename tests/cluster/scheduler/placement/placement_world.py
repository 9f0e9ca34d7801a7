"""Workers, snapshots and queries for the tests of placement: numbers that make hand arithmetic easy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cluster.scheduler.placement.ledger import Booking, Ledger
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.scheduling import Place
from kv_transfer.worker.cost_report import stated_report
from tests.support.clusters.worker_reports import worker_info, worker_snapshot

# A prompt of 1000 tokens takes 1.01 s; a decode step 10 ms, each sequence 1 ms more, each 1000 tokens of context too.
COST = StepCost(
    base_s=0.01, prefill_token_s=0.001, prefill_pair_s=0.0, decode_s=0.001, context_token_s=1e-6, relative_error=0.1
)


costed_snapshot = partial(worker_snapshot, step_cost=stated_report(COST))


def ledger_of(*worker_ids: str, cost: StepCost = COST, **info: object) -> Ledger:
    ledger = Ledger()
    for worker_id in worker_ids:
        ledger.register(worker_info(worker_id, **info), worker_snapshot(worker_id, step_cost=stated_report(cost)), 0.0)
    return ledger


def fact_of(ledger: Ledger, worker_id: str, fact: int) -> float:
    return float(ledger.table.facts[fact, ledger.table.row(worker_id)])


def query_of(request_id: str = "r", **changes: object) -> Place:
    query = Place(
        request_id=request_id, attempt=0, num_tokens=1000, max_new_tokens=100, ttft_s=2.0, tpot_s=0.05, tenant="t"
    )
    return replace(query, **changes)  # type: ignore[arg-type]


def book(
    ledger: Ledger,
    request_id: str,
    now: float = 0.0,
    *,
    prefill: str | None = "p1",
    decode: str = "d1",
    prefill_s: float = 1.0,
    num_cached: int = 0,
    rest_tokens: int = 0,
    rest_s: float = 0.0,
    coming_tokens: float = 0.0,
    **changes: object,
) -> Booking:
    query = query_of(request_id, **changes)
    return ledger.book(
        query,
        prefill=prefill,
        decode=decode,
        uncached_tokens=query.num_tokens - num_cached - rest_tokens,
        prefill_s=prefill_s,
        weight=1.0,
        now=now,
        rest_tokens=rest_tokens,
        rest_s=rest_s,
        coming_tokens=coming_tokens,
    )


def decoding(ledger: Ledger, request_id: str, now: float = 0.0, **changes: object) -> None:
    """A request that has just begun to decode."""
    book(ledger, request_id, now, **changes)  # type: ignore[arg-type]
    ledger.first_token(request_id, now)
