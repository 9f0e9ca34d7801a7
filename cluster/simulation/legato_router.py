"""Legato's placement and admission behind the simulation's seam, with the block index that the scheduler keeps."""

from __future__ import annotations

from collections.abc import Callable

from cluster.block_index import BlockIndex
from cluster.placement.admission import Admission, AdmissionPolicy, Outcome, Verdict
from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.query import NO_TARGET, Query
from cluster.simulation.fleet import KnownCosts
from cluster.simulation.router import PlaceQuery
from engine.step_cost import StepCost
from kv_transfer.messages import (
    BlockEvents,
    BlockIndexSnapshot,
    Placement,
    Unplaceable,
    WorkerInfo,
    WorkerSnapshot,
)


class LegatoRouter:
    """Workers' cost models are given, as they would report them. `on_verdict` hears what became of each question."""

    wants_blocks = True

    def __init__(
        self, costs: KnownCosts, policy: DecisionPolicy | None = None, rules: AdmissionPolicy | None = None
    ) -> None:
        self._costs = costs
        self._cost_of: dict[str, StepCost] = {}
        self._index = BlockIndex()
        self.ledger = Ledger()
        self.on_verdict: Callable[[Query, Verdict, float], None] = lambda query, verdict, now: None
        self._admission = Admission(
            self.ledger, self._index.longest_prefix, policy or DecisionPolicy(), rules or AdmissionPolicy()
        )

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        costs = self._costs
        is_prefill = info.role == "prefill"
        cost = self._cost_of[info.worker_id] = costs.prefill if is_prefill else costs.decode
        chunk_tokens = costs.prefill_chunk_tokens if is_prefill else costs.decode_chunk_tokens
        max_num_seqs = float("inf") if is_prefill else costs.max_num_seqs
        self.ledger.register(info, snapshot, now, cost=cost, chunk_tokens=chunk_tokens, max_num_seqs=max_num_seqs)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        return self.ledger.heartbeat(snapshot, now, cost=self._cost_of.get(snapshot.worker_id))

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        if isinstance(message, BlockEvents):
            self._index.on_events(message, now)
        else:
            self._index.on_snapshot(message, now)

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable | None:
        query = _query(request)
        verdict = self._admission.ask(query, now)
        self.on_verdict(query, verdict, now)
        return _answer(verdict)

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        return [answer for verdict in self._admission.again(now) if (answer := _answer(verdict)) is not None]

    def next_at(self) -> float | None:
        return self._admission.next_at()

    def first_token(self, request_id: str, now: float) -> None:
        self.ledger.first_token(request_id, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int) -> None:
        self.ledger.ended(request_id, now, num_output_tokens or None)


def _query(request: PlaceQuery) -> Query:
    return Query(
        request_id=request.request_id,
        attempt=request.attempt,
        num_tokens=request.num_tokens,
        max_new_tokens=request.max_new_tokens,
        arrived_at=request.arrived_at,
        ttft_s=NO_TARGET if request.slo.ttft_s is None else request.slo.ttft_s,
        tpot_s=NO_TARGET if request.slo.tpot_s is None else request.slo.tpot_s,
        slo_class=request.slo.slo_class,
        prefix_hashes=request.hashes,
        exclude=tuple(request.exclude),
        prefer_decode=request.prefer_decode,
    )


def _answer(verdict: Verdict) -> Placement | Unplaceable | None:
    query = verdict.decision.query
    if verdict.outcome is Outcome.WAITING:
        return None
    if verdict.outcome is Outcome.PLACED:
        best = verdict.decision.best
        return Placement(request_id=query.request_id, attempt=query.attempt, prefill=best.prefill, decode=best.decode)
    return Unplaceable(
        request_id=query.request_id,
        attempt=query.attempt,
        reason=verdict.decision.action.value,
        retry_after_s=verdict.retry_after_s,
    )
