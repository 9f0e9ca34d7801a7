"""What a leader tells its ranks: it arrives as it was, and no more of it than they need."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.packing import WeightPacking
from engine.checkpoint.quantisation import Quantisation
from engine.kv.cache import KVLayout
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.parallel.protocol import (
    JOIN,
    STEP,
    RankSpec,
    num_on_device,
    pack_batch,
    unpack_batch,
    with_number,
    word_and_number,
)
from kernels.interface import Segment
from tests.support.model_families import FAMILIES, build_oracle

PACKINGS = {"as stored": None, "awq": WeightPacking(method="awq", bits=4, zero_offset=0)}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_specification_arrives_as_it_was(family: str, packing: str, tmp_path: Path) -> None:
    build_oracle(family, tmp_path)
    layout = KVLayout(num_layers=4, layers_per_group=2, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.bfloat16)
    spec = RankSpec(
        model_folder=str(tmp_path),
        config=dataclasses.replace(ModelConfig.from_folder(tmp_path), packing=PACKINGS[packing]),
        rank=1,
        degree=2,
        layout=layout,
        num_threads=1,
        rendezvous="/nowhere",
        timeout_s=2.5,
        device="cuda:1",
        batch_invariant=True,
        activation_bits=16,
        quantisation=Quantisation(name="int4", group_size=32) if packing == "as stored" else None,
    )
    assert RankSpec.from_bytes(spec.to_bytes()) == spec


def test_a_word_may_have_a_number() -> None:
    assert word_and_number(with_number(STEP, 2**40)) == (STEP, 2**40)
    assert word_and_number(JOIN) == (JOIN, 0)


def test_a_batch_arrives_as_it_computes() -> None:
    block_size = 4
    tables = [np.arange(20, dtype=np.int32).reshape(2, 10), np.arange(100, 106, dtype=np.int32).reshape(2, 3)]
    batch = Batch(
        token_ids=torch.tensor([7, 8, 9, 10]),
        positions=torch.tensor([16, 3, 4, 5]),
        slot_mapping=torch.arange(8).view(2, 4),
        segments=(
            Segment(first_row=0, num_queries=1, context_len=17, block_table=tables[0]),
            Segment(first_row=1, num_queries=3, context_len=6, block_table=tables[1]),
        ),
        output_rows=torch.tensor([0, 3]),
        awaited_rows=torch.tensor([0]),
        awaited_from=torch.tensor([1]),
        sampling_items=(1, 0),
        prompt_spans=(),
    )
    message, on_device = pack_batch(batch, block_size)
    assert num_on_device(message) == len(on_device)
    told = unpack_batch(message, on_device)
    for name in ("token_ids", "positions", "slot_mapping", "output_rows"):
        assert torch.equal(getattr(told, name), getattr(batch, name)), name
    for ours, theirs in zip(told.segments, batch.segments, strict=True):
        columns = -(-theirs.context_len // block_size)
        assert np.array_equal(ours.block_table, theirs.block_table[:, :columns])
        assert dataclasses.replace(ours, block_table=theirs.block_table) == theirs
    assert not told.sampling_items and not len(told.awaited_rows)


def test_a_message_that_ends_too_early_is_not_taken_for_a_step() -> None:
    table = np.zeros((1, 1), dtype=np.int32)
    one = torch.zeros(1, dtype=torch.int64)
    batch = Batch(
        token_ids=one,
        positions=one,
        slot_mapping=one[None],
        segments=(Segment(first_row=0, num_queries=1, context_len=1, block_table=table),),
        output_rows=one,
        awaited_rows=one[:0],
        awaited_from=one[:0],
        sampling_items=(),
        prompt_spans=(),
    )
    message, on_device = pack_batch(batch, 4)
    with pytest.raises(AssertionError, match="ends 4 bytes too early"):
        unpack_batch(message[:-4], on_device)
