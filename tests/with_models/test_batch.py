"""What a step plan becomes on the way to the model: the tensors of its packed rows."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.kv.cache import KVCache
from engine.model.batch import Batch, build_batch
from engine.sequence import ScheduledSequence, StepPlan
from tests.support.stepping import GREEDY_WITH_ECHO, Stepper, recording_runner

PROMPT = [5, 99, 41, 300, 7, 7, 123]


def _parts(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.token_ids, batch.positions, batch.slot_mapping, batch.output_rows


def test_all_that_a_step_tells_the_device_goes_up_as_one_piece(llama_folder: Path) -> None:
    runner, _ = recording_runner(llama_folder, layers_per_group=2)
    stepper = Stepper(runner)
    decoding, judged = stepper.add([9, 8, 7]), stepper.add(PROMPT, params=GREEDY_WITH_ECHO)
    stepper.step([(decoding, 3)])
    stepper.reserve(decoding, 4)
    stepper.reserve(judged, 5)
    plan = StepPlan((ScheduledSequence(judged, 5), ScheduledSequence(decoding, 1)))
    elsewhere = build_batch(plan, KVCache(runner.kv_cache.layout, 8, torch.device("meta")))
    assert len({part.untyped_storage()._cdata for part in _parts(elsewhere)}) == 1
    batch = build_batch(plan, runner.kv_cache)  # the same, where nothing has to go up
    parts = _parts(batch)
    assert [part.shape for part in parts] == [part.shape for part in _parts(elsewhere)]
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in parts)
    assert batch.token_ids.tolist() == [*decoding.output_token_ids, *PROMPT[:5]]
    assert batch.positions.tolist() == [3, 0, 1, 2, 3, 4]
    assert batch.output_rows.tolist() == [0, 1, 2, 3, 4, 5]
    for seq, rows in ((decoding, slice(0, 1)), (judged, slice(1, 6))):
        assert seq.block_table is not None
        slots = runner.kv_cache.slot_addresses(seq.block_table.view, batch.positions[rows].numpy())
        assert batch.slot_mapping[:, rows].tolist() == slots.tolist()


def test_the_rows_between_a_segments_first_output_and_its_last(llama_folder: Path) -> None:
    """Of a decode its row, of a prompt's end the last one, of one that is judged all, and of one that goes on none."""
    runner, _ = recording_runner(llama_folder)
    stepper = Stepper(runner)
    decoding, judged = stepper.add([9, 8, 7]), stepper.add(PROMPT, params=GREEDY_WITH_ECHO)
    ending, going_on = stepper.add(PROMPT), stepper.add([*PROMPT, *PROMPT])
    stepper.step([(decoding, 3), (judged, 1), (ending, 2)])
    work = ((decoding, 1), (judged, 3), (ending, 5), (going_on, 9))
    for seq, count in work:
        stepper.reserve(seq, seq.num_computed + count)
    batch = build_batch(StepPlan(tuple(ScheduledSequence(*one) for one in work)), runner.kv_cache)
    found = [(part.first_row, part.num_queries, part.context_len) for part in batch.output_segments()]
    assert batch.num_tokens == 18 and found == [(0, 1, 4), (1, 3, 4), (8, 1, 7)]
