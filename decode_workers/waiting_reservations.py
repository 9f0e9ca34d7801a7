"""Reservations that found no room yet: first come, first served, each with a deadline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.connections.deadline_timer import DeadlineTimer
from kv_transfer.messages import RequestSpec
from kv_transfer.worker.port import GatewayId


@dataclass(frozen=True, slots=True)
class _Pending:
    gateway: GatewayId
    request: RequestSpec
    deadline: float


class PendingReserves:
    """Grants what waits as soon as it `fits`, in order, and refuses what has waited for `wait_s`."""

    def __init__(
        self,
        *,
        wait_s: float,
        fits: Callable[[RequestSpec], bool],
        grant: Callable[[GatewayId, RequestSpec], None],
        refuse: Callable[[GatewayId, RequestSpec], None],
    ) -> None:
        self._wait_s = wait_s
        self._fits = fits
        self._grant = grant
        self._refuse = refuse
        self._queue: deque[_Pending] = deque()
        self._timer = DeadlineTimer(self.retry)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, gateway: GatewayId, request: RequestSpec) -> None:
        """Granted at once if it fits and nobody is before it."""
        self._queue.append(_Pending(gateway, request, time.monotonic() + self._wait_s))
        self.retry()

    def retry(self) -> None:
        """There may be room, or someone's time may be up."""
        now = time.monotonic()
        while self._queue:
            head = self._queue[0]
            if self._fits(head.request):
                self._queue.popleft()
                self._grant(head.gateway, head.request)
            elif head.deadline <= now:
                self._queue.popleft()
                self._refuse(head.gateway, head.request)
            else:
                break
        self._timer.arm(self._queue[0].deadline if self._queue else None)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to this one."""
        self._keep(lambda request: not (request.request_id == request_id and request.attempt <= attempt))

    def forget(self, gateway: GatewayId) -> None:
        self._queue = deque(pending for pending in self._queue if pending.gateway != gateway)

    def clear(self) -> list[tuple[GatewayId, RequestSpec]]:
        """Forget all, and name them."""
        waited = [(pending.gateway, pending.request) for pending in self._queue]
        self._queue.clear()
        return waited

    def stop(self) -> None:
        self._timer.stop()

    def _keep(self, is_kept: Callable[[RequestSpec], bool]) -> None:
        self._queue = deque(pending for pending in self._queue if is_kept(pending.request))
