"""A router that watches another one, and ends a simulation as soon as too many requests are missed for good.

At loads that are too high most of a simulation tells nothing new. Knows what routers are told, nothing of workers; is
for clients that do not come back.
"""

from __future__ import annotations

from cluster.simulation.routers.base import PlaceQuery, Router
from kv_transfer.messages import BlockEvents, BlockIndexSnapshot, Placement, Unplaceable, WorkerInfo, WorkerSnapshot


class TooManyMissedError(Exception):
    """More requests are missed than was allowed, whatever becomes of the others."""


class Judge:
    """Behaves as `router` does. Raises TooManyMissedError once more than `allowed` requests were turned away, or were
    too late where the router hears of it: then they are for the client, too."""

    def __init__(self, router: Router, allowed: int) -> None:
        self.wants_blocks = router.wants_blocks
        self._router = router
        self._allowed = allowed
        self._asked: dict[str, PlaceQuery] = {}
        self._first_at: dict[str, float] = {}
        self._missed: set[str] = set()

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        self._router.register(info, snapshot, now)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        return self._router.heartbeat(snapshot, now)

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        self._router.blocks(message, now)

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable | None:
        self._asked[request.request_id] = request
        answer = self._router.place(request, now)
        if isinstance(answer, Unplaceable):
            self._miss(answer.request_id)
        return answer

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        answers = self._router.answers(now)
        for answer in answers:
            if isinstance(answer, Unplaceable):
                self._miss(answer.request_id)
        return answers

    def next_at(self) -> float | None:
        return self._router.next_at()

    def first_token(self, request_id: str, now: float) -> None:
        self._first_at[request_id] = now
        asked = self._asked[request_id]
        if not asked.slo.meets_ttft(now - asked.arrived_at):
            self._miss(request_id)
        self._router.first_token(request_id, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int) -> None:
        if not num_output_tokens:
            self._miss(request_id)
        elif num_output_tokens > 1:
            tpot_s = (now - self._first_at[request_id]) / (num_output_tokens - 1)
            if not self._asked[request_id].slo.meets_tpot(tpot_s):
                self._miss(request_id)
        self._router.ended(request_id, now, num_output_tokens)

    def _miss(self, request_id: str) -> None:
        self._missed.add(request_id)
        if len(self._missed) > self._allowed:
            raise TooManyMissedError
