"""Decoders computed by transformers' own code over paged KV: Hugging Face's greedy tokens, or a refusal by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.model.architectures import REFUSED, SERVED, models_table
from engine.model.config import Backend, ModelConfig, read_config
from engine.model.hugging_face import HuggingFaceConfig
from engine.steps.loading import EngineConfig, kv_fingerprint, model_fingerprint, served_config
from tests.support.decoders import VOCAB_SIZE, build_decoder, greedy_tokens, small_config
from tests.support.model_families import build_oracle
from tests.support.stepping import Stepper, recording_runner
from tests.support.thoroughness import in_test_long

BACKENDS: tuple[Backend, ...] = ("native", "transformers")
# Each for what the others do not have: latent attention, soft caps and windows, experts, learnt positions, two calls of
# attention a layer, KV of one head, shared KV, another norm's place; sinks.
SOME = (
    "deepseek_v3",
    "diffllama",
    "gemma2",
    "gemma3n_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_oss",
    "llama",
    "olmo2",
    "opt",
    "phi3",
)
SOME_MORE = ("cohere2", "mixtral", "stablelm")
PROMPT_LENGTHS = (1, 2, 5, 16, 17, 40, 61, 100)
NUM_NEW_TOKENS = 32


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = random.Random(19)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("model_type", [*SOME, *SOME_MORE, *in_test_long(*sorted(SERVED - {*SOME, *SOME_MORE}))])
def test_tokens_are_those_of_hugging_face(model_type: str, tmp_path: Path) -> None:
    """Eight prompts together, in steps of prefill and decode, by chunks of up to 19 tokens, over a cache of NaN."""
    oracle = build_decoder(model_type, tmp_path)
    runner, _ = recording_runner(tmp_path, backend="transformers", layers_per_group=2, block_size=5, num_blocks=4000)
    assert isinstance(runner.config, HuggingFaceConfig)
    stepper = Stepper(runner, seed=3)
    seqs = [stepper.add(prompt, str(index)) for index, prompt in enumerate(prompts())]
    stepper.generate_mixed(seqs, NUM_NEW_TOKENS)
    for seq in seqs:
        found = seq.output_token_ids[:NUM_NEW_TOKENS]
        expected = greedy_tokens(oracle, seq.prompt_token_ids, NUM_NEW_TOKENS, guess=found)
        assert found == expected, f"a prompt of {len(seq.prompt_token_ids)} tokens"


def test_a_norm_of_each_head(tmp_path: Path) -> None:
    """Cohere's, whose weight has two dimensions: it looks like the device's norm by its name alone."""
    oracle = build_decoder("cohere", tmp_path, use_qk_norm=True)
    runner, _ = recording_runner(tmp_path, backend="transformers", layers_per_group=2, block_size=5, num_blocks=400)
    stepper = Stepper(runner, seed=3)
    (prompt,) = prompts((17,))
    seq = stepper.add(prompt, "0")
    stepper.generate_mixed([seq], NUM_NEW_TOKENS)
    assert seq.output_token_ids[:NUM_NEW_TOKENS] == greedy_tokens(oracle, prompt, NUM_NEW_TOKENS)


def test_long_rope_that_looks_at_positions(tmp_path: Path) -> None:
    """Phi-3.5-MoE's, whose code chooses a scale of cosine and sine by the longest row: a trial has no positions."""
    factors = {"short_factor": [1.0 + 0.1 * pair for pair in range(8)], "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 128} | factors
    oracle = build_decoder("phimoe", tmp_path, rope_parameters=rope | {"short_mscale": 1.2, "long_mscale": 1.4})
    runner, _ = recording_runner(tmp_path, backend="transformers", layers_per_group=2, block_size=5, num_blocks=400)
    assert runner.config.max_position_embeddings == 128
    stepper = Stepper(runner, seed=3)
    (prompt,) = prompts((61,))
    seq = stepper.add(prompt, "0")
    stepper.generate_mixed([seq], NUM_NEW_TOKENS)
    assert seq.output_token_ids[:NUM_NEW_TOKENS] == greedy_tokens(oracle, prompt, NUM_NEW_TOKENS)


def test_native_and_transformers_give_the_same_tokens(llama_folder: Path) -> None:
    tokens: list[list[list[int]]] = []
    for backend in BACKENDS:
        runner, _ = recording_runner(llama_folder, backend=backend, layers_per_group=3)
        stepper = Stepper(runner)
        seqs = [stepper.add(prompt, str(index)) for index, prompt in enumerate(prompts())]
        stepper.generate_mixed(seqs, NUM_NEW_TOKENS)
        tokens.append([seq.output_token_ids[:NUM_NEW_TOKENS] for seq in seqs])
    assert tokens[0] == tokens[1]


def test_the_native_model_is_taken_where_it_can(llama_folder: Path, tmp_path: Path) -> None:
    assert isinstance(read_config(llama_folder), ModelConfig)
    assert isinstance(read_config(llama_folder, "native"), ModelConfig)
    with pytest.raises(ValueError, match="supported are LlamaForCausalLM"):
        read_config(saved(tmp_path, small_config("stablelm")), "native")
    for config in (
        small_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}),
        small_config("olmoe", clip_qkv=8.0),
    ):
        assert isinstance(read_config(saved(tmp_path, config)), HuggingFaceConfig)


