"""`legato check` says of a model what a worker that loads it finds, from its config and the headers of its weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.__main__ import main
from cluster.command.check import worker_memory
from cluster.config.build import engine_config
from cluster.config.load import load_config
from cluster.config.settings import LegatoConfig
from engine.checkpoint.quantisation import QuantisationName
from engine.model.config import ModelConfig
from engine.steps.loading import LoadedModel, load_model
from tests.support.model_families import build_oracle
from tests.support.small_models import SmallModel


@pytest.fixture(scope="module", params=["qwen2", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose projections can be rounded in groups."""
    folder = tmp_path_factory.mktemp(request.param)
    build_oracle(request.param, folder, intermediate_size=128, tie_word_embeddings=True)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def configured(folder: Path, **model: Any) -> LegatoConfig:
    pool = {"block_size": 4, "memory": "64KiB", "host_memory": "128KiB", "staging": "32KiB"}
    return load_config({"model": {"ref": str(folder), **model}, "kv": {"prefill": pool, "decode": pool}})


def loaded(config: LegatoConfig) -> LoadedModel:
    host = config.kv.decode.host_memory.num_bytes
    assert host is not None
    return load_model(replace(engine_config("decode", config), host_bytes=host, share_weights="off"))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_what_a_worker_takes(folder: Path, quantization: QuantisationName | None) -> None:
    config = configured(folder, quantization=quantization)
    said, model = worker_memory("decode", config, folder), loaded(config)
    layout, columns = model.layout, model.runner.num_pool_blocks // model.layout.num_layer_groups
    assert said.weight_bytes == pytest.approx(model.runner.weight_bytes, rel=0.15 if quantization else 0.001)
    assert isinstance(model.runner.config, ModelConfig)
    is_mixture = model.runner.config.layers[0].experts is not None
    assert (said.token_bytes < said.weight_bytes / 2) if is_mixture else (said.token_bytes == said.weight_bytes)
    assert said.kv_bytes == model.runner.num_pool_blocks * layout.block_bytes
    assert said.kv_tokens == columns * layout.block_size and said.context == model.max_model_len
    assert model.host_cache is not None and said.host_tokens == (
        model.host_cache.num_blocks // layout.num_layer_groups * layout.block_size
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": {"max_model_len": 100_000}}, "the model was made for"),
        ({"decode": {"tensor_parallel": 3}}, "tensor_parallel"),
        ({"kv": {"decode": {"memory": "1KiB"}}}, "cannot hold a single token"),
        ({"kv": {"decode": {"memory": "16KiB", "host_memory": 0}}, "model": {"max_model_len": 64}}, "KV memory holds"),
    ],
)
def test_what_a_worker_would_refuse(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    told: str,
) -> None:
    tree = {"prefill": {"replicas": 0}, **changes}
    tree["model"] = {"ref": str(folder), **tree.get("model", {})}
    path = tmp_path / "tree.yaml"
    path.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: a decode worker: ") and told in err and "The configuration is valid" in out


def test_a_model_that_is_damaged_or_unknown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(model: Path) -> str:
        monkeypatch.setattr("sys.argv", ["legato", "check", str(model)])
        assert main() == 1
        return capsys.readouterr().err

    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[:-10])
    assert "is no whole safetensors file (it ends before its tensors do); fetch the model again" in told(damaged)
    (damaged / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "its header has no end" in told(damaged)
    (damaged / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "is in none of the *.safetensors" in told(damaged)
    (damaged / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    assert "(OtherForCausalLM), which is no language model" in told(damaged)
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in told(tmp_path / "empty")


def test_a_model_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["legato", "check", str(folder)])
    assert main() == 0
    out = capsys.readouterr().out
    assert "Each prefill worker, on" in out and "Each decode worker, on" in out and "  weights " in out


def test_a_model_by_the_code_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = SmallModel("youtu", tmp_path)
    config = configured(model.folder)
    said, found = worker_memory("decode", config, model.folder), loaded(config)
    assert said.weight_bytes == found.runner.weight_bytes and said.context == found.max_model_len
    assert said.kv_bytes == found.runner.num_pool_blocks * found.layout.block_bytes
    monkeypatch.setattr("sys.argv", ["legato", "check", str(model.folder)])
    assert main() == 0
    assert "the code of transformers computes it: YoutuForCausalLM." in capsys.readouterr().out
    changed = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert main() == 1
    assert "cannot be served: its layers keep a state beside KV" in capsys.readouterr().err
