"""Turns a received frame into what a link's owner gets."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.connections.frames import Frame
from kv_transfer.messages import Message
from kv_transfer.transports.base import Delivery, SlabBytes


def deliver(frame: Frame) -> Delivery:
    """A delivery whose payload, if there is one, is the frame's own buffer."""
    if frame.payload is None:
        return Delivery(frame.message, None, _nothing)
    return delivery_of(frame.message, frame.payload.view, frame.payload.discard)


def delivery_of(message: Message, payload: SlabBytes, release: Callable[[], None]) -> Delivery:
    """Tensors cannot be made read-only."""
    return Delivery(message, payload.toreadonly() if isinstance(payload, memoryview) else payload, Once(release))


class Once:
    """A call that must be made exactly once."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        assert self._function is not None, "a delivery was released twice"
        function, self._function = self._function, None
        function()


def _nothing() -> None:
    pass
