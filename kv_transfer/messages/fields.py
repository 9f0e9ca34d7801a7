"""The types of messages' fields, and what they may hold."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

from pydantic import AfterValidator, Field

from engine.kv.prefix import HASH_BYTES

# Strict, because by default pydantic takes "5", 5.0 and true for integers; and finite, because a NaN passes through
# every comparison that a scheduler might guard itself with.
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Digest = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0.0)]
Role = Literal["prefill", "decode"]

_Item = TypeVar("_Item")
# Stops at the first bad item: a megabyte of bad items must not cost a gigabyte of error reports.
Items = Annotated[list[_Item], Field(fail_fast=True)]

MAX_HASHES: Final = 16_384  # in one value
MAX_EVENT_CHANGES: Final = 32  # in one message: 8 MiB of hashes, half of what a frame may hold
Tier = Literal["device", "host", "disk"]
SourceName = Literal["neighbours", "disk"]
PrefixSource = Literal["device", "host", "neighbours", "disk"]


def _whole_hashes(joined: bytes) -> bytes:
    if len(joined) % HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes are not a number of hashes of {HASH_BYTES} bytes")
    return joined


# Hashes of columns (see `engine.kv.prefix`), joined: one value instead of thousands.
Hashes = Annotated[bytes, Field(strict=True, max_length=MAX_HASHES * HASH_BYTES), AfterValidator(_whole_hashes)]


def _whole_floats(values: bytes) -> bytes:
    if len(values) % 4:
        raise ValueError(f"{len(values)} bytes are not a number of floats of 4 bytes")
    return values


# A vector of length 1, as little-endian float32: a list of numbers would take ten times as long to read.
Embedding = Annotated[bytes, Field(strict=True, max_length=2**20), AfterValidator(_whole_floats)]

# Encoded by whoever says it, for whoever knows how to read it.
Opaque = Annotated[bytes, Field(strict=True, max_length=4 * 2**20)]
