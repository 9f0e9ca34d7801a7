"""`legato check` says of a model what a worker that loads it finds, from its config and the headers of its weights."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.__main__ import main
from cluster.command.check import worker_memory
from cluster.config.build import engine_config
from cluster.config.load import load_config
from cluster.config.settings import LegatoConfig
from engine.checkpoint.adapters import adapter_digest
from engine.checkpoint.quantisation import QuantisationName
from engine.checkpoint.weights import load_weights
from engine.drafting.draft_model import DraftModel
from engine.drafting.heads import HeadsConfig
from engine.model.adapters import adapter_pool
from engine.model.config import ModelConfig
from engine.model.shards import shards_of
from engine.model.transformer import Model
from engine.steps.loading import DtypeName, LoadedModel, load_model
from tests.cluster.config.test_config import served
from tests.support.adapters import write_adapter
from tests.support.model_families import VOCAB_SIZE, build_oracle
from tests.support.small_models import SmallModel, runner_of, shallower


@pytest.fixture(scope="module", params=["qwen2", "mixtral", "gpt-oss", "phi-3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose projections can be rounded in groups."""
    folder = tmp_path_factory.mktemp(request.param)
    build_oracle(request.param, folder, intermediate_size=128, head_dim=16, tie_word_embeddings=True)
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
    config = configured(folder, quantization=quantization, dtype="auto" if quantization is None else "bfloat16")
    said, model = worker_memory("decode", config, folder), loaded(config)
    layout, columns = model.layout, model.runner.num_pool_blocks // model.layout.num_layer_groups
    assert said.weight_bytes == pytest.approx(model.runner.weight_bytes, rel=0.15 if quantization else 0.001)
    assert isinstance(model.runner.config, ModelConfig)
    is_mixture = model.runner.config.layers[0].experts is not None
    assert (said.token_bytes < said.weight_bytes) if is_mixture else (said.token_bytes == said.weight_bytes)
    assert said.kv_bytes == model.runner.num_pool_blocks * layout.block_bytes
    assert said.kv_tokens == columns * layout.block_size and said.context == model.max_model_len
    assert model.host_cache is not None and said.host_tokens == (
        model.host_cache.num_blocks // layout.num_layer_groups * layout.block_size
    )


def test_what_a_device_has_no_kernels_for_takes_the_room_of_its_values(folder: Path) -> None:
    """In float32; on a GPU all that is rounded to 4 bits, from minimums on."""
    plain = worker_memory("decode", configured(folder, dtype="bfloat16"), folder).weight_bytes
    head = 2 * VOCAB_SIZE * 64  # which is the embedding, but for who rounds it
    rounded = configured(folder, dtype="bfloat16", quantization="int4")
    on_gpu = rounded.model_copy(update={"decode": rounded.decode.model_copy(update={"num_gpus": 1})})
    assert worker_memory("decode", rounded, folder).weight_bytes < plain
    head_of_8_bits = (1 + 4 / 32) * head / 2  # with scales in float32
    assert worker_memory("decode", on_gpu, folder).weight_bytes == plain + head_of_8_bits
    in_float32 = configured(folder, dtype="float32", quantization="int4")
    assert worker_memory("decode", in_float32, folder).weight_bytes == 2 * (plain + head)


def test_adapters_have_room_of_their_own(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "mine", folder, seed=1, rank=64)
    model = runner_of(folder, kv_blocks=100).model
    assert isinstance(model, Model)
    pool = adapter_pool(model, model.config, max_loaded=1, max_rank=64)
    largest = pool.load(adapter_digest(adapter), adapter).num_bytes
    without = configured(folder)
    adapters = without.adapters.model_copy(update={"folder": str(tmp_path), "max_loaded": 3})
    said = worker_memory("decode", without.model_copy(update={"adapters": adapters}), folder)
    assert said.adapter_bytes == 3 * largest
    assert said.total_bytes == worker_memory("decode", without, folder).total_bytes + 3 * largest


