"""A rule of thumb to compare with: the shortest queue of prompt tokens, then the emptiest memory.

Every placement counts at once, until snapshots include it. Knows neither targets nor prefixes, and turns away behind
too long a queue, with the time until it is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cluster.simulation.routers.base import NobodyWaits, PlaceQuery
from engine.cost_model.step_cost import ASSUMED_PREFILL_TOKENS_PER_S
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.fields import Role
from kv_transfer.messages.scheduling import Placement, Unplaceable
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot

_MIN_RETRY_AFTER_S: Final = 1.0


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

    def load(self) -> float:
        """Predicted KV of everything placed here and not ended, as a share of its memory."""
        capacity = self.info.num_blocks // self.info.layer_groups * self.info.block_size
        return sum(a.kv_tokens for a in self.assignments.values()) / capacity


class QueueLengthRouter(NobodyWaits):
    wants_blocks = False

    def __init__(
        self,
        max_queued_tokens: int = 131_072,
        *,
        prefill_tokens_per_s: float = ASSUMED_PREFILL_TOKENS_PER_S,
    ) -> None:
        """`prefill_tokens_per_s`: the speed of a prefill worker, which tells whom it turns away when to come back."""
        self._max_queued_tokens = max_queued_tokens
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._replicas: dict[str, _Replica] = {}

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        self._replicas[info.worker_id] = _Replica(info, snapshot, now)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        replica = self._replicas[snapshot.worker_id]
        # What was placed before the previous snapshot has reached the worker and counts in this one.
        for assignment in replica.assignments.values():
            assignment.reported = assignment.reported or assignment.placed_at < replica.heard_at
        replica.snapshot, replica.heard_at = snapshot, now
        return True

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        """It knows no prefixes."""

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable | None:
        decode = min(self._able("decode", request.num_tokens + request.max_new_tokens), key=_emptiness, default=None)
        if decode is None:
            return self._unplaceable(request, "no decode worker holds it", None)
        prefills = self._able("prefill", request.num_tokens)
        prefill = min(prefills, key=lambda r: (r.queued_tokens(), r.info.worker_id), default=None)
        computing = prefill or decode
        excess = computing.queued_tokens() - self._max_queued_tokens
        if excess > 0:
            reason = f"{computing.queued_tokens()} prompt tokens are waiting"
            speed = ASSUMED_PREFILL_TOKENS_PER_S if prefill is None else self._prefill_tokens_per_s
            return self._unplaceable(request, reason, max(_MIN_RETRY_AFTER_S, excess / speed))
        kv_tokens = request.num_tokens + request.max_new_tokens
        decode.assignments[request.request_id] = _Assignment(0, kv_tokens, now)
        computing.assignments[request.request_id] = _Assignment(request.num_tokens, kv_tokens, now)
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill=None if prefill is None else prefill.info.worker_id,
            decode=decode.info.worker_id,
        )

    def first_token(self, request_id: str, now: float) -> None:
        """It does not follow requests."""

    def ended(self, request_id: str, now: float, num_output_tokens: int) -> None:
        for replica in self._replicas.values():
            replica.assignments.pop(request_id, None)

    def _able(self, role: Role, num_tokens: int) -> list[_Replica]:
        replicas = self._replicas.values()
        return [r for r in replicas if r.info.role == role and r.info.max_model_len >= num_tokens]

    @staticmethod
    def _unplaceable(request: PlaceQuery, reason: str, retry_after_s: float | None) -> Unplaceable:
        return Unplaceable(
            request_id=request.request_id, attempt=request.attempt, reason=reason, retry_after_s=retry_after_s
        )


def _emptiness(replica: _Replica) -> tuple[float, int, str]:
    return replica.load(), replica.snapshot.num_running, replica.info.worker_id
