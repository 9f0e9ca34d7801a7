"""What the process of a rank is told at its start, and the words that it and its leader exchange. Plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from pydantic import TypeAdapter

from engine.checkpoint.quantisation import Quantisation
from engine.kv.cache import KVLayout
from engine.model.config import ModelConfig
from kernels.quantised_weight import ActivationBits

# From the leader, after the specification. A word may be followed by a number, eight bytes, little-endian.
JOIN = b"join"  # all ranks have come: find each other
STEP = b"step"  # a step follows, told to the group in so many bytes
KV = b"kvkv"  # the memory of its KV follows, as a file descriptor: so many blocks, in place of what it had
LOGITS = b"rows"  # hidden states follow, told to the group: so many rows
FREE = b"free"  # give back what the allocator keeps, and meet
# From a rank.
HERE = b"here"  # its process runs
READY = b"done"  # it has loaded its part of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """`layout` is of the rank's own KV.

    `rendezvous` is a file in which the ranks find each other. Every act of the group has to end within `timeout_s`.
    `batch_invariant`, `activation_bits`: see `kernels_for`; `quantisation`: see `load_weights`.
    """

    model_folder: str
    config: ModelConfig  # of the whole model: reading it from the folder takes seconds
    rank: int
    degree: int
    layout: KVLayout
    num_threads: int
    rendezvous: str
    timeout_s: float
    expert_parallel: bool = False
    device: str = "cpu"
    batch_invariant: bool = False
    activation_bits: ActivationBits = 8
    quantisation: Quantisation | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), default=_dtype_name).encode()

    @classmethod
    def from_bytes(cls, told: bytes) -> RankSpec:
        fields = json.loads(told)
        layout, config, quantisation = (fields.pop(name) for name in ("layout", "config", "quantisation"))
        layout["dtype"] = getattr(torch, layout["dtype"])
        return cls(
            layout=KVLayout(**layout),
            config=TypeAdapter(ModelConfig).validate_python(config),
            quantisation=None if quantisation is None else Quantisation(**quantisation),
            **fields,
        )


def _dtype_name(value: object) -> str:
    assert isinstance(value, torch.dtype), f"a specification holds no {type(value).__name__}"
    return str(value).removeprefix("torch.")


def with_number(word: bytes, number: int) -> bytes:
    return word + number.to_bytes(8, "little")


def word_and_number(message: bytes) -> tuple[bytes, int]:
    """0 for a word without a number."""
    return message[:4], int.from_bytes(message[4:], "little")