@pytest.mark.parametrize(("family", "alike"), [("llama", True), ("glm-4", False), ("phi-3-long", False)])
def test_keys_in_another_order_are_not_taken_for_the_others(family: str, alike: bool, tmp_path: Path) -> None:
    """As they would be on a disk where another backend left them."""
    build_oracle(family, tmp_path)
    engines = (EngineConfig(model_ref=str(tmp_path), model_name="small", backend=backend) for backend in BACKENDS)
    assert (len({kv_fingerprint(tmp_path, engine) for engine in engines}) == 1) == alike


def test_a_checkpoint_is_told_by_samples_from_all_over_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    size, num_samples = 2**22, 16
    found = []
    for changed in (None, *range(num_samples)):
        weights = bytearray(size)
        if changed is not None:
            weights[size // num_samples * changed + 5] = 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        found.append(model_fingerprint(tmp_path, None, num_samples=num_samples))
    assert len(set(found)) == 1 + num_samples


def saved(folder: Path, config: Any, **changes: Any) -> Path:
    """A folder with this config and no weights."""
    config.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    (folder / "config.json").write_text(json.dumps(document | {"architectures": [architecture]} | changes))
    return folder


def test_every_model_of_transformers_is_served_or_refused() -> None:
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == SERVED | REFUSED.keys() and not SERVED & REFUSED.keys()
    page = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
    assert models_table() in page.read_text(encoding="utf-8"), (
        "run `python -m engine.model.architectures` and put its table there"
    )


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("mamba", {}, "keep a state beside KV"),
        ("bert", {}, "attends in both directions"),
        ("bloom", {}, "ALiBi"),
        ("stablelm", {"quantization_config": {"quant_method": "fp8"}}, "comes quantised"),
        ("stablelm", {"model_type": "qwen9"}, "no language model that transformers"),
        ("stablelm", {"model_type": "qwen9", "auto_map": {"AutoConfig": "c.C"}}, "auto_map.* is never run"),
        # What only the config of the folder switches on.
        ("gemma2", {"use_bidirectional_attention": True, "is_causal": False}, "both directions"),
        ("stablelm", {"hidden_act": "none"}, "cannot be tried without weights"),
    ],
)
def test_what_is_refused_by_name(model_type: str, changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    """Before there are any weights."""
    folder = saved(tmp_path, CONFIG_MAPPING[model_type](), **changes)
    with pytest.raises(ValueError, match=told):
        read_config(folder)


@pytest.mark.parametrize(
    ("wish", "told"),
    [({"tensor_parallel": 2}, "tensor_parallel 2"), ({"batch_invariant": True}, "batch_invariant")],
)
def test_what_is_not_built(wish: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, small_config("stablelm"))
    engine = EngineConfig(model_ref=str(folder), model_name="small", **wish)
    with pytest.raises(ValueError, match=f"StableLmForCausalLM, for which {told} is not built"):
        served_config(folder, engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_that_changes_others_is_not_offered(backend: Backend, tmp_path: Path) -> None:
    """Long RoPE turns all rows of a step by other frequencies when one is longer than the model was first made for."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64} | factors
    config = read_config(
        saved(tmp_path, small_config("phi3", original_max_position_embeddings=64, rope_parameters=rope)), backend
    )
    assert config.max_position_embeddings == 64


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    build_decoder("phi3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = {name: weight for name, weight in weights.items() if name != "model.layers.1.mlp.down_proj.weight"}
    for wrong, told in (
        (lacking, "missing keys: model.layers.1.mlp.down_proj"),
        (weights | {"model.layers.9.x": torch.zeros(2)}, "unexpected keys: model.layers.9.x"),
        (lacking | {"model.layers.1.mlp.down_proj.weight": torch.zeros(2, 2)}, "mismatched keys: .*down_proj"),
    ):
        save_file(wrong, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=told):
            recording_runner(tmp_path, backend="transformers")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="cannot be loaded"):
        recording_runner(tmp_path, backend="transformers")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded"):
        recording_runner(tmp_path, backend="transformers")
