"""Folders of adapters: what is read of them, and the one sentence for each that cannot be computed exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file

from engine.checkpoint.adapters import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterReader,
    adapter_digest,
)
from engine.model.config import LatentConfig, LayerConfig, ModelConfig
from engine.model.rope import RopeConfig
from tests.support.adapters import LowRankWeights, adapter_files, read_adapter, weights_in

LAYER = LayerConfig(window=None, rope=RopeConfig(theta=10_000.0))
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=30,
    hidden_size=8,
    intermediate_size=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    layers=(LAYER, LAYER),
    max_position_embeddings=64,
    eos_token_ids=(2,),
    rms_norm_eps=1e-5,
    activation="silu",
    tied_embeddings=True,
    attention_scale=0.5,
)
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
SHAPES = {Q: (8, 8), V: (4, 8)}


def write(folder: Path, rank: int = 4, modules: Mapping[str, tuple[int, int]] = SHAPES, **config: Any) -> Path:
    """With PEFT's own defaults beside what is given."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank)
    save_file(tensors, folder / WEIGHTS_NAME)
    told = {
        "alpha_pattern": {},
        "base_model_name_or_path": "some/model",
        "bias": "none",
        "corda_config": None,
        "eva_config": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": {},
        "runtime_config": {"ephemeral_gpu_offload": False},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG_NAME).write_text(json.dumps(told | config))
    return folder


