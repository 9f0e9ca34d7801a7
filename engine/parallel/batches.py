"""What a forward pass needs of a batch, as bytes, for the ranks that are told what to compute.

What stands on the host goes along as one message, what stands on the device as another, so that telling a step waits
for neither. Of block tables only the columns that hold the step's context are told. The leader
packs, its followers unpack.

Shape legend: T packed tokens, G layer groups, R output rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.batch import Batch
from kernels.interface import Segment

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
    num_tokens, num_groups, num_rows, _ = map(int, _Reader(message.numpy()).take(4))
    return (2 + num_groups) * num_tokens + num_rows


def unpack_batch(message: Tensor, on_device: Tensor) -> Batch:
    """The batch as it computes. It says nothing of who samples."""
    reader = _Reader(message.numpy())
    num_tokens, num_groups, num_rows, num_segments = reader.take(4).tolist()
    counts = [num_tokens, num_tokens, num_groups * num_tokens, num_rows]
    token_ids, positions, slots, output_rows = torch.split(on_device, counts)
    segments = reader.take(num_segments * _SEGMENT_FIELDS).reshape(num_segments, _SEGMENT_FIELDS).tolist()
    nothing = on_device[:0]
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots.view(num_groups, num_tokens),
        segments=tuple(reader.segment(num_groups, *fields) for fields in segments),
        output_rows=output_rows,
        awaited_rows=nothing,
        awaited_from=nothing,
        sampling_items=(),
        prompt_spans=(),
    )


class _Reader:
    """Takes arrays off the front of a message, without copying them."""

    def __init__(self, message: npt.NDArray[np.uint8]) -> None:
        self._rest = message

    def take(self, count: int) -> npt.NDArray[np.int64]:
        return self._bytes(count * 8).view(np.int64)

    def segment(self, num_groups: int, first_row: int, num_queries: int, context_len: int, num_columns: int) -> Segment:
        table = self._bytes(num_groups * num_columns * 4).view(np.int32).reshape(num_groups, num_columns)
        return Segment(first_row=first_row, num_queries=num_queries, context_len=context_len, block_table=table)

    def _bytes(self, count: int) -> npt.NDArray[np.uint8]:
        taken, self._rest = self._rest[:count], self._rest[count:]
        assert len(taken) == count, f"a message of a step ends {count - len(taken)} bytes too early"
        return taken


def _joined(parts: Iterable[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate([np.asarray(part, dtype=dtype).ravel() for part in parts])
