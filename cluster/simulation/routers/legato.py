"""Legato's `GlobalScheduler` behind the simulation's seam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cluster.scheduler.placement.admission import AdmissionPolicy, Verdict
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.query import DecisionPolicy, Query
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from cluster.simulation.routers.base import PlaceQuery
from cluster.simulation.routers.fleet import KnownCosts
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Placement, Queued, Unplaceable
from kv_transfer.messages.workers import StepCostReport, WorkerInfo, WorkerSnapshot
from kv_transfer.worker.cost_report import stated_report

_UNBOUNDED: Final = 2**62


class LegatoRouter:
    """Workers' cost models are given, as they would report them. `on_verdict` hears what became of each question."""

    wants_blocks = True

    def __init__(
        self, costs: KnownCosts, policy: DecisionPolicy | None = None, rules: AdmissionPolicy | None = None
    ) -> None:
        self._costs = costs
        self._reports = {"prefill": stated_report(costs.prefill), "decode": stated_report(costs.decode)}
        self._report_of: dict[str, StepCostReport] = {}
        self._scheduler = GlobalScheduler(
            SchedulerPolicy(
                max_queued_tokens=_UNBOUNDED,
                decision=policy or DecisionPolicy(),
                admission=rules or AdmissionPolicy(),
            )
        )

    @property
    def ledger(self) -> Ledger:
        return self._scheduler.ledger

    @property
    def on_verdict(self) -> Callable[[Query, Verdict, float], None]:
        return self._scheduler.on_verdict

    @on_verdict.setter
    def on_verdict(self, hear: Callable[[Query, Verdict, float], None]) -> None:
        self._scheduler.on_verdict = hear

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        costs, is_prefill = self._costs, info.role == "prefill"
        bounded = costs.max_num_seqs < float("inf") and not is_prefill
        info = replace(
            info,
            chunk_tokens=costs.prefill_chunk_tokens if is_prefill else costs.decode_chunk_tokens,
            max_num_seqs=int(costs.max_num_seqs) if bounded else 0,
        )
        report = self._report_of[info.worker_id] = self._reports[info.role]
        self._scheduler.register(info, replace(snapshot, step_cost=report), now)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        return self._scheduler.heartbeat(replace(snapshot, step_cost=self._report_of.get(snapshot.worker_id)), now)

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        self._scheduler.blocks(message, now)

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable | None:
        question = replace(
            request,
            slo_class=request.slo.name,
            ttft_s=request.slo.ttft_s,
            tpot_s=request.slo.tpot_s,
            waited_s=now - request.arrived_at,
            prefix_hashes=b"".join(request.hashes),
        )
        answer = self._scheduler.place(question, now)
        return None if isinstance(answer, Queued) else answer

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        return self._scheduler.answers(now)

    def next_at(self) -> float | None:
        return self._scheduler.next_at()

    def first_token(self, request_id: str, now: float) -> None:
        self._scheduler.first_token(request_id, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int) -> None:
        self._scheduler.ended(request_id, now, num_output_tokens or None)
