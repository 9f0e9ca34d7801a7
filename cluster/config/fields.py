"""What settings are made of: frozen nodes, and sizes that people write as "2GiB", budgets also as "25%", KV memory also
in blocks.

Knows how to read and print them, not where they are used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from kv_transfer.tiers.config import Budget

_UNITS: Final = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)\s*")
_SHARE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_LEAST_BARE: Final = 2**20  # bytes that need no unit
_BLOCKS: Final = re.compile(r"\s*(\d+)\s*blocks?\s*")


class Settings(BaseModel):
    """A node of the configuration's tree: frozen, refuses unknown fields and does not convert types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def parse_size(value: object) -> int:
    """Read a size in bytes from an int or a text such as "64MiB". Raises ValueError with the accepted forms."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no size; write bytes as a number, or a text such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(num_bytes: int) -> str:
    """The shortest exact text for a size."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return str(num_bytes)


SizeBytes = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]

OrNothing = BeforeValidator(lambda value: None if value == "" else value)
"""For texts that may be left out: one without a character says so, too."""

OrOff = BeforeValidator(lambda value: "off" if value is False else value)
"""For fields that may be "off": written without quotes in YAML, that is a truth value."""


def parse_budget(value: object) -> Budget:
    """Read a budget from bytes, a text such as "2GiB", or a share such as "25%".
    Raises ValueError with the accepted forms."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, str) and (match := _SHARE.fullmatch(value)):
        return Budget(share=float(match[1]) / 100)
    return Budget(num_bytes=_size(value, "a share of what the machine has, such as 25%"))


def _size(value: object, other_forms: str) -> int:
    """Read a size in bytes. Raises ValueError, with the other forms, for what is none, and for a bare number so small
    that a unit or a percent sign must have been meant."""
    try:
        num_bytes = parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error} (or {other_forms})") from error
    if 0 < num_bytes < _LEAST_BARE and str(value).strip().isdecimal():
        meant = f"did you mean {num_bytes}%, or {num_bytes}GiB?" if num_bytes <= 100 else "write its unit, such as GiB"
        raise ValueError(f"{value} is a number of bytes, which holds no KV; {meant}")
    return num_bytes


def format_budget(budget: Budget) -> str:
    return f"{100 * (budget.share or 0.0):g}%" if budget.num_bytes is None else format_size(budget.num_bytes)


BudgetField = Annotated[Budget, PlainValidator(parse_budget), PlainSerializer(format_budget)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """How large one worker's KV cache is: exactly one of the three is set. `share`: the share of the device's memory
    that may be taken in all: by the KV cache, the model, its largest step and what others use."""

    num_bytes: int | None = None
    num_blocks: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if [self.num_bytes, self.num_blocks, self.share].count(None) != 2:
            raise ValueError("give the KV memory in bytes, in blocks, or as a share of the device's")
        if self.share is None and (self.num_bytes or self.num_blocks or 0) < 1:
            raise ValueError("the KV memory must be larger than nothing; write for example 2GiB, or 4096 blocks")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError("a share of the device's memory is more than 0% and at most 100%; write for example 90%")

    @classmethod
    def parse(cls, value: object) -> KvMemory:
        """Read it from bytes, or a text such as "2GiB", "4096 blocks" or "90%".
        Raises ValueError with the accepted forms."""
        if isinstance(value, KvMemory):
            return value
        if isinstance(value, str) and (match := _BLOCKS.fullmatch(value)):
            return cls(num_blocks=int(match[1]))
        if isinstance(value, str) and (match := _SHARE.fullmatch(value)):
            return cls(share=float(match[1]) / 100)
        other_forms = "a number of blocks, such as 4096 blocks, or a share, such as 90%"
        return cls(num_bytes=_size(value, other_forms))

    def __str__(self) -> str:
        if self.share is not None:
            return f"{100 * self.share:g}%"
        return f"{self.num_blocks} blocks" if self.num_bytes is None else format_size(self.num_bytes)


KvMemoryField = Annotated[KvMemory, PlainValidator(KvMemory.parse), PlainSerializer(str)]
