"""What makes a class a message, and messages to bytes and back.

A message is registered where it is defined: `@message` on a subclass of `Message`. On the wire it is the msgpack array
`[class name, {field: value}]`, fields in the order of their definition.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, dataclass_transform

import msgpack
from pydantic import ConfigDict, TypeAdapter, ValidationError

from engine.sampling.params import MAX_LOGIT_BIAS


class MalformedMessageError(ValueError):
    """The bytes are no message of this protocol version."""


class Message:
    """Base of all messages, for the types of those who send and receive them."""

    __slots__ = ()


_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")
_STRICT: Final = ConfigDict(extra="forbid")

KINDS: Final[dict[str, type[Message]]] = {}
"""All messages whose modules have been imported, by name. Only `message` adds to them."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[_T]) -> type[_T]:
    """Makes a class a part of messages: a frozen dataclass that takes no other fields than its own off the wire."""
    cls.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def message(cls: type[_M]) -> type[_M]:
    """Makes a class a message: a record that is encoded and decoded under its own name, which no other may have."""
    assert cls.__name__ not in KINDS, f"there are two messages {cls.__name__}"
    made = record(cls)
    KINDS[made.__name__] = made
    return made


@functools.cache
def _adapter(tag: str) -> TypeAdapter[Any]:
    """What validates and dumps messages of this kind. Made for the first one: to make all fifty takes a sixth of a
    second of every process's start, and none has use for all."""
    return TypeAdapter(KINDS[tag])


def encode(message: Message) -> bytes:
    """The message as msgpack bytes."""
    tag = type(message).__name__
    packed: bytes = msgpack.packb([tag, _adapter(tag).dump_python(message)])
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
    if tag not in KINDS:
        raise MalformedMessageError(f"unknown message {tag[:40]!r}: the peer speaks another protocol version")
    if not isinstance(fields, dict):
        raise MalformedMessageError(f"the fields of {tag} must be a map")
    try:
        decoded: Message = _adapter(tag).validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedMessageError(f"{tag}.{where[:100]}: {first['msg'][:200]}") from error
    return decoded
