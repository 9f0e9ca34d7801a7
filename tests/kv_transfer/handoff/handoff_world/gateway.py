"""A gateway that places, tries again, and keeps count of how each request ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from kv_transfer.messages import Message
from kv_transfer.messages.requests import Cancel, Refused, RequestSpec, Reserve, Reserved, Start
from tests.kv_transfer.handoff.handoff_world.model import DECODE, GATEWAY, request_spec

RESERVE_WAIT_S = 5.0
MAX_ATTEMPTS = 4
Terminal = Literal["finished", "failed", "cancelled"]


class Cluster(Protocol):
    now: float

    def post(self, to: str, sender: str, message: Message | None, payload: bytearray | None = None) -> None: ...

    def prefill_name(self, slot: int) -> str: ...


@dataclass(eq=False, slots=True)
class Generation:
    request_id: str
    num_prompt: int
    attempt: int = 1
    reserve_deadline: float | None = None
    is_decoding: bool = False
    ends: list[Terminal] = field(default_factory=list)

    @property
    def spec(self) -> RequestSpec:
        return request_spec(self.request_id, self.attempt, self.num_prompt)

    @property
    def is_kept(self) -> bool:
        """Its prompt is computed while decode has no room: every second request's."""
        return self.request_id[-1] in "13579"

    @property
    def prefill_slot(self) -> int:
        return self.attempt % 2


class Gateway:
    """Hears failures at once, as over its own connections; its Reserve, Start and Cancel may be lost or late."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.requests: dict[str, Generation] = {}
        self.num_refused = 0

    def submit(self, num_prompt: int) -> str:
        request_id = f"request-{len(self.requests)}"
        request = self.requests[request_id] = Generation(request_id, num_prompt)
        self._reserve(request)
        return request_id

    def cancel(self, request_id: str) -> None:
        request = self.requests[request_id]
        if not request.ends:
            self._end(request, "cancelled")

    def on_message(self, message: Message) -> None:
        if isinstance(message, Refused):
            self.num_refused += 1
            self.on_failed(message.request_id, message.attempt)
            return
        assert isinstance(message, Reserved)
        request = self._current(message.ticket.request_id, message.attempt)
        if request is not None:
            request.reserve_deadline = None
            prefill = self.cluster.prefill_name(request.prefill_slot)
            self.cluster.post(prefill, GATEWAY, Start(request=request.spec, ticket=message.ticket))

    def on_admitted(self, request_id: str, attempt: int) -> None:
        request = self._current(request_id, attempt)
        if request is None:
            self.cluster.post(DECODE, GATEWAY, Cancel(request_id=request_id, attempt=attempt))
        else:
            request.is_decoding = True

    def on_finished(self, request_id: str, attempt: int) -> None:
        request = self._current(request_id, attempt)
        if request is not None:
            request.ends.append("finished")

    def on_failed(self, request_id: str, attempt: int) -> None:
        """A worker gave the attempt up. What prefill says of an attempt that decode already runs is of no account."""
        request = self._current(request_id, attempt)
        if request is not None and not request.is_decoding:
            self._try_again(request)

    def on_prefill_lost(self, slot: int) -> None:
        for request in self.requests.values():
            if not request.ends and not request.is_decoding and request.prefill_slot == slot:
                self._try_again(request)

    def on_decode_lost(self) -> None:
        for request in self.requests.values():
            if not request.ends:
                self._try_again(request)

    def tick(self) -> None:
        for request in self.requests.values():
            deadline = request.reserve_deadline
            if not request.ends and deadline is not None and deadline <= self.cluster.now:
                self._try_again(request)

    def is_done(self) -> bool:
        return all(request.ends for request in self.requests.values())

    def _current(self, request_id: str, attempt: int) -> Generation | None:
        request = self.requests[request_id]
        return request if not request.ends and request.attempt == attempt else None

    def _try_again(self, request: Generation) -> None:
        request.is_decoding = False
        if request.attempt == MAX_ATTEMPTS:
            self._end(request, "failed")
            return
        request.attempt += 1
        self._reserve(request)

    def _reserve(self, request: Generation) -> None:
        request.reserve_deadline = self.cluster.now + RESERVE_WAIT_S
        self.cluster.post(DECODE, GATEWAY, Reserve(request=request.spec))
        if request.is_kept:
            prefill = self.cluster.prefill_name(request.prefill_slot)
            self.cluster.post(prefill, GATEWAY, Start(request=request.spec, ticket=None))

    def _end(self, request: Generation, terminal: Terminal) -> None:
        request.ends.append(terminal)
        for to in (DECODE, self.cluster.prefill_name(request.prefill_slot)):
            self.cluster.post(to, GATEWAY, Cancel(request_id=request.request_id, attempt=request.attempt))
