"""What the process of a rank is told: its specification at its start, words that it and its leader exchange, and what a
forward pass needs of a batch, as bytes.

Of a batch, what stands on the host goes along as one message, what stands on the device as another, so that telling a
step waits for neither. Of block tables only the columns that hold the step's context are told. The leader packs, its
followers unpack.

Shape legend: T packed tokens, G layer groups, R output rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter
from torch import Tensor

from engine.checkpoint.quantisation import Quantisation
from engine.kv.cache import KVLayout
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from kernels.interface import Segment
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


_SIZES = 4  # numbers that a message begins with: tokens, layer groups, output rows, segments
_SEGMENT_FIELDS = 4  # first row, queries, context, columns of its table


def pack_batch(batch: Batch, block_size: int) -> tuple[Tensor, Tensor]:
    """`[n]` uint8 of the host, and `[m]` int64 on the batch's device. The tokens are all known there."""
    tables = [segment.block_table[:, : -(-segment.context_len // block_size)] for segment in batch.segments]
    segments = [
        (segment.first_row, segment.num_queries, segment.context_len, table.shape[1])
        for segment, table in zip(batch.segments, tables, strict=True)
    ]
    sizes = (batch.num_tokens, len(batch.slot_mapping), len(batch.output_rows), len(segments))
    numbers = _joined([np.array(sizes), np.array(segments)], np.int64)
    message = np.concatenate([numbers.view(np.uint8), _joined(tables, np.int32).view(np.uint8)])
    on_device = (batch.token_ids, batch.positions, batch.slot_mapping.view(-1), batch.output_rows)
    return torch.from_numpy(message), torch.cat(on_device)


def num_on_device(message: Tensor) -> int:
    """How many numbers the second part of a batch has, by its first one."""
    num_tokens, num_groups, num_rows, _ = _sizes(message.numpy())
    return (2 + num_groups) * num_tokens + num_rows


def unpack_batch(message: Tensor, on_device: Tensor) -> Batch:
    """The batch as it computes. It says nothing of who samples."""
    content = message.numpy()
    num_tokens, num_groups, num_rows, num_segments = _sizes(content)
    counts = [num_tokens, num_tokens, num_groups * num_tokens, num_rows]
    token_ids, positions, slots, output_rows = torch.split(on_device, counts)
    numbers, tables = np.split(content, [(_SIZES + num_segments * _SEGMENT_FIELDS) * 8])
    fields = numbers.view(np.int64)[_SIZES:].reshape(num_segments, _SEGMENT_FIELDS)
    ends = np.cumsum(num_groups * fields[:, -1])
    lacking = 4 * int(ends[-1]) - len(tables)
    assert not lacking, f"a message of a step ends {lacking} bytes too early"
    blocks = np.split(tables.view(np.int32), ends[:-1])
    segments = [
        Segment(first_row=first, num_queries=count, context_len=context, block_table=table.reshape(num_groups, columns))
        for (first, count, context, columns), table in zip(fields.tolist(), blocks, strict=True)
    ]
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots.view(num_groups, num_tokens),
        segments=tuple(segments),
        output_rows=output_rows,
        sampling_items=(),
        prompt_spans=(),
    )


def _sizes(message: npt.NDArray[np.uint8]) -> list[int]:
    sizes: list[int] = message[: _SIZES * 8].view(np.int64).tolist()
    return sizes


def _joined(parts: Iterable[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate([np.asarray(part, dtype=dtype).ravel() for part in parts])
