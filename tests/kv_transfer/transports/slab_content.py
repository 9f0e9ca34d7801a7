"""Bytes into slabs and out of deliveries, whether they lie in memory of the host or of a GPU."""

from __future__ import annotations

import torch

from kv_transfer.messages.scheduling import Ended
from kv_transfer.transports.base import Delivery, Link, Slab


def write(slab: Slab, payload: bytes) -> None:
    assert len(slab.view) == len(payload)
    if isinstance(slab.view, memoryview):
        slab.view[:] = payload
    else:
        slab.view.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        torch.cuda.synchronize()


def content(delivery: Delivery) -> bytes:
    assert delivery.payload is not None
    if isinstance(delivery.payload, memoryview):
        return bytes(delivery.payload)
    return delivery.payload.cpu().numpy().tobytes()


async def send(link: Link, request_id: str, payload: bytes | None = None) -> None:
    if payload is None:
        await link.send(Ended(request_id=request_id))
        return
    slab = await link.acquire(len(payload))
    write(slab, payload)
    await link.send(Ended(request_id=request_id), slab)
