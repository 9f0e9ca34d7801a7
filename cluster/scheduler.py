"""Which workers a request runs on: least predicted work, counting every placement at once.

A pure class: fed with registrations, snapshots and requests, it answers with placements. Knows no sockets and no Ray;
the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.step_loop import ASSUMED_PREFILL_TOKENS_PER_S
from kv_transfer.messages import Place, Placement, Replicas, Role, Unplaceable, WorkerInfo, WorkerSnapshot

MIN_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """A request is turned away when more than `max_queued_tokens` prompt tokens wait wherever it could be computed.

    Prompts shorter than `local_prefill_below` tokens are computed by the decode worker itself. A worker that was not
    heard of for `stale_after_s` counts as gone.
    """

    max_queued_tokens: int = 131_072
    local_prefill_below: int = 0
    stale_after_s: float = 5.0


@dataclass(slots=True)
class _Assignment:
    """Work placed on a worker by a request that has not ended."""

    num_tokens: int
    kv_tokens: int
    placed_at: float
    reported: bool = False  # the worker's snapshots include it by now


@dataclass(slots=True)
class _Replica:
    info: WorkerInfo
    snapshot: WorkerSnapshot
    heard_at: float
    assignments: dict[str, _Assignment] = field(default_factory=dict)

    def queued_tokens(self) -> int:
        """Prompt tokens waiting here: what the worker reported, and what was placed since."""
        unreported = sum(a.num_tokens for a in self.assignments.values() if not a.reported)
        return self.snapshot.queued_prefill_tokens + unreported

    def retry_after_s(self, num_tokens: int) -> float:
        """Predicted seconds until `num_tokens` of the queue are computed."""
        speed = self.snapshot.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S
        return max(MIN_RETRY_AFTER_S, num_tokens / speed)

    def load(self) -> float:
        """Predicted KV of everything placed here and not ended, as a share of its memory."""
        capacity = self.info.num_blocks // self.info.layer_groups * self.info.block_size
        return sum(a.kv_tokens for a in self.assignments.values()) / capacity


class GlobalScheduler:
    """Knows the live workers and what was placed on them; decides where the next request goes."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy
        self._replicas: dict[str, _Replica] = {}

    # --- what workers report ---

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        self._replicas[info.worker_id] = _Replica(info, snapshot, now)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        """Take a snapshot in, unless a newer one is known. False if the worker is not: it has to register (again)."""
        replica = self._replicas.get(snapshot.worker_id)
        if replica is None:
            return False
        if snapshot.sequence_number <= replica.snapshot.sequence_number:
            return True
        # What was placed before the previous snapshot has reached the worker and counts in this one.
        for assignment in replica.assignments.values():
            assignment.reported = assignment.reported or assignment.placed_at < replica.heard_at
        replica.snapshot, replica.heard_at = snapshot, now
        return True

    def lost(self, worker_id: str) -> bool:
        """The worker is gone. False if it was not known."""
        return self._replicas.pop(worker_id, None) is not None

    def expire(self, now: float) -> list[str]:
        """Drop and name the workers that have been silent too long."""
        silent = [w for w, r in self._replicas.items() if now - r.heard_at > self._policy.stale_after_s]
        for worker_id in silent:
            self.lost(worker_id)
        return silent

    def replicas(self) -> Replicas:
        return Replicas(workers=[(r.info, r.snapshot) for r in self._replicas.values()])

    # --- what gateways ask ---

    def place(self, request: Place, now: float) -> Placement | Unplaceable:
        """Choose workers and count the work as theirs at once, or say when to come back."""
        decodes = self._live("decode")
        if not decodes:
            return self._unplaceable(request, "no decode worker is ready", MIN_RETRY_AFTER_S)
        longest = max(r.info.max_model_len for r in decodes)
        if request.num_tokens + request.max_new_tokens > longest:
            return self._unplaceable(request, f"no decode worker holds more than {longest} tokens", None)
        fitting = [r for r in decodes if r.info.max_model_len >= request.num_tokens + request.max_new_tokens]
        decode = self._choose_decode(request, fitting)
        prefill = self._choose_prefill(request, decode)
        computing = prefill or decode
        excess = computing.queued_tokens() - self._policy.max_queued_tokens
        if excess > 0 and request.attempt == 0:
            reason = f"{computing.queued_tokens()} prompt tokens are waiting"
            return self._unplaceable(request, reason, computing.retry_after_s(excess))
        self.ended(request.request_id)  # of an earlier attempt
        self._assign(request, computing, decode, now)
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill=None if prefill is None else prefill.info.worker_id,
            decode=decode.info.worker_id,
        )

    def ended(self, request_id: str) -> None:
        """The request left the cluster, or is placed anew."""
        for replica in self._replicas.values():
            replica.assignments.pop(request_id, None)

    def _live(self, role: Role) -> list[_Replica]:
        return [r for r in self._replicas.values() if r.info.role == role and not r.snapshot.draining]

    def _choose_decode(self, request: Place, decodes: list[_Replica]) -> _Replica:
        for replica in decodes:
            if replica.info.worker_id == request.prefer_decode:
                return replica
        return min(_preferred(decodes, request), key=lambda r: (r.load(), r.snapshot.num_running, r.info.worker_id))

    def _choose_prefill(self, request: Place, decode: _Replica) -> _Replica | None:
        """None where the decode worker should compute the prompt itself."""
        if request.num_tokens < self._policy.local_prefill_below:
            return None
        able = [
            r
            for r in self._live("prefill")
            if r.info.compatibility == decode.info.compatibility
            and r.info.max_model_len >= request.num_tokens
            and r.info.worker_id not in request.exclude
        ]
        return min(able, key=lambda r: (r.queued_tokens(), r.info.worker_id), default=None)

    def _assign(self, request: Place, computing: _Replica, decode: _Replica, now: float) -> None:
        kv_tokens = request.num_tokens + request.max_new_tokens
        decode.assignments[request.request_id] = _Assignment(0, kv_tokens, now)
        computing.assignments[request.request_id] = _Assignment(request.num_tokens, kv_tokens, now)

    @staticmethod
    def _unplaceable(request: Place, reason: str, retry_after_s: float | None) -> Unplaceable:
        return Unplaceable(
            request_id=request.request_id, attempt=request.attempt, reason=reason, retry_after_s=retry_after_s
        )


def _preferred(replicas: Iterable[_Replica], request: Place) -> list[_Replica]:
    """Those that did not just fail the request, or all if none is left."""
    replicas = list(replicas)
    return [r for r in replicas if r.info.worker_id not in request.exclude] or replicas