@pytest.mark.parametrize(("family", "copies"), [("llama", 1), ("deepseek-v3", 2)])
def test_what_two_ranks_take(
    family: str, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has the latents of all heads, so that a share of the memory holds half as many."""
    build_oracle(family, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    alone = configured(tmp_path)
    ranks = alone.model_copy(update={"decode": alone.decode.model_copy(update={"tensor_parallel": 2})})
    one, two = (worker_memory("decode", config, tmp_path) for config in (alone, ranks))
    assert one.kv_bytes is not None and two.kv_bytes == copies * one.kv_bytes
    assert two.staging_bytes == copies * one.staging_bytes
    assert (two.kv_tokens, two.host_tokens, two.host_bytes) == (one.kv_tokens, one.host_tokens, one.host_bytes)
    memory = {"decode": {"memory": "50%", "host_memory": 0}}
    tree = {"model": {"ref": str(tmp_path)}, "kv": memory, "prefill": {"replicas": 0}}
    path = tmp_path / "tree.yaml"
    path.write_text(served(tree | {"decode": {"tensor_parallel": 2}}))
    shared = worker_memory("decode", load_config(tree), tmp_path)
    of_ranks = worker_memory("decode", load_config(path), tmp_path)
    assert shared.kv_tokens and of_ranks.kv_tokens == pytest.approx(shared.kv_tokens / copies, rel=1e-3)
    assert shared.kv_bytes is not None and of_ranks.kv_bytes == pytest.approx(shared.kv_bytes, rel=1e-3)
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 0
    assert (f"tokens, the same in {copies} processes\n" in capsys.readouterr().out) == (copies > 1)


@pytest.mark.parametrize(
    ("family", "num_ranks", "expert_parallel"),
    [
        ("llama", 4, None),
        ("llama-tied-biased-llama3", 2, None),
        ("gpt-oss", 2, False),
        ("gpt-oss", 4, True),
        ("phi-3", 2, None),
        ("deepseek-v3", 2, None),
    ],
)
def test_the_weights_of_all_ranks(family: str, num_ranks: int, expert_parallel: bool | None, tmp_path: Path) -> None:
    """Each has an embedding, norms and a router of its own, and four ranks have two key/value heads twice."""
    build_oracle(family, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    pool = {"tensor_parallel": num_ranks, "expert_parallel": expert_parallel}
    tree = {"model": {"ref": str(tmp_path)}, "prefill": {"replicas": 0}, "decode": pool}
    said = worker_memory("decode", load_config(tree), tmp_path).weight_bytes
    model = ModelConfig.from_folder(tmp_path)
    shards = shards_of(model, num_ranks, expert_parallel=expert_parallel)
    loaded = (load_weights(tmp_path, model, dtype=torch.float32, shard=shard) for shard in shards)
    assert said == sum(weight.nbytes for weights in loaded for weight in weights.values())


@pytest.mark.parametrize("expert_parallel", [False, True, None])
def test_what_ranks_with_whole_experts_take(
    expert_parallel: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of six experts on four ranks: the same KV, and in a step room for all rows on each. So they stay where their
    width of 98 is in the way, unless that is refused."""
    build_oracle("gpt-oss", tmp_path, intermediate_size=96 if expert_parallel is not None else 98)
    (tmp_path / "tokenizer.json").write_text("{}")
    pool = {"tensor_parallel": 4, "expert_parallel": expert_parallel}
    tree = {"model": {"ref": str(tmp_path)}, "prefill": {"replicas": 0}, "kv": {"decode": {"memory": "1MiB"}}}
    path = tmp_path / "tree.yaml"
    path.write_text(served(tree | {"decode": pool}))
    one = worker_memory("decode", load_config(tree | {"decode": {}}), tmp_path)
    four = worker_memory("decode", load_config(path), tmp_path)
    assert four.whole_experts == (None if expert_parallel is False else 2)
    assert four.kv_tokens == one.kv_tokens
    # Each has the residual stream and its norm, and a row in and out for each of a token's three experts.
    num_tokens = engine_config("decode", load_config(path)).largest_step.num_tokens
    everywhere = num_tokens * (2 + 2 * 3) * 64 * torch.float32.itemsize
    widths = one.step_bytes - everywhere
    assert four.step_bytes == 4 * everywhere + (1 if four.whole_experts is None else 4) * widths
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 0
    told = "for each token, 2 whole experts of a layer in a process\n" in capsys.readouterr().out
    assert told == (four.whole_experts is not None)


def test_a_model_that_was_saved_without_its_head(tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path / "whole").model.save_pretrained(tmp_path / "base")
    whole, base = (configured(tmp_path / name) for name in ("whole", "base"))
    assert worker_memory("decode", base, tmp_path / "base") == worker_memory("decode", whole, tmp_path / "whole")


def test_a_head_of_its_own_beside_tied_embeddings(tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    config = configured(tmp_path)
    said = worker_memory("decode", config, tmp_path).weight_bytes
    assert said == pytest.approx(loaded(config).runner.weight_bytes, rel=0.001)
    save_file(tensors | {"lm_head.weight": head[1:]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight in .* is \[306, 64\], and by its config.json it is"):
        worker_memory("decode", config, tmp_path)


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
    path.write_text(served(tree))
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: a decode worker: ") and told in err and "The settings are valid" in out


def test_what_cannot_draft(
    llama: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a worker says it once it has begun to load."""
    (tmp_path / "draft").mkdir()
    build_oracle("llama", tmp_path / "other", vocab_size=VOCAB_SIZE + 64)
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    small = {"memory": "64KiB", "host_memory": 0}
    for draft, memory, told in (
        (str(shallower(llama, tmp_path / "draft")), small, None),
        (str(tmp_path / "draft"), {"memory": "50%"}, "not as a share"),
        (str(tmp_path / "other"), small, "has another vocabulary"),
        (str(tmp_path / "drft"), small, "is not known"),
    ):
        tree = {"model": str(llama.folder), "workers": 1, "kv": {"decode": memory}, "decode": {"draft_model": draft}}
        path = tmp_path / "served.yaml"
        path.write_text(served(tree))
        monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
        assert main() == (told is not None)
        err = capsys.readouterr().err
        assert (told or "") in err and (told is None or err.startswith("error: a decode worker: "))


def test_a_model_that_drafts_takes_its_weights_and_its_part_of_the_kv(llama: SmallModel, tmp_path: Path) -> None:
    config = configured(llama.folder)
    decode = config.decode.model_copy(update={"draft_model": str(shallower(llama, tmp_path))})
    config = config.model_copy(update={"decode": decode})
    said, model = worker_memory("decode", config, llama.folder), loaded(config)
    assert said.kv_bytes == model.runner.num_pool_blocks * model.layout.block_bytes
    assert said.context == model.max_model_len
    assert isinstance(model.draft_model, DraftModel)
    draft = model.draft_model.model
    held = draft.runner.weight_bytes + draft.runner.num_pool_blocks * draft.layout.block_bytes
    assert held <= said.draft_bytes <= held + said.step_bytes, "its steps take no more than the other's"
    assert said.total_bytes >= said.draft_bytes + said.weight_bytes + said.kv_bytes


@pytest.mark.parametrize("are_heads", [False, True])
def test_what_drafts_without_its_weights(
    llama: SmallModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    are_heads: bool,
) -> None:
    """As of the model itself: they may be where it is served."""
    shallower(llama, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if are_heads:
        size = json.loads((llama.folder / "config.json").read_text())["hidden_size"]
        HeadsConfig(num_heads=1, num_layers=1, hidden_size=size, vocab_size=VOCAB_SIZE, num_tokens=VOCAB_SIZE).write(
            tmp_path
        )
    memory = {"memory": "64KiB", "host_memory": 0}
    decode = {"draft_model": str(tmp_path)}
    path = tmp_path / "served.yaml"
    path.write_text(served({"model": str(llama.folder), "workers": 1, "kv": {"decode": memory}, "decode": decode}))
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 0
    assert f"The weights of {tmp_path}, which drafts, are not on this machine." in capsys.readouterr().out


def test_weights_that_cannot_be_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the config alone, as a worker says it before it reads them."""
    build_oracle("llama", tmp_path, intermediate_size=96)
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "tree.yaml"
    path.write_text(served({"model": {"ref": str(tmp_path), "quantization": "int8"}}))
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 1
    assert "error: a decode worker: a projection of 96 inputs cannot be quantised in groups of 64" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(("dtype", "is_told"), [("auto", True), ("float16", False)])
def test_a_checkpoint_that_is_not_computed_in_its_own_type(
    llama_folder: Path,
    tmp_path: Path,
    dtype: DtypeName,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`legato check` says it, and so does a worker's log."""
    model = Path(shutil.copytree(llama_folder, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    path = tmp_path / "tree.yaml"
    path.write_text(served({"model": {"ref": str(model), "dtype": dtype}}))
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 0
    with caplog.at_level(logging.INFO, logger="engine.steps.loading"):
        runner = runner_of(model, dtype=dtype, kv_blocks=8)
    assert runner.kv_cache.layout.dtype == (torch.bfloat16 if dtype == "auto" else torch.float16)
    for text in (capsys.readouterr().out, caplog.text):
        assert ("The checkpoint is in float16 and is computed in bfloat16" in text) == is_told


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """What `legato check` says of a model that it refuses."""

    def told(model: Path) -> str:
        monkeypatch.setattr("sys.argv", ["legato", "check", str(model)])
        assert main() == 1
        return capsys.readouterr().err

    return told


def test_a_model_that_is_damaged_or_unknown(folder: Path, tmp_path: Path, refusal: Callable[[Path], str]) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[:-10])
    told = f"(it has {len(whole) - 10:,} bytes in place of {len(whole):,})"
    assert f"is not a whole safetensors file {told}; fetch it again" in refusal(damaged)
    (damaged / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "its header is cut off" in refusal(damaged)
    (damaged / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "is in none of the *.safetensors" in refusal(damaged)
    config = json.loads((damaged / "config.json").read_text())
    for wrong in ({"hidden_size": "many"}, {"rope_parameters": 3}):
        (damaged / "config.json").write_text(json.dumps(config | wrong))
        assert "config.json cannot be read as a model config: " in refusal(damaged)
    (damaged / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    assert "(OtherForCausalLM), which is no language model" in refusal(damaged)
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in refusal(tmp_path / "empty")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_key_value_heads": 0}, "says that num_key_value_heads is 0, which no model's is"),
        ({"num_key_value_heads": 3}, "says that 4 attention heads share 3 key/value heads"),
        ({"num_attention_heads": 0}, "says that num_attention_heads is 0"),
        ({"hidden_size": 0}, "says that hidden_size is 0"),
        ({"vocab_size": -5}, "says that vocab_size is -5"),
        ({"vocab_size": None}, "'vocab_size' expected int"),
        ({"head_dim": -4}, "says that head_dim is -4"),
        ({"num_hidden_layers": 0}, "says that num_hidden_layers is 0"),
        ({"max_position_embeddings": 0}, "says that max_position_embeddings is 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "says that rope_theta is None"),
        ({"model_type": "phi", "architectures": {"0": "Phi"}, "num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ],
)
def test_sizes_that_no_model_has(
    folder: Path, tmp_path: Path, refusal: Callable[[Path], str], wrong: dict[str, Any], told: str
) -> None:
    """One sentence that says what to do, whatever would have divided by zero."""
    odd = Path(shutil.copytree(folder, tmp_path / "odd"))
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | wrong))
    err = refusal(odd)
    assert told in err and err.endswith("; fetch it again\n") and err.count("\n") == 1


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