def check_adapter(folder: Path, model: ModelConfig, max_rank: int) -> None:
    AdapterReader(model, max_rank).check(folder)


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / WEIGHTS_NAME)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"v_proj": 2}}, (2.0, 0.5)),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 6.0, "q_proj": 1}}, (1.5, 2.0)),
    ],
)
def test_the_scale_is_pefts(tmp_path: Path, config: dict[str, Any], scales: tuple[float, float]) -> None:
    found = read_adapter(write(tmp_path, **config), MODEL, 64, torch.float32)
    stored = load_file(tmp_path / WEIGHTS_NAME)
    assert set(found) == {Q, V}
    for module, scale in zip((Q, V), scales, strict=True):
        down, up = (stored[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        assert torch.equal(found[module].down, down)
        assert torch.allclose(found[module].up, scale * up)


def test_one_reader_reads_many(tmp_path: Path) -> None:
    """What it knows of a file's header, it knows of no other, and nothing else of the file."""
    reader = AdapterReader(MODEL, 64)

    def read(folder: Path) -> dict[str, LowRankWeights]:
        files = adapter_files(folder)
        assert files.digest() == adapter_digest(folder)
        return weights_in(files, reader.layout(files), torch.float32)

    folders = [
        write(tmp_path / f"{rank} {alpha}", rank=rank, lora_alpha=alpha) for rank in (4, 8, 2, 6) for alpha in (1, 16)
    ]
    for folder in [*folders, *reversed(folders)]:
        weights = load_file(folder / WEIGHTS_NAME)
        for name in weights:
            weights[name] = torch.randn_like(weights[name])
        save_file(weights, folder / WEIGHTS_NAME)
        found, alone = read(folder), read_adapter(folder, MODEL, 64, torch.float32)
        assert found.keys() == alone.keys()
        for name, low_rank in found.items():
            assert torch.equal(low_rank.down, weights[f"base_model.model.{name}.lora_A.weight"])
            assert torch.equal(low_rank.up, alone[name].up)
    whole = (folders[0] / WEIGHTS_NAME).read_bytes()
    (folders[0] / WEIGHTS_NAME).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        read(folders[0])


def test_it_is_read_in_the_models_type(tmp_path: Path) -> None:
    found = read_adapter(write(tmp_path), MODEL, 64, torch.bfloat16)
    assert {part.dtype for low in found.values() for part in (low.down, low.up)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"peft_type": "IA3"}, "of the kind 'IA3'"),
        ({"bias": "lora_only"}, "has biases"),
        ({"use_dora": True}, "sets use_dora"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"fan_in_fan_out": True}, "sets fan_in_fan_out"),
        ({"some_new_method": {"x": 1}}, "sets some_new_method"),
        ({"init_lora_weights": "pissa"}, "was begun by 'pissa'"),
        ({"lora_alpha": None}, "the lora_alpha None"),
        ({"lora_alpha": math.nan}, "the lora_alpha nan"),
        ({"lora_alpha": 10**400}, "which is no number"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "an alpha_pattern that is not by modules' names"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="the adapter in") as refused:
        check_adapter(write(tmp_path, **config), MODEL, 64)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("model.layers.0.self_attn.q_proj", "lm_head", "lm_head.lora_A.weight, which is of no projection"),
        ("q_proj.lora_A", "q_proj.lora_magnitude_vector", "which is of no projection"),
        ("layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj", "which the model does not have"),
        ("self_attn.q_proj", "mlp.down_proj", "it is for another one"),
        ("1.self_attn.v_proj.lora_B", "0.self_attn.k_proj.lora_B", "lacks"),
        ("model.layers.1.self_attn.v_proj", "model.layers.0.self_attn.qkv_proj", "it is for another one"),
    ],
)
def test_tensors_of_anything_else_are_refused(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    rename(write(tmp_path), old, new)
    with pytest.raises(ValueError, match="the adapter in") as refused:
        check_adapter(tmp_path, MODEL, 64)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("part", ["A", "B"])
def test_half_of_a_projection_is_refused(tmp_path: Path, part: str) -> None:
    path, name = write(tmp_path) / WEIGHTS_NAME, f"base_model.model.{V}.lora_{part}.weight"
    save_file({known: tensor for known, tensor in load_file(path).items() if known != name}, path)
    with pytest.raises(ValueError, match=f"the adapter in .* lacks {name}"):
        check_adapter(tmp_path, MODEL, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_weights_of_another_type_are_refused_where_the_adapter_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write(tmp_path) / WEIGHTS_NAME
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    for refuse in (check_adapter, partial(read_adapter, dtype=torch.float32)):
        with pytest.raises(ValueError, match="another type than float32, bfloat16 and float16 for model"):
            refuse(tmp_path, MODEL, 64)


def test_what_was_read_stays_whatever_is_written_over_it(tmp_path: Path) -> None:
    path = write(tmp_path) / WEIGHTS_NAME
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
    found = read_adapter(tmp_path, MODEL, 64, torch.float32)
    with path.open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        file.seek(begin)
        file.write(bytes(path.stat().st_size - begin))
    for module in (Q, V):
        assert torch.equal(found[module].down, stored[f"base_model.model.{module}.lora_A.weight"])


def test_an_adapter_for_a_latent_is_refused(tmp_path: Path) -> None:
    latent = LatentConfig(rank=4, query_rank=None, plain_dim=2, rotary_dim=2, value_dim=4, interleaved=True)
    with pytest.raises(ValueError, match="whose attention is by a latent, LlamaForCausalLM"):
        check_adapter(write(tmp_path), replace(MODEL, latent=latent), 64)


def test_a_rank_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    check_adapter(write(tmp_path, rank=8), MODEL, 8)
    with pytest.raises(ValueError, match=r"the rank 8, more than the 7 of adapters\.max_rank"):
        check_adapter(tmp_path, MODEL, 7)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    (write(tmp_path) / WEIGHTS_NAME).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match="is a pickle"):
        check_adapter(tmp_path, MODEL, 64)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    for of_folder in (adapter_digest, lambda folder: check_adapter(folder, MODEL, 64)):
        with pytest.raises(ValueError, match=f"holds no {CONFIG_NAME}"):
            of_folder(tmp_path)


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        check_adapter(tmp_path, MODEL, 64)
    for config in ("{", "[" * 100_000, '{"r": ' + "9" * 5_000 + "}"):
        (tmp_path / CONFIG_NAME).write_text(config)
        with pytest.raises(ValueError, match="is no JSON"):
            check_adapter(tmp_path, MODEL, 64)


def test_a_file_that_is_cut_off_or_goes_on_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / WEIGHTS_NAME
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for length in (0, 7, 8, 9, begin - 1, begin, begin + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_not_whole(tmp_path)
    path.write_bytes(whole + b"\0")
    assert_not_whole(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": ["F32"]},
        {"shape": [4, 4]},
        {"shape": [4, -8]},
        {"shape": [4, 8.0]},
        {"shape": None},
        {"data_offsets": [0, 1 << 70]},
        {"data_offsets": [-128, 0]},
        {"data_offsets": [128, 256]},
        {"data_offsets": [0]},
    ],
)
def test_what_a_file_says_wrongly_of_a_tensor_is_refused_as_safetensors_does(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = write(tmp_path) / WEIGHTS_NAME
    header, data = parts_of(path)
    first = min(header, key=lambda name: header[name]["data_offsets"])
    assert header[first] == {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}
    header[first] |= change
    write_parts(path, header, data)
    with pytest.raises(SafetensorError):
        load(path.read_bytes())
    assert_not_whole(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"{", b"[" * 100_000, b'{"x": 3}', b"\xff", b'"x"', b"{}"])
def test_so_is_a_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    path = write(tmp_path) / WEIGHTS_NAME
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert_not_whole(tmp_path)


def assert_not_whole(folder: Path) -> None:
    for refuse in (check_adapter, partial(read_adapter, dtype=torch.float32)):
        with pytest.raises(ValueError, match="is not a whole safetensors file"):
            refuse(folder, MODEL, 64)


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and the rest."""
    stored = path.read_bytes()
    begin = 8 + int.from_bytes(stored[:8], "little")
    return json.loads(stored[8:begin]), stored[begin:]


def write_parts(path: Path, header: dict[str, Any], data: bytes) -> None:
    """As the format has it, but that no space pads the header."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("padding", range(4))
def test_tensors_may_be_of_several_types_and_at_any_address(tmp_path: Path, padding: int) -> None:
    write(tmp_path, rank=3)
    dtypes = {"A": torch.bfloat16, "B": torch.float32}
    shapes = {"A": (3, 7), "B": (8, 3)}
    tensors = {f"base_model.model.{Q}.lora_{part}.weight": torch.randn(shapes[part]).to(dtypes[part]) for part in "AB"}
    places = [[0, 42], [42, 42 + 96]]
    header: dict[str, Any] = {"__metadata__": {"padded": " " * padding}}
    for (name, tensor), kind, place in zip(tensors.items(), ("BF16", "F32"), places, strict=True):
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": place}
    data = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    write_parts(tmp_path / WEIGHTS_NAME, header, data)
    found = read_adapter(tmp_path, replace(MODEL, hidden_size=7), 64, torch.float32)[Q]
    down, up = tensors.values()
    assert torch.equal(found.down, down.float()) and torch.equal(found.up, up * (8 / 3))


def test_the_digest_is_of_weights_and_config(tmp_path: Path) -> None:
    first, second = write(tmp_path), tmp_path / "other"
    second.mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        (second / name).write_bytes((first / name).read_bytes())
    assert adapter_digest(first) == adapter_digest(second)
    (second / CONFIG_NAME).write_text((second / CONFIG_NAME).read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    assert adapter_digest(first) != adapter_digest(second)
    write(second)
    assert adapter_digest(first) != adapter_digest(second)
