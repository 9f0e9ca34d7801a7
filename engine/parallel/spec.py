"""What the process of a rank is told at its start, and the words that it and its leader exchange. Plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from engine.kv_cache import KVLayout

# From the leader, after the specification. A word may be followed by a number, eight bytes, little-endian.
JOIN = b"join"  # all ranks have come: find each other
STEP = b"step"  # a step follows, told to the group in so many bytes
LOGITS = b"rows"  # hidden states follow, told to the group: so many rows
# From a rank.
HERE = b"here"  # its process runs
READY = b"done"  # it has loaded its part of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """`layout` and `num_blocks` are of the rank's own KV, for which it was given the memory.

    `rendezvous` is a file in which the ranks find each other. Every act of the group has to end within `timeout_s`.
    """

    model_folder: str
    rank: int
    degree: int
    layout: KVLayout
    num_blocks: int
    num_threads: int
    rendezvous: str
    timeout_s: float

    def to_bytes(self) -> bytes:
        fields = asdict(self)
        fields["layout"]["dtype"] = str(self.layout.dtype).removeprefix("torch.")
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, told: bytes) -> RankSpec:
        fields = json.loads(told)
        fields["layout"]["dtype"] = getattr(torch, fields["layout"]["dtype"])
        return cls(**fields | {"layout": KVLayout(**fields["layout"])})


def with_number(word: bytes, number: int) -> bytes:
    return word + number.to_bytes(8, "little")


def word_and_number(message: bytes) -> tuple[bytes, int]:
    """0 for a word without a number."""
    return message[:4], int.from_bytes(message[4:], "little")
