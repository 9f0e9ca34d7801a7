"""The global scheduler: what workers and gateways tell, in their own words, into placements.

A pure class: fed with messages and the clock, it answers with messages. Joins what is known of workers and placements
(`Ledger`), of their caches (`BlockIndex`), and the decision (`Admission`). The same class runs in the cluster, in the
simulator and in tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.scheduler.block_index import BlockIndex
from cluster.scheduler.decision_log import DecisionLog
from cluster.scheduler.placement.admission import Admission, AdmissionOutcome, AdmissionPolicy, Verdict
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import Action, Decision
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.recovery import RecoveredRequests
from cluster.scheduler.placement.retry_after import MIN_RETRY_AFTER_S
from cluster.scheduler.placement.worker_table import Fact
from kv_transfer.messages.blocks import BlockEvents, BlockIndexRequest, BlockIndexSnapshot
from kv_transfer.messages.fields import Role
from kv_transfer.messages.scheduling import ClusterSnapshot, Place, Placement, Queued, StandingRequest, Unplaceable
from kv_transfer.messages.workers import LoadingReport, StepCostReport, WorkerInfo, WorkerSnapshot

WAKE_PERIOD_S: Final = 0.02  # those who wait are looked at so often at most when room comes early,
WAKE_COUNT: Final = 4  # so many of them,
FREED_S: Final = 0.02  # and when a worker turns out to be done with its prompts by so much earlier than predicted

PlacementAnswer = Placement | Unplaceable


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Prompts shorter than `local_prefill_below` tokens are computed by the decode worker itself. A worker that was not
    heard of for `stale_after_s` counts as gone.
    """

    local_prefill_below: int = 0
    stale_after_s: float = 5.0
    log_size: int = 1000  # decisions
    decision: DecisionPolicy = field(default_factory=DecisionPolicy)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)


