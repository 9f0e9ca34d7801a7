"""The runner's contract with schedulers and samplers, and what loading a model refuses."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.weights import load_output_layer, load_weights
from engine.model.config import ModelConfig
from engine.model.rope import RopeConfig
from engine.sampling.params import SamplingParams
from engine.sequence import ScheduledSequence, StepPlan
from engine.steps.runner import ModelRunner
from kernels.quantised_weight import QuantisedWeight
from tests.support.model_families import VOCAB_SIZE, build_oracle
from tests.support.small_models import runner_of
from tests.support.stepping import GREEDY_WITH_ECHO, Stepper, recording_runner

PROMPT = [5, 99, 41, 300, 7, 7, 123, 250, 18, 64, 2]


@pytest.fixture
def copied(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may spoil."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


# --- steps -----------------------------------------------------------------------------------------------------------


def test_output_follows_the_plan_not_the_packing(llama_folder: Path) -> None:
    runner, _ = recording_runner(llama_folder)
    stepper = Stepper(runner)
    long, short, partial = stepper.add(PROMPT, "long"), stepper.add([4], "short"), stepper.add(PROMPT, "partial")
    alone = Stepper(recording_runner(llama_folder)[0])
    expected = [alone.generate(alone.add(prompt), 1)[0] for prompt in (PROMPT, [4])]
    sampled = stepper.step([(long, len(PROMPT)), (partial, 3), (short, 1)])
    assert [token and token.token_id for token in sampled] == [expected[0], None, expected[1]]


def test_an_empty_plan_does_nothing(llama_folder: Path) -> None:
    output = recording_runner(llama_folder)[0].execute(StepPlan(()))
    assert output.sampled == []
    assert output.prompt_logprobs == []


def test_a_step_that_samples_nothing_still_computes_kv(llama_folder: Path) -> None:
    runner, _ = recording_runner(llama_folder)
    stepper = Stepper(runner)
    seq, whole = stepper.add(PROMPT), stepper.add(PROMPT)
    assert stepper.step([(seq, len(PROMPT) - 1)]) == [None]
    assert stepper.generate(seq, 3) == stepper.generate(whole, 3)


@pytest.mark.parametrize("layers_per_group", [1, 3])
def test_on_layer_comes_when_the_layers_kv_of_all_items_is_there(llama_folder: Path, layers_per_group: int) -> None:
    runner, _ = recording_runner(llama_folder, layers_per_group=layers_per_group)
    stepper = Stepper(runner)
    decoding, prefilling = stepper.add([9, 8, 7]), stepper.add(PROMPT)
    stepper.step([(decoding, 3)])
    layout = runner.kv_cache.layout
    seen: dict[int, list[torch.Tensor]] = {}

    def kv_of(layer: int) -> list[torch.Tensor]:
        slabs = []
        for seq, count in ((decoding, 4), (prefilling, 6)):
            assert seq.block_table is not None
            slabs.append(torch.empty(2, count, layout.num_kv_heads, layout.head_dim))
            runner.kv_cache.read_layer(layer, seq.block_table.view[layer // layers_per_group], 0, count, slabs[-1])
        return slabs

    stepper.reserve(decoding, 4)
    stepper.reserve(prefilling, 6)
    plan = StepPlan((ScheduledSequence(prefilling, 6), ScheduledSequence(decoding, 1)))
    runner.execute(plan, on_layer=lambda layer: seen.update({layer: kv_of(layer)}))
    assert list(seen) == [0, 1, 2, 3]
    for layer, slabs in seen.items():
        for slab, final in zip(slabs, kv_of(layer), strict=True):
            assert not slab.isnan().any()
            assert torch.equal(slab, final)


def test_prompt_logprobs_judge_each_next_prompt_token(llama_folder: Path) -> None:
    runner, sampler = recording_runner(llama_folder)
    stepper = Stepper(runner)
    seq, other = stepper.add(PROMPT, params=GREEDY_WITH_ECHO), stepper.add([3, 4])
    stepper.reserve(seq, len(PROMPT))
    stepper.reserve(other, 2)
    logprobs: list[float] = []
    for count in (4, 1, len(PROMPT) - 5):
        output = runner.execute(StepPlan((ScheduledSequence(seq, count), ScheduledSequence(other, 2))))
        seq.num_computed += count
        assert output.prompt_logprobs[1] is None
        assert output.prompt_logprobs[0] is not None
        logprobs += [judged.logprob for judged in output.prompt_logprobs[0]]
    distributions = torch.log_softmax(torch.cat(sampler.judged), -1)
    assert distributions.shape == (len(PROMPT) - 1, VOCAB_SIZE)
    assert logprobs == distributions[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
    seq.output_token_ids.append(17)
    stepper.reserve(seq, len(PROMPT) + 1)
    assert runner.execute(StepPlan((ScheduledSequence(seq, 1),))).prompt_logprobs == [[]]


def test_a_seeded_sequence_samples_the_same_alone_and_in_a_batch(llama_folder: Path) -> None:
    runner = runner_of(llama_folder, kv_blocks=600)
    stepper = Stepper(runner)
    params = SamplingParams(max_tokens=64, seed=1234, temperature=1.0)
    alone = stepper.generate(stepper.add(PROMPT, params=params), 20)
    others = [stepper.add(PROMPT[: n % 11 + 1], params=SamplingParams(max_tokens=64, seed=n)) for n in range(20)]
    seq = stepper.add(PROMPT, params=params)
    stepper.generate_mixed([seq, *others], 20)
    assert seq.output_token_ids[:20] == alone
    assert any(other.output_token_ids[:20] != alone for other in others)


def test_tokens_do_not_depend_on_an_earlier_owner_of_the_blocks(llama_folder: Path) -> None:
    runner, _ = recording_runner(llama_folder, num_blocks=4)
    stepper = Stepper(runner)
    first = stepper.add(PROMPT)
    expected = list(stepper.generate(first, 4))
    runner.kv_cache.tensor.mul_(float("inf"))
    assert first.lease is not None
    stepper.pool.release(first.lease)
    assert stepper.generate(stepper.add(PROMPT), 4) == expected


# --- loading ---------------------------------------------------------------------------------------------------------


def test_loading_reports_sizes(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engine.steps.loading"):
        runner = runner_of(
            llama_folder, dtype="bfloat16", block_size=8, layers_per_group=2, kv_bytes=100_000, num_threads=1
        )
    block_bytes = runner.kv_cache.layout.block_bytes
    assert runner.kv_cache.num_blocks == 100_000 // block_bytes
    assert runner.weight_bytes == 2 * sum(
        tensor.numel() for tensor in load_file(llama_folder / "model.safetensors").values()
    )
    assert "LlamaForCausalLM" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({}, "either as kv_blocks or as kv_bytes"),
        ({"kv_blocks": 3, "kv_bytes": 10_000}, "either as kv_blocks or as kv_bytes"),
        ({"kv_blocks": 3}, "cannot hold a single token"),
        ({"kv_bytes": 10}, "cannot hold a single token"),
    ],
)
def test_impossible_kv_sizes_are_refused(llama_folder: Path, sizes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        runner_of(llama_folder, layers_per_group=1, **sizes)


def test_a_sharded_checkpoint_is_the_same_model(llama_folder: Path, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, copied / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    runners = [recording_runner(path)[0] for path in (llama_folder, copied)]
    steppers = [Stepper(runner) for runner in runners]
    assert len({tuple(stepper.generate(stepper.add(PROMPT), 5)) for stepper in steppers}) == 1
    (copied / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names the file 'b\.safetensors'"):
        recording_runner(copied)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"), "lacks tensors: model.layers.2.mlp.up_proj"),
        (lambda tensors: tensors.update(surplus=torch.zeros(1)), "unknown tensors: surplus"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}), r"has the shape \(63,\)"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "is torch.int8"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(copied: Path, spoil: Any, complaint: str) -> None:
    tensors = load_file(copied / "model.safetensors")
    spoil(tensors)
    save_file(tensors, copied / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        recording_runner(copied)


def test_saved_frequencies_are_ignored(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, copied / "model.safetensors")
    config = ModelConfig.from_folder(copied)
    assert "model.norm.weight" in load_weights(copied, config, dtype=torch.float32)


def test_a_head_beside_tied_embeddings_counts_where_it_is_another(tmp_path: Path) -> None:
    """As in transformers, whatever the config says; a copy of the embedding is none."""
    build_oracle("llama-tied-biased-llama3", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": copy}, tmp_path / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" not in load_weights(tmp_path, config, dtype=torch.float32)
    other = copy.flip(0)
    save_file(tensors | {"lm_head.weight": other}, tmp_path / "model.safetensors", {"format": "pt"})
    runner, sampler = recording_runner(tmp_path)
    stepper = Stepper(runner)
    stepper.generate(stepper.add(PROMPT), 1)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([PROMPT])).logits[0, -1]
    (rows,) = sampler.sampled.values()
    torch.testing.assert_close(rows[0], expected, rtol=0, atol=1e-4)
    assert torch.equal(load_output_layer(tmp_path, config, torch.float32), other)
    rounding = Quantisation(name="int8", group_size=16)
    rounded = load_weights(tmp_path, config, rounding, dtype=torch.float32)["lm_head.weight"]
    assert isinstance(rounded, QuantisedWeight)
    assert torch.equal(rounded.dequantise(torch.float32), rounding.quantise(other).dequantise(torch.float32))
    save_file(tensors | {"lm_head.weight": copy[1:]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight .* has the shape \(306, 64\)"):
        load_weights(tmp_path, config, dtype=torch.float32)


def test_only_safetensors_are_loaded(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no other format is loaded"):
        recording_runner(copied)


def test_a_truncated_file_is_refused(copied: Path) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        recording_runner(copied)


def test_other_weight_types_are_refused(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16, not as torch\.float64"):
        load_weights(llama_folder, ModelConfig.from_folder(llama_folder), dtype=torch.float64)


def test_half_precision_keeps_to_the_float32_logits(llama_folder: Path) -> None:
    logits = {}
    for dtype in (torch.float32, torch.float16):
        runner, sampler = recording_runner(llama_folder, dtype=dtype)
        stepper = Stepper(runner)
        seq = stepper.add(PROMPT)
        stepper.step([(seq, 7)])
        stepper.step([(seq, len(PROMPT) - 7)])
        seq.output_token_ids[:] = [9]
        stepper.step([(seq, 1)])
        (logits[dtype],) = (torch.stack(rows) for rows in sampler.sampled.values())
    torch.testing.assert_close(logits[torch.float16], logits[torch.float32], rtol=0, atol=2e-2)
    assert logits[torch.float32].std() > 0.2


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel; supported are LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "supported are"),
        ({"hidden_act": "relu"}, "activation relu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'; supported are"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "only part of each head"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantised by 'hqq'"),
        ({"is_causal": False}, "attends in both directions"),
        ({"per_layer_config": {"0": {"intermediate_size": 48}}}, "layers of different shapes"),
    ],
)
def test_models_that_cannot_be_run_are_refused(copied: Path, changes: dict[str, Any], complaint: str) -> None:
    edit_config(copied, **changes)
    with pytest.raises(ValueError, match=complaint):
        ModelConfig.from_folder(copied)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_readable_config_is_refused(copied: Path, content: str | None) -> None:
    (copied / "config.json").unlink()
    if content is not None:
        (copied / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_folder(copied)


def test_remote_code_is_never_run(copied: Path) -> None:
    (copied / "evil.py").write_text("raise SystemExit('remote code was run')")
    edit_config(copied, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert ModelConfig.from_folder(copied).architecture == "LlamaForCausalLM"


def test_an_expert_of_every_token_that_has_no_width_is_none(tmp_path: Path) -> None:
    """As Qwen3-Coder's config says it."""
    build_oracle("qwen3-moe", tmp_path)
    expected = ModelConfig.from_folder(tmp_path)
    edit_config(tmp_path, shared_expert_intermediate_size=0)
    config = ModelConfig.from_folder(tmp_path)
    assert config == expected
    assert load_weights(tmp_path, config, dtype=torch.float32)


