"""KV in host memory under a group of processes: layers that rest there, copies between the tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.forked_child import fork_ranks
from tests.support.small_models import SmallModel, random_prompts, runner_of
from tests.support.staged_stepping import StagedStepper, rank_caches

NUM_TOKENS = 8


@pytest.mark.parametrize(("family", "ring_groups"), [("gemma3", 1), ("gemma3", 2), ("deepseek-v3", 2)])
def test_layers_on_the_host_change_no_token(
    family: str, ring_groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four groups of one layer. The ring is poisoned before each step, in the memory of every rank."""
    fork_ranks(monkeypatch)
    model = SmallModel(family, tmp_path)
    runner = runner_of(
        model.folder,
        layers_per_group=1,
        kv_blocks=400,
        host_bytes=4 << 20,
        staging_bytes=4 << 20,
        ring_groups=ring_groups,
        num_threads=1,
        tensor_parallel=2,
    )
    for cache in rank_caches(runner):
        cache.tensor.fill_(torch.nan)
    stepper = StagedStepper(runner)
    prompts = random_prompts([5, 30, 17, 21])
    placed = [(), (0, 1, 2, 3), (1, 3), (0, 2)]
    seqs = [
        stepper.place(stepper.add(prompt, f"r{n}"), groups)
        for n, (prompt, groups) in enumerate(zip(prompts, placed, strict=True))
    ]
    stepper.generate_mixed(seqs, NUM_TOKENS)
    moved = seqs[0]
    copy = stepper.to_host(moved, 2)
    stepper.step([], (copy,))
    stepper.moved(moved, copy)
    stepper.give_back(moved, copy)
    back = stepper.to_device(seqs[1], 1)
    stepper.moved(seqs[1], back)
    stepper.step([(seqs[0], 1), (seqs[1], 1)], (back,))
    runner.close()
    for seq, prompt in zip(seqs, prompts, strict=True):
        found = seq.output_token_ids
        assert found == model.hugging_face(prompt, len(found), guess=found)
    assert len(seqs[0].output_token_ids) > NUM_TOKENS
