"""How a checkpoint says that it pools; and every family's vectors against Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode_workers.local_engine import LocalEngine
from engine.checkpoint.pooling import CheckpointPooling
from engine.sequence import Pooling, Sequence
from engine.steps.loading import EngineConfig, load_model
from tests.support.decoders import build_decoder
from tests.support.model_families import FAMILIES, build_oracle
from tests.support.small_models import greedy, random_prompts

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def checkpoint(folder: Path, modules: list[dict[str, Any]] | None, **pooling: Any) -> CheckpointPooling:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return CheckpointPooling.from_folder(folder)


@pytest.mark.parametrize(
    ("modules", "config", "method"),
    [
        (None, {}, "last"),
        (None, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        (
            [TRANSFORMER, POOLING, NORMALIZE],
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
            "last",
        ),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, "last"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "mean"}, "mean"),
    ],
)
def test_a_checkpoint_says_how_it_pools(
    tmp_path: Path, modules: list[dict[str, Any]] | None, config: dict[str, Any], method: Pooling
) -> None:
    assert checkpoint(tmp_path, modules, **config) == CheckpointPooling(method=method, size=64)


@pytest.mark.parametrize(
    ("modules", "config", "said"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "pools cls_token;"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "and mean_tokens;",
        ),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, "a module 'Dense'"),
    ],
)
def test_what_is_not_computed_here_is_refused(
    tmp_path: Path, modules: list[dict[str, Any]], config: dict[str, Any], said: str
) -> None:
    assert said in checkpoint(tmp_path, modules, **config).refusal


def test_gpt_2_calls_its_width_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 768}))
    assert CheckpointPooling.from_folder(tmp_path).size == 768


def test_opt_s_vectors_are_as_wide_as_its_embeddings(tmp_path: Path) -> None:
    """OPT-350m's have 512 numbers, and 1,024 within its layers."""
    oracle = build_decoder("opt", tmp_path, word_embed_proj_dim=24)
    (tmp_path / "tokenizer.json").write_text("{}")
    (prompt,) = random_prompts((20,), seed=8)
    config = EngineConfig(model_ref=str(tmp_path), model_name="m", dtype="float32", kv_blocks=16, num_threads=1)
    seq = Sequence(request_id="r", attempt=0, params=greedy(1), prompt_token_ids=prompt, pooling="last")
    list(LocalEngine(load_model(config)).run([seq]))
    with torch.inference_mode():
        expected = oracle.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    np.testing.assert_allclose(seq.embedding, expected / expected.norm(), rtol=0, atol=1e-5)
    assert CheckpointPooling.from_folder(tmp_path).size == len(seq.embedding) == 24


def test_a_config_without_a_width_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json does not say the hidden_size"):
        CheckpointPooling.from_folder(tmp_path)


@pytest.mark.parametrize("modules", [{}, [{}], ["Pooling"], 7])
def test_modules_that_are_none_are_named(modules: Any, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules or {"type": "Pooling"}))
    with pytest.raises(ValueError, match=r"modules\.json is no list of modules"):
        checkpoint(tmp_path, None)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        CheckpointPooling.from_folder(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vectors_of_every_family_are_hugging_face_s(family: str, tmp_path: Path) -> None:
    """In chunks, and both kinds beside each other."""
    oracle = build_oracle(family, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    config = EngineConfig(model_ref=str(tmp_path), model_name="m", dtype="float32", kv_blocks=64, num_threads=1)
    engine = LocalEngine(load_model(config), token_budget=32)
    prompts = random_prompts((1, 45, 90), seed=6)
    poolings: tuple[Pooling, ...] = ("last", "mean")
    seqs = [
        Sequence(request_id=f"{n}{kind}", attempt=0, params=greedy(1), prompt_token_ids=prompt, pooling=kind)
        for n, prompt in enumerate(prompts)
        for kind in poolings
    ]
    assert len(list(engine.run(seqs))) == len(seqs)
    for seq in seqs:
        with torch.inference_mode():
            states = oracle.model(torch.tensor([seq.prompt_token_ids])).last_hidden_state[0]
        expected = states[-1] if seq.pooling == "last" else states.mean(0)
        np.testing.assert_allclose(seq.embedding, expected / expected.norm(), rtol=0, atol=1e-5)


def test_a_model_that_was_saved_without_its_head_is_served(tmp_path: Path) -> None:
    """As those are that were made for embeddings; where the embedding is the head, nothing lacks."""
    whole, base = tmp_path / "whole", tmp_path / "base"
    oracle = build_oracle("llama-tied-biased-llama3", whole)
    oracle.model.save_pretrained(base, safe_serialization=True)
    assert json.loads((base / "config.json").read_text())["architectures"] == ["LlamaModel"]
    (prompt,) = random_prompts((20,), seed=8)
    found = []
    for folder in (whole, base):
        (folder / "tokenizer.json").write_text("{}")
        config = EngineConfig(model_ref=str(folder), model_name="m", dtype="float32", kv_blocks=16, num_threads=1)
        seq = Sequence(request_id="r", attempt=0, params=greedy(1), prompt_token_ids=prompt, pooling="last")
        list(LocalEngine(load_model(config)).run([seq]))
        found.append(seq.embedding)
    np.testing.assert_array_equal(found[0], found[1])
