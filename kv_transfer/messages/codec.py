"""Messages to bytes and back."""

from __future__ import annotations

from typing import Any, Final

import msgpack
from pydantic import TypeAdapter, ValidationError

from engine.sampling.params import MAX_LOGIT_BIAS
from kv_transfer.messages.blocks import BlockEvents, BlockIndexRequest, BlockIndexSnapshot
from kv_transfer.messages.connections import (
    Goodbye,
    GroupAnswer,
    GroupOffer,
    GroupWord,
    Ping,
    SegmentAnswer,
    SegmentOffer,
    SlabAnnounced,
    SlabsFreed,
    SlabsWanted,
)
from kv_transfer.messages.decisions import AskDecisions, Decisions
from kv_transfer.messages.handoff import Abort, Commit, KeepAlive, Rejected, SlabHeader, Verified
from kv_transfer.messages.requests import Cancel, Computing, Refused, Reserve, Reserved, Start, StepFrame, StepOverdue
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
    Standing,
    Unplaceable,
)
from kv_transfer.messages.workers import ChangeRole, Heartbeat, PoolTarget, Register


class MalformedMessageError(ValueError):
    """The bytes are no message of this protocol version."""


Message = (
    Reserve
    | Reserved
    | Refused
    | Start
    | Cancel
    | Computing
    | StepFrame
    | StepOverdue
    | SlabHeader
    | Commit
    | Verified
    | Rejected
    | Abort
    | KeepAlive
    | Register
    | Heartbeat
    | ChangeRole
    | PoolTarget
    | BlockEvents
    | BlockIndexRequest
    | BlockIndexSnapshot
    | Place
    | Placement
    | Unplaceable
    | Ended
    | FirstToken
    | Queued
    | Standing
    | AskDecisions
    | Decisions
    | SloUpdate
    | Replicas
    | RoleRequest
    | RoleAnswer
    | Ping
    | Goodbye
    | SegmentOffer
    | SegmentAnswer
    | SlabsFreed
    | GroupOffer
    | GroupAnswer
    | GroupWord
    | SlabAnnounced
    | SlabsWanted
)

_ADAPTERS: Final[dict[str, TypeAdapter[Any]]] = {kind.__name__: TypeAdapter(kind) for kind in Message.__args__}


def encode(message: Message) -> bytes:
    """The message as msgpack bytes."""
    tag = type(message).__name__
    packed: bytes = msgpack.packb([tag, _ADAPTERS[tag].dump_python(message)])
    return packed


def decode(data: bytes | memoryview) -> Message:
    """The message in `data`. Raises MalformedMessageError for anything that is not exactly one message."""
    try:
        # Integer keys are allowed for `logit_bias`, whose size is the largest that a map may have.
        frame = msgpack.unpackb(data, strict_map_key=False, max_map_len=MAX_LOGIT_BIAS)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"not msgpack: {str(error) or 'nested too deeply'}") from error
    if not (isinstance(frame, list) and len(frame) == 2 and isinstance(frame[0], str)):
        raise MalformedMessageError("a message is an array of a tag and a map")
    tag, fields = frame
    adapter = _ADAPTERS.get(tag)
    if adapter is None:
        raise MalformedMessageError(f"unknown message {tag[:40]!r}: the peer speaks another protocol version")
    if not isinstance(fields, dict):
        raise MalformedMessageError(f"the fields of {tag} must be a map")
    try:
        message: Message = adapter.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedMessageError(f"{tag}.{where[:100]}: {first['msg'][:200]}") from error
    return message
