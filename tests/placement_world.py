"""Workers, snapshots and queries for the tests of placement: numbers that make hand arithmetic easy."""

from __future__ import annotations

from dataclasses import replace

from cluster.placement.ledger import Booking, Ledger
from cluster.placement.query import Query
from engine.step_cost import StepCost
from kv_transfer.messages import Endpoint, WorkerInfo, WorkerSnapshot

NOWHERE = Endpoint(host="127.0.0.1", port=1, node_id="node")
# A prompt of 1000 tokens takes 1.01 s; a decode step 10 ms, each sequence 1 ms more, each 1000 tokens of context too.
COST = StepCost(
    base_s=0.01, prefill_token_s=0.001, prefill_pair_s=0.0, decode_s=0.001, context_token_s=1e-6, relative_error=0.1
)


def worker_info(worker_id: str, **changes: object) -> WorkerInfo:
    """`p...` is a prefill worker, any other one decodes."""
    info = WorkerInfo(
        worker_id=worker_id,
        role="prefill" if worker_id.startswith("p") else "decode",
        endpoint=NOWHERE,
        pid=1,
        model="model",
        compatibility="same",
        max_model_len=10_000,
        num_blocks=2000,
        block_size=16,
        layer_groups=1,
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def worker_snapshot(worker_id: str, number: int = 1, **changes: object) -> WorkerSnapshot:
    snapshot = WorkerSnapshot(
        worker_id=worker_id,
        sequence_number=number,
        draining=False,
        num_running=0,
        num_waiting=0,
        queued_prefill_tokens=0,
        blocks_available=2000,
        num_leases=0,
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
    )
    return replace(snapshot, **changes)  # type: ignore[arg-type]


def ledger_of(*worker_ids: str, cost: StepCost = COST, **info: object) -> Ledger:
    ledger = Ledger()
    for worker_id in worker_ids:
        ledger.register(worker_info(worker_id, **info), worker_snapshot(worker_id), 0.0, cost=cost)
    return ledger


def query_of(request_id: str = "r", **changes: object) -> Query:
    query = Query(
        request_id=request_id, num_tokens=1000, max_new_tokens=100, arrived_at=0.0, ttft_s=2.0, tpot_s=0.05, tenant="t"
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
    **changes: object,
) -> Booking:
    query = query_of(request_id, **changes)
    return ledger.book(
        query,
        prefill=prefill,
        decode=decode,
        uncached_tokens=query.num_tokens,
        prefill_s=prefill_s,
        weight=1.0,
        now=now,
    )


def decoding(ledger: Ledger, request_id: str, now: float = 0.0, **changes: object) -> None:
    """A request that has just begun to decode."""
    book(ledger, request_id, now, **changes)  # type: ignore[arg-type]
    ledger.first_token(request_id, now)