class GlobalScheduler:
    """Of one model's workers. `now` never goes back. `log`: the newest decisions, which several may share. `on_verdict`
    hears each as it is made, and whether its request was told before that it waits; `ledger` is to read: for those who
    size the pools."""

    def __init__(self, policy: SchedulerPolicy, log: DecisionLog | None = None) -> None:
        self._policy = policy
        self.ledger = Ledger()
        self.block_index = BlockIndex()
        self._recovered = RecoveredRequests(self.ledger)
        self._admission = Admission(self.ledger, self.block_index.longest_prefix, policy.decision, policy.admission)
        self._waiting: dict[str, Place] = {}
        self._wake_at = float("inf")
        self._woken_at = float("-inf")
        self.log = DecisionLog(policy.log_size) if log is None else log
        self.on_verdict: Callable[[Place, Verdict, float, bool], None] = lambda query, verdict, now, has_waited: None

    # --- what workers report ---

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        """A worker is there, in a new life or (by an equal `info`) again. What it was known to hold is void, and so is
        what was placed on an earlier life; what was placed on this one is its own still."""
        self.block_index.forget(info.worker_id)
        self._recovered.on_worker_lost(info.worker_id, now)
        self.ledger.register(info, snapshot, now)
        self._recovered.on_worker_registered(info.worker_id, now)
        self._room_may_have_come(now)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        """Take a snapshot in, unless a newer one is known. False if the worker is not: it has to register (again)."""
        if snapshot.worker_id not in self.ledger.table:
            return False
        before = self.ledger.table.facts[:, self.ledger.table.row(snapshot.worker_id)].copy()
        self.ledger.heartbeat(snapshot, now)
        after = self.ledger.table.facts[:, self.ledger.table.row(snapshot.worker_id)]
        earlier_s = max(before[Fact.DRAINED_AT], now) - max(after[Fact.DRAINED_AT], now)
        left = before[Fact.EXTRA_DECODES] > after[Fact.EXTRA_DECODES] or before[Fact.DRAINING] > after[Fact.DRAINING]
        if earlier_s > FREED_S or left:
            self._room_may_have_come(now)
        return True

    def update_blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> BlockIndexRequest | None:
        """What a worker's tiers hold; returns what to ask the worker, if anything."""
        if isinstance(message, BlockEvents):
            return self.block_index.on_events(message, now)
        return self.block_index.on_snapshot(message, now)

    def leaves(self, worker_id: str | None) -> bool:
        """Whether it takes nothing new, also of those that it has blocks reserved for. False where it is not known."""
        table = self.ledger.table
        if worker_id is None or worker_id not in table:
            return False
        return bool(table.facts[Fact.DRAINING, table.row(worker_id)])

    def unregister(self, worker_id: str, now: float, *, may_be_replaced: bool = True) -> bool:
        """Forget a worker that is gone. Returns False if it was not known. `may_be_replaced`: see `Ledger`."""
        self.block_index.forget(worker_id)
        self._recovered.on_worker_lost(worker_id, now)
        return self.ledger.unregister(worker_id, now, may_be_replaced=may_be_replaced)

    def expect_worker(self, at: float) -> None:
        """Note that a worker is on its way here, to take requests from `at` on: who is turned away until then is told
        of that."""
        self.ledger.joins_at = at

    def loading(self, report: LoadingReport, now: float) -> None:
        """Note that a worker is loading this model: who finds no other one may wait for it."""
        if report.role == "decode":
            self.ledger.loading(report.worker_id, now)

    @property
    def load_s(self) -> float:
        """Seconds that this model takes to be there, by the quickest of those who told; inf: nobody did."""
        return min((info.load_s for info, _ in self.ledger.workers() if info.load_s), default=math.inf)

    def step_cost(self, role: Role) -> StepCostReport | None:
        """What a worker of that role says of its steps; None: nobody does."""
        told = (snapshot.step_cost for info, snapshot in self.ledger.workers() if info.role == role)
        return next((cost for cost in told if cost is not None), None)

    def expire(self, now: float) -> list[str]:
        """Drop and name the workers that have been silent too long."""
        silent = self.ledger.silent(now, self._policy.stale_after_s)
        for worker_id in silent:
            self.unregister(worker_id, now)
        return silent

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(workers=list(self.ledger.workers()), indexes=self.block_index.report())

    # --- what gateways ask and tell ---

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_unbooked(self) -> int:
        """Requests that run on workers which are out of sight: booked once these are known."""
        return len(self._recovered)

    def place(self, request: Place, now: float) -> PlacementAnswer | Queued:
        """Choose workers and count the work as theirs at once; or say when to come back, or that there will be an
        answer: see `answers`. What `stays` where there is no room elsewhere is counted where it is."""
        if request.stays:
            return self._move(request, now)
        self.ledger.ended(request.request_id, now)  # an earlier attempt
        self._recovered.ended(request.request_id)
        self._waiting.pop(request.request_id, None)
        query = self._narrowed(request)
        verdict = self._admission.ask(query, now)
        self.on_verdict(query, verdict, now, False)
        if verdict.outcome is not AdmissionOutcome.WAITING:
            return self._answer(request, verdict)
        self._waiting[request.request_id] = request
        self.log.add(request, verdict, "it waits for room")
        query = verdict.decision.query  # without targets, where these are unattainable
        within_s = min(self._policy.admission.max_wait_s, max(0.0, query.ttft_target_s - query.waited_s))
        return Queued(request_id=request.request_id, attempt=request.attempt, within_s=within_s)

    def answers(self, now: float) -> list[PlacementAnswer]:
        """The answers to requests that waited. Called at `next_at`."""
        if self._wake_at <= now:
            self._wake_at, self._woken_at = float("inf"), now
            self._admission.wake(now, WAKE_COUNT)
        answers: list[PlacementAnswer] = []
        for verdict in self._admission.ask_again(now):
            self.on_verdict(verdict.decision.query, verdict, now, True)
            answers.append(self._answer(self._waiting.pop(verdict.decision.query.request_id), verdict))
        if any(isinstance(answer, Placement) for answer in answers):
            self._room_may_have_come(now)
        return answers

    def next_at(self) -> float | None:
        """The time at which there may be answers, as it stands. Changes with whatever is told."""
        at = self._admission.next_at()
        return None if at is None else min(at, self._wake_at)

    def recovered(self, request: StandingRequest, now: float) -> None:
        """Count a request that is on its workers, placed by somebody else, as soon as they are known."""
        self.ended(request.place.request_id, now)
        self._recovered.add(request, now)

    def first_token(self, request_id: str, now: float) -> None:
        self.ledger.first_token(request_id, now)
        self._recovered.first_token(request_id, now)

    def part_computed(self, request_id: str, now: float) -> None:
        """The first part of a split request is computed, and its decode worker computes the rest. Unknown ids are
        fine."""
        self.ledger.part_computed(request_id, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int | None = None) -> None:
        """The request left the cluster, or its client is gone. Unknown ids are fine."""
        if self._waiting.pop(request_id, None) is not None:
            self._admission.gone(request_id)
        self._recovered.ended(request_id)
        if request_id in self.ledger:
            self.ledger.ended(request_id, now, num_output_tokens)
            self._room_may_have_come(now)

    # --- between the words and the decision ---

    def _move(self, request: Place, now: float) -> PlacementAnswer:
        """Decide as on the attempt that would follow. The answer names the one that asks: the gateway must not take it,
        where it comes late, for the place of the one that follows."""
        following = replace(self._narrowed(request), attempt=request.attempt + 1)
        decision = self._admission.move(following, now)
        if decision is None:
            return Unplaceable(
                request_id=request.request_id,
                attempt=request.attempt,
                reason="no other worker has room",
                retry_after_s=MIN_RETRY_AFTER_S,
            )
        self._recovered.ended(request.request_id)
        return _placement(request, decision)

    def _answer(self, request: Place, verdict: Verdict) -> PlacementAnswer:
        reason = self._reason(verdict)
        self.log.add(request, verdict, reason)
        if verdict.outcome is AdmissionOutcome.PLACED:
            return _placement(request, verdict.decision)
        return Unplaceable(
            request_id=request.request_id, attempt=request.attempt, reason=reason, retry_after_s=verdict.retry_after_s
        )

    def _reason(self, verdict: Verdict) -> str:
        """Why so, or why not now."""
        if verdict.decision.rows:
            best = verdict.decision.best
            if verdict.outcome is AdmissionOutcome.PLACED:
                parts = f": {best.prefill} computes {best.split_at} tokens of the prompt, {best.decode} the others"
                return f"{verdict.outcome.value}{parts if best.split_at else ''}"
            if verdict.decision.action is Action.PLACE:  # good enough, were the queue not too long
                return f"{self.ledger.queued_tokens(best.computing):.0f} prompt tokens are waiting"
            if best.ttft_s == math.inf:
                return "no worker is foreseen to have the memory for it"
            return (
                f"the first token would come after {best.ttft_s:.3g} s and each further one after"
                f" {1000 * best.tpot_s:.3g} ms, or those of others too late"
            )
        longest = max((info.max_model_len for info, _ in self.ledger.workers() if info.role == "decode"), default=0)
        if verdict.retry_after_s is None:
            return f"no decode worker holds more than {longest} tokens"
        query = verdict.decision.query
        too_short = f" that holds more than {longest} tokens"
        is_too_long = 0 < longest < query.num_tokens + query.max_new_tokens
        return f"no decode worker{too_short if is_too_long else ''} is ready"

    def _room_may_have_come(self, now: float) -> None:
        """Note that there may be room, not each time: a busy cluster tells of room hundreds of times a second."""
        if self._waiting:
            self._wake_at = min(self._wake_at, max(now, self._woken_at + WAKE_PERIOD_S))

    def _narrowed(self, request: Place) -> Place:
        """The request without the workers that it need not, or must not, go to."""
        exclude = request.exclude
        if request.num_tokens < self._policy.local_prefill_below and not request.is_pooled:
            exclude = [*self.ledger.table.ids[: self.ledger.table.num_prefills], *exclude]
        prefer_decode = None if self.leaves(request.prefer_decode) else request.prefer_decode
        return replace(request, exclude=exclude, prefer_decode=prefer_decode)


def _placement(request: Place, decision: Decision) -> Placement:
    best = decision.best
    return Placement(
        request_id=request.request_id,
        attempt=request.attempt,
        prefill=best.prefill,
        decode=best.decode,
        ttft_s=best.ttft_s if math.isfinite(best.ttft_s) else None,
        split_at=best.split_at,
    )
