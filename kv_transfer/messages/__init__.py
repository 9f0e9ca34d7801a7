"""Every message that crosses between Legato's processes, and its encoding.

A message is a frozen dataclass, defined in the module of its conversation and registered there (`codec.message`); on
the wire it is the msgpack array `[tag, {field: value}]`. Decoding validates types and ranges (pydantic) and refuses
unknown tags and fields, so a malformed frame raises `MalformedMessageError` and nothing else. Messages hold plain data
only; behaviour lives in the state machines that take them.

Importing this package imports all modules that define messages, so that every process knows all of them.
"""

from __future__ import annotations

from typing import Final

from kv_transfer.messages import blocks, connections, handoff, requests, scheduling, workers
from kv_transfer.messages.codec import KINDS, MalformedMessageError, Message, decode, encode

PROTOCOL_VERSION: Final = 11
"""Raise it when a message or a field is added, removed or changed (`SamplingParams` and `WorkerSnapshot` travel in
some), and renew `tests/kv_transfer/encodings.json`: REWRITE_ENCODINGS=1 pytest tests/kv_transfer/test_messages.py.
Processes of two versions do not talk to each other. A message belongs to the module of its conversation; whoever takes
it has a `case` for it (`requests` says who that is)."""

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
