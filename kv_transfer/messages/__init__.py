"""Every message that crosses between Legato's processes, and its encoding.

A message is a frozen dataclass; on the wire it is the msgpack array `[tag, {field: value}]`. Decoding validates types
and ranges (pydantic) and refuses unknown tags and fields, so a malformed frame raises `MalformedMessageError` and
nothing else. Messages hold plain data only; behaviour lives in the state machines that take them.
"""

from __future__ import annotations

from typing import Final

from kv_transfer.messages.blocks import BlockChange, BlockEvents, BlockIndexRequest, BlockIndexSnapshot, IndexReport
from kv_transfer.messages.codec import MalformedMessageError, Message, decode, encode
from kv_transfer.messages.connections import Goodbye, Ping, SegmentAnswer, SegmentOffer, SlabsFreed
from kv_transfer.messages.decisions import AskDecisions, Decisions
from kv_transfer.messages.fields import (
    MAX_EVENT_CHANGES,
    MAX_HASHES,
    Count,
    Digest,
    Flag,
    Hashes,
    Items,
    NonNegative,
    PrefixSource,
    Real,
    Role,
    SourceName,
    Text,
    Tier,
    TokenId,
)
from kv_transfer.messages.handoff import Abort, Commit, KeepAlive, Rejected, SlabHeader, Verified
from kv_transfer.messages.requests import (
    Cancel,
    Endpoint,
    FailureEvent,
    Fence,
    Refused,
    RequestSpec,
    Reserve,
    Reserved,
    Start,
    StepFrame,
    Ticket,
    TokenEvent,
)
from kv_transfer.messages.scheduling import (
    Ended,
    FirstToken,
    Place,
    Placement,
    Queued,
    Replicas,
    RoleAnswer,
    RoleRequest,
    SloUpdate,
    Unplaceable,
)
from kv_transfer.messages.workers import (
    ChangeRole,
    DiskReport,
    Heartbeat,
    PoolTarget,
    Register,
    StepCostReport,
    TierBlocks,
    TiersReport,
    WorkerInfo,
    WorkerSnapshot,
)

PROTOCOL_VERSION: Final = 1

__all__ = [
    "MAX_EVENT_CHANGES",
    "MAX_HASHES",
    "PROTOCOL_VERSION",
    "Abort",
    "AskDecisions",
    "BlockChange",
    "BlockEvents",
    "BlockIndexRequest",
    "BlockIndexSnapshot",
    "Cancel",
    "ChangeRole",
    "Commit",
    "Count",
    "Decisions",
    "Digest",
    "DiskReport",
    "Ended",
    "Endpoint",
    "FailureEvent",
    "Fence",
    "FirstToken",
    "Flag",
    "Goodbye",
    "Hashes",
    "Heartbeat",
    "IndexReport",
    "Items",
    "KeepAlive",
    "MalformedMessageError",
    "Message",
    "NonNegative",
    "Ping",
    "Place",
    "Placement",
    "PoolTarget",
    "PrefixSource",
    "Queued",
    "Real",
    "Refused",
    "Register",
    "Rejected",
    "Replicas",
    "RequestSpec",
    "Reserve",
    "Reserved",
    "Role",
    "RoleAnswer",
    "RoleRequest",
    "SegmentAnswer",
    "SegmentOffer",
    "SlabHeader",
    "SlabsFreed",
    "SloUpdate",
    "SourceName",
    "Start",
    "StepCostReport",
    "StepFrame",
    "Text",
    "Ticket",
    "Tier",
    "TierBlocks",
    "TiersReport",
    "TokenEvent",
    "TokenId",
    "Unplaceable",
    "Verified",
    "WorkerInfo",
    "WorkerSnapshot",
    "decode",
    "encode",
]
