"""Sizes of the tiers and of layer groups, and models loaded with host memory."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.quantisation import Quantisation
from engine.kv.cache import KVLayout
from engine.kv.sizes import KVMemory, KVSizes, layers_per_group_for, size_tiers
from engine.steps.loading import EngineConfig, HostMemory, LoadedModel, load_model
from tests.support.small_models import random_prompts
from tests.support.staged_stepping import StagedStepper
from tests.support.stepping import Stepper, recording_runner

LAYOUT = KVLayout(num_layers=4, layers_per_group=1, num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.float32)
BLOCK = LAYOUT.block_bytes


def load(folder: Path, host_memory: HostMemory | None = None, **wanted: Any) -> LoadedModel:
    options: dict[str, Any] = {"block_size": 4, "kv_blocks": 40, "dtype": "float32", "num_threads": 1} | wanted
    return load_model(EngineConfig(model_ref=str(folder), model_name="model", **options), host_memory)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, 1), (4, 1), (6, 1), (12, 1), (13, 2), (16, 2), (18, 2), (24, 2), (26, 3), (28, 4), (30, 3), (32, 4), (80, 8)],
)
def test_layers_are_cut_with_little_waste(num_layers: int, expected: int) -> None:
    assert layers_per_group_for(num_layers) == expected


def test_there_are_6_to_12_groups_where_there_are_layers_enough() -> None:
    for num_layers in range(6, 200):
        assert 6 <= -(-num_layers // layers_per_group_for(num_layers)) <= 12, num_layers


def test_ring_and_host_memory_come_on_top() -> None:
    memory = KVMemory(kv_bytes=10 * BLOCK + 1, host_bytes=21 * BLOCK, staging_bytes=13 * BLOCK, ring_groups=3)
    sizes = size_tiers(LAYOUT, memory)
    assert (sizes.pool_blocks, sizes.host_blocks, sizes.device_blocks) == (10, 21, 10 + 12)
    assert sizes.ring is not None
    assert (sizes.ring.num_groups, sizes.ring.num_blocks) == (3, 4)
    assert size_tiers(LAYOUT, KVMemory(kv_blocks=10)) == KVSizes(pool_blocks=10, host_blocks=0, ring=None)


def test_a_ring_has_no_more_slots_than_there_are_groups() -> None:
    ring = size_tiers(LAYOUT, KVMemory(kv_blocks=4, host_bytes=9 * BLOCK, staging_bytes=8 * BLOCK, ring_groups=9)).ring
    assert ring is not None
    assert (ring.num_groups, ring.num_blocks) == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"host_bytes": 3 * BLOCK}, "host memory for KV of 3 blocks cannot hold a single token"),
        ({"staging_bytes": 8 * BLOCK}, "staging_bytes is set without host_bytes"),
        ({"host_bytes": 9 * BLOCK, "staging_bytes": BLOCK}, "2 slots of a single block take"),
        ({"host_bytes": 9 * BLOCK, "staging_bytes": 9 * BLOCK, "ring_groups": 0}, "ring_groups is 0"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        size_tiers(LAYOUT, KVMemory(kv_blocks=10, **sizes))


def test_without_host_memory_all_layers_share_a_table(llama_folder: Path) -> None:
    model = load(llama_folder)
    assert model.layout.num_layer_groups == 1
    assert (model.host_cache, model.host_pool, model.staging_columns) == (None, None, 0)
    assert model.block_pool.num_blocks == 40
    assert model.max_model_len == 160


@pytest.mark.parametrize(
    ("host_blocks", "staging_blocks", "expected"),
    [
        (80, 32, 16 * 4),  # the ring's slot is the shorter one
        (60, 48, 15 * 4),  # host memory is
        (80, 16, 10 * 4),  # the device holds more than a slot
        (80, 0, 10 * 4),  # nothing can be staged
    ],
)
def test_the_longest_sequence_is_that_of_either_tier(
    llama_folder: Path, host_blocks: int, staging_blocks: int, expected: int
) -> None:
    model = load(llama_folder, host_bytes=host_blocks * BLOCK, staging_bytes=staging_blocks * BLOCK)
    model.runner.close()
    assert model.layout.num_layer_groups == 4
    assert model.max_model_len == expected
    assert model.staging_columns == staging_blocks // 2
    assert model.block_pool.num_blocks == 40
    assert model.kv_cache.num_blocks == 40 + staging_blocks
    assert model.host_pool is not None
    assert model.host_pool.num_blocks == host_blocks


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"max_model_len": 100_000}, "max_model_len is 100000, but the model was made for"),
        ({"max_model_len": 200}, "max_model_len is 200, but the KV memory holds 160 tokens"),
        ({"quantisation": Quantisation(name="int8", group_size=48)}, "cannot be quantised in groups of 48"),
    ],
)
def test_what_does_not_go_together_is_told_before_weights_are_read(
    llama_folder: Path, tmp_path: Path, wanted: dict[str, Any], told: str
) -> None:
    """They take minutes where they are large, and here cannot be read at all."""
    damaged = Path(shutil.copytree(llama_folder, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=told):
        load(damaged, **wanted)


def test_a_loaded_model_computes_over_memory_that_others_read(llama_folder: Path) -> None:
    """The prompt's KV is longer than the device holds and is found in the mapping."""
    prompt = random_prompts([50])[0]
    asked: list[tuple[KVLayout, int]] = []
    mapping = mmap.mmap(-1, 80 * BLOCK)

    def host_memory(layout: KVLayout, num_blocks: int) -> memoryview:
        asked.append((layout, num_blocks))
        return memoryview(mapping)

    model = load(llama_folder, host_memory, host_bytes=80 * BLOCK, staging_bytes=36 * BLOCK)
    assert asked == [(model.layout, 80)]
    stepper = StagedStepper(model.runner)
    seq = stepper.place(stepper.add(prompt), range(4))
    tokens = stepper.generate(seq, 6, chunk=16)
    model.runner.close()
    seen = torch.frombuffer(bytearray(mapping), dtype=torch.int32)
    assert torch.equal(seen, stepper.host_cache.tensor.view(torch.int32).flatten())
    assert seen.count_nonzero() > 50 * LAYOUT.bytes_per_token_layer // 4
    plain = Stepper(recording_runner(llama_folder)[0])
    assert tokens == plain.generate(plain.add(prompt), 6)
