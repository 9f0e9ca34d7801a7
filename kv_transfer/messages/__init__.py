"""Every message that crosses between Legato's processes, and its encoding.

A message is a frozen dataclass, defined in the module of its conversation and registered there (`codec.message`); on
the wire it is the msgpack array `[tag, {field: value}]`. Decoding validates types and ranges (pydantic) and refuses
unknown tags and fields, so a malformed frame raises `MalformedMessageError` and nothing else. Messages hold plain data
only; behaviour lives in the state machines that take them.

Who says what, and who takes it:

    gateway → worker      `requests`     `WorkerConnections.post`         `_on_message` of both workers
    worker → gateway      `requests`     `GatewayPort.post`               `cluster.gateway.orchestrator.Orchestrator`
    gateway → scheduler   `scheduling`   `SchedulerClient`                `SchedulerServer._serve_gateway`
    scheduler → gateway   `scheduling`   `cluster.scheduler.server`       `SchedulerClient._on_message`
    worker → scheduler    `workers`      `Registration`, in its reports   `SchedulerServer._serve_worker`
    scheduler → worker    `workers`      `cluster.scheduler.server`       `WorkerReplica._on_order`
    prefill ↔ decode      `handoff`      the hand-off's two sides         `kv_transfer.handoff`
    what tiers hold       `blocks`       `Registration`                   `SchedulerServer._serve_worker`

What a worker has to say at once is a message of its own; what may wait half a second is a field of `WorkerSnapshot`.

Importing this package imports all modules that define messages, so that every process knows all of them.
"""

from __future__ import annotations

from typing import Final

from kv_transfer.messages import blocks, connections, handoff, requests, scheduling, workers
from kv_transfer.messages.codec import KINDS, MalformedMessageError, Message, decode, encode

PROTOCOL_VERSION: Final = 23
"""Raise it when a message or a field is added, removed or changed (`SamplingParams` and `WorkerSnapshot` travel in
some), and renew `tests/kv_transfer/encodings.json`: REWRITE_ENCODINGS=1 pytest tests/kv_transfer/test_messages.py.
Processes of two versions do not talk to each other. A message belongs to the module of its conversation; whoever takes
it has a `case` for it, see above."""

__all__ = [
    "KINDS",
    "PROTOCOL_VERSION",
    "MalformedMessageError",
    "Message",
    "blocks",
    "connections",
    "decode",
    "encode",
    "handoff",
    "requests",
    "scheduling",
    "workers",
]