def test_end_tokens_come_from_both_files(copied: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert ModelConfig.from_folder(copied).eos_token_ids == (2, 9)
    edit_config(copied, eos_token_id=None)
    assert ModelConfig.from_folder(copied).eos_token_ids == (2, 9)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    assert ModelConfig.from_folder(copied).eos_token_ids == (9, 11)
    (copied / "generation_config.json").unlink()
    assert ModelConfig.from_folder(copied).eos_token_ids == (2,)  # the default of transformers' class


def test_old_names_of_rope_scaling(copied: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    edit_config(copied, rope_parameters=None, rope_theta=77.0, rope_scaling=scaling)
    expected = RopeConfig(theta=77.0, kind="linear", factor=4.0)
    assert {layer.rope for layer in ModelConfig.from_folder(copied).layers} == {expected}


def test_old_names_of_gemma_layers(tmp_path: Path) -> None:
    build_oracle("gemma3", tmp_path)
    edit_config(
        tmp_path,
        layer_types=None,
        rope_parameters=None,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=5e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    layers = ModelConfig.from_folder(tmp_path).layers
    assert [layer.window for layer in layers] == [7, None, 7, None]
    assert layers[0].rope == RopeConfig(theta=5e3)
    assert layers[1].rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)


def test_the_runner_takes_the_weights(llama_folder: Path) -> None:
    runner, sampler = recording_runner(llama_folder)
    weights = load_weights(llama_folder, ModelConfig.from_folder(llama_folder), dtype=torch.float32)
    ModelRunner(runner.config, weights, runner.kv_cache, sampler=sampler)
    assert not weights
