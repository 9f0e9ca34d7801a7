"""Checkpoints in FP8, as transformers and as compressed-tensors store it: written here number by number, and computed
with by the engine as the values that they stand for."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from cluster.command.check import worker_memory
from cluster.config.load import load_config
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.weights import expected_shapes, load_output_layer, load_weights
from engine.model.config import ModelConfig
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from kernels.quantised_weight import QuantisedWeight
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.model_families import build_oracle
from tests.support.small_models import greedy, random_prompts

FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS = FP8 | {"weight_block_size": [48, 32], "modules_to_not_convert": ["lm_head"]}
Sharing = Literal["blocks", "channels", "tensor"]


def compressed_tensors(strategy: str, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes into config.json."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
        | weights,
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


def mixed(quantization: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """With another group of modules, whose weights are quantised otherwise."""
    group = quantization["config_groups"]["group_0"]
    other = group | {"weights": group["weights"] | weights}
    return quantization | {"config_groups": {"group_0": group, "group_1": other}, "format": "naive-quantized"}


def is_rounded(name: str) -> bool:
    """Whether these checkpoints have it in FP8: the layers' projections, but for a router's."""
    return ".layers." in name and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def in_fp8(weight: Tensor, sharing: Sharing, block: tuple[int, int], scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Numbers, scales, and the values that they stand for, worked out number by number."""
    num_outputs, num_inputs = weight.shape
    outputs, inputs = {"blocks": block, "channels": (1, num_inputs), "tensor": weight.shape}[sharing]
    shape = -(-num_outputs // outputs), -(-num_inputs // inputs)
    scales = ((0.5 + torch.rand(shape)) * weight.abs().max() / 448).to(scale_dtype)
    whole = scales.float()[torch.arange(num_outputs) // outputs][:, torch.arange(num_inputs) // inputs]
    numbers = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, scales.flatten() if sharing == "tensor" else scales, numbers.float() * whole


def write_fp8(
    folder: Path,
    family: str,
    quantization: dict[str, Any],
    *,
    sharing: Sharing = "blocks",
    block: tuple[int, int] = (48, 32),
    scale_dtype: torch.dtype = torch.float32,
    scale: str = "weight_scale_inv",
    extra: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """A small model whose projections in the layers are in FP8, in two files. In another folder the same one with its
    values, in float32, which is returned. `extra`: of every projection in FP8, besides."""
    build_oracle(family, folder, **changes)
    write_byte_tokenizer(folder)
    values_folder = Path(shutil.copytree(folder, folder.parent / f"{folder.name}-values"))
    values: dict[str, Tensor] = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in values.items():
        stored[name] = tensor
        if is_rounded(name):
            stored[name], scales, values[name] = in_fp8(tensor, sharing, block, scale_dtype)
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{kind}": part.clone() for kind, part in {scale: scales, **(extra or {})}.items()}
    save_file(values, values_folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in stored.items() if files[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return values_folder


STATIC = {"input_scale": torch.tensor([0.02]), "output_scale": torch.tensor([0.3])}


def write_case(case: str, folder: Path) -> Path:
    """One of the ways in which such checkpoints are stored."""
    match case:
        case "blocks that end amid":
            # As Qwen3's: 128 by 128, of 160 and 200 outputs.
            sizes: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2}
            return write_fp8(folder, "llama", FP8 | {"weight_block_size": [128, 128]}, block=(128, 128), **sizes)
        case "latent attention":
            return write_fp8(folder, "deepseek-v3", BLOCKS, num_hidden_layers=3)
        case "a tensor's, of transformers":
            static = {"activation_scheme": "static", "weight_block_size": None}
            extra = {"activation_scale": torch.tensor(0.02)}
            return write_fp8(folder, "qwen2", FP8 | static, sharing="tensor", extra=extra)
        case "channels, experts":
            return write_fp8(
                folder,
                "qwen3-moe",
                compressed_tensors("channel"),
                sharing="channels",
                scale="weight_scale",
                scale_dtype=torch.bfloat16,
            )
        case "a tensor's, fused projections":
            return write_fp8(
                folder,
                "phi-3",
                compressed_tensors("tensor") | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
                sharing="tensor",
                scale="weight_scale",
                extra=STATIC | {"k_scale": torch.tensor(0.1), "v_scale": torch.tensor(0.1)},
            )
        case _:
            assert case == "blocks of powers of two"
            return write_fp8(
                folder,
                "llama",
                compressed_tensors("block", block_structure=[48, 32]),
                scale="weight_scale",
                scale_dtype=torch.float8_e8m0fnu,
                extra={"weight_zero_point": torch.zeros(1)},
            )


CASES = (
    "blocks that end amid",
    "latent attention",
    "a tensor's, of transformers",
    "channels, experts",
    "a tensor's, fused projections",
    "blocks of powers of two",
)


@pytest.fixture(params=CASES)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint, and the one with its values."""
    torch.manual_seed(0)
    (folder := tmp_path / "model").mkdir()
    return folder, write_case(request.param, folder)


def test_weights_are_the_values(folders: tuple[Path, Path]) -> None:
    """In bfloat16, too: rounded once. Those of projections stay bytes, unless their inputs end amid a block."""
    config, values_config = map(ModelConfig.from_folder, folders)
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(folders[0], config, dtype=dtype)
        values = load_weights(folders[1], values_config, dtype=dtype)
        assert weights.keys() == values.keys()
        for name, value in values.items():
            weight = weights[name]
            assert isinstance(value, Tensor)
            if isinstance(weight, QuantisedWeight):
                assert is_rounded(name) and weight.codes.dtype == torch.float8_e4m3fn
                assert torch.equal(weight.dequantise(dtype), value), name
            else:
                assert torch.equal(weight, value), name
            stored = weight.codes if isinstance(weight, QuantisedWeight) else weight
            assert stored.untyped_storage().nbytes() == stored.nbytes, "nothing else is kept for it"


def test_tokens_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    """Prompts together and in chunks, and once more, with prefixes that are there."""
    folder, values = folders
    model = AutoModelForCausalLM.from_pretrained(values, dtype=torch.float32)
    settings: dict[str, Any] = {"dtype": "float32", "kv_blocks": 64, "num_threads": 1}
    engine = LocalEngine(load_model(EngineConfig(model_ref=str(folder), model_name="m", **settings)), token_budget=24)
    prompts = random_prompts((5, 40, 61))
    for again in (False, True):
        seqs = [
            Sequence(request_id=f"{again} {index}", attempt=0, params=greedy(12), prompt_token_ids=prompt)
            for index, prompt in enumerate(prompts)
        ]
        list(engine.run(seqs))
        assert (seqs[-1].num_cached > 0) == again
        for seq, prompt in zip(seqs, prompts, strict=True):
            ids = torch.tensor([prompt])
            found = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
            assert seq.output_token_ids == found[0, len(prompt) :].tolist()


def test_values_are_those_that_transformers_loads(tmp_path: Path) -> None:
    """Of blocks that come out even, which is all that it takes."""
    torch.manual_seed(0)
    (folder := tmp_path / "model").mkdir()
    sizes: dict[str, Any] = {"intermediate_size": 96, "num_hidden_layers": 2}
    write_fp8(folder, "qwen2", FP8 | {"weight_block_size": [32, 16]}, block=(32, 16), **sizes)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    ).state_dict()
    weights = load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)
    for name, weight in weights.items():
        values = weight.dequantise(torch.float32) if isinstance(weight, QuantisedWeight) else weight
        assert torch.equal(values, theirs[name]), name


def test_layers_for_drafting_are_passed_over(tmp_path: Path) -> None:
    """As DeepSeek V3 has one behind the others, in FP8 as they are."""
    (folder := tmp_path / "model").mkdir()
    write_fp8(folder, "deepseek-v3", BLOCKS, num_hidden_layers=3, num_nextn_predict_layers=1)
    file = folder / "model-0.safetensors"
    numbers, scales, _ = in_fp8(torch.randn(64, 128), "blocks", (48, 32), torch.float32)
    behind = "model.layers.3.eh_proj.weight"
    save_file(load_file(file) | {behind: numbers, f"{behind}_scale_inv": scales}, file)
    config = ModelConfig.from_folder(folder)
    assert load_weights(folder, config, dtype=torch.float32).keys() == expected_shapes(config).keys()


def test_it_can_be_rounded_to_8_bits(tmp_path: Path) -> None:
    """As a checkpoint of the values is."""
    torch.manual_seed(0)
    (folder := tmp_path / "model").mkdir()
    values = write_fp8(folder, "llama", BLOCKS)
    rounding = Quantisation(name="int8", group_size=16)
    weights, expected = (
        load_weights(each, ModelConfig.from_folder(each), rounding, dtype=torch.float32) for each in (folder, values)
    )
    name = "model.layers.1.mlp.down_proj.weight"
    ours, theirs = weights[name], expected[name]
    assert isinstance(ours, QuantisedWeight) and isinstance(theirs, QuantisedWeight)
    assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scales, theirs.scales)
    assert torch.equal(
        load_output_layer(folder, ModelConfig.from_folder(folder), torch.float32),
        load_output_layer(values, ModelConfig.from_folder(values), torch.float32),
    )


def test_memory_that_is_told_is_that_of_the_values(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    write_fp8(folder, "deepseek-v3", BLOCKS, num_hidden_layers=3)
    told = worker_memory("decode", load_config({"model": {"ref": str(folder), "dtype": "bfloat16"}}), folder)
    config = ModelConfig.from_folder(folder)
    assert told.weight_bytes == 2 * sum(prod(shape) for shape in expected_shapes(config).values())
    weights = load_weights(folder, config, dtype=torch.bfloat16)
    values = {
        name: weight.dequantise(torch.bfloat16) if isinstance(weight, QuantisedWeight) else weight
        for name, weight in weights.items()
    }
    loaded = sum(value.nbytes for value in values.values())
    corrections = sum(weight.nbytes // 2 for name, weight in weights.items() if name.endswith("correction_bias"))
    assert told.weight_bytes == loaded - corrections, "which alone stay in float32"
    stated = {"model": {"ref": str(folder), "dtype": "bfloat16"}, "decode": {"num_gpus": 1}}
    on_a_gpu = worker_memory("decode", load_config(stated), folder)
    assert on_a_gpu.weight_bytes == told.weight_bytes, "for blocks of 32 inputs there are no kernels"


DOWN = "model.layers.0.mlp.down_proj"


def damaged(tensors: dict[str, Tensor], kind: str) -> None:
    scale = tensors[f"{DOWN}.weight_scale_inv"]
    match kind:
        case "no scales":
            del tensors[f"{DOWN}.weight_scale_inv"]
        case "two kinds of scales":
            tensors[f"{DOWN}.weight_scale"] = scale.clone()
        case "scales of other blocks":
            tensors[f"{DOWN}.weight_scale_inv"] = scale[:, :-1].clone()
        case "a scale for each input":
            tensors[f"{DOWN}.weight_scale_inv"] = torch.ones(1, tensors[f"{DOWN}.weight"].shape[1])
        case "another type":
            tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].float().to(torch.float8_e5m2)
        case "scales, but no FP8":
            tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].float()
        case "scales of whole numbers":
            tensors[f"{DOWN}.weight_scale_inv"] = scale.to(torch.uint8)
        case "a scale that is none":
            scale[0, 0] = torch.nan
        case "zero points":
            tensors[f"{DOWN}.weight_zero_point"] = torch.ones(1)
        case "scales of nothing":
            tensors["model.layers.0.mlp.other_proj.weight_scale_inv"] = scale.clone()
        case _:
            assert kind == "a norm"
            name = "model.norm"
            tensors |= {f"{name}.weight_scale_inv": torch.ones(1)}
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("no scales", rf"{DOWN}\.weight in .* is F8_E4M3 with no scales beside it, where one of weight_scale_inv"),
        ("two kinds of scales", "with weight_scale_inv and weight_scale beside it, where one of"),
        ("scales of other blocks", r"scales of \[2, 3\]; they have .* \[64, 1\], or \[2, 4\] for blocks of \[48, 32\]"),
        ("a scale for each input", r"scales of \[1, 112\]; they have to be"),
        ("another type", "float8_e5m2 .* only matrices of float8_e4m3fn can be loaded"),
        ("scales, but no FP8", "float32 with scales of torch.float32; of FP8 only"),
        ("scales of whole numbers", "with scales of torch.uint8; of FP8 only"),
        ("a scale that is none", "scales that are no numbers"),
        ("zero points", "zero points that are not 0"),
        ("scales of nothing", "has unknown tensors: .*other_proj"),
        ("a norm", r"model.norm.weight in .* is \[64\] of torch.float8_e4m3fn .* only matrices"),
    ],
)
def test_what_is_not_right_is_said(tmp_path: Path, kind: str, complaint: str) -> None:
    torch.manual_seed(0)
    (folder := tmp_path / "model").mkdir()
    write_fp8(folder, "llama", BLOCKS, num_hidden_layers=1)
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    damaged(tensors, kind)
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        (FP8 | {"expert_dtype": "fp4"}, "experts in 'fp4'"),
        (FP8 | {"weight_block_size": [128]}, r"blocks of \[128\]; expected are two sizes"),
        (FP8 | {"weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
        (compressed_tensors("group", num_bits=4) | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (compressed_tensors("channel", type="int"), "8 bits of the type 'int' in the format 'float-quantized'"),
        (compressed_tensors("block", block_structure="all"), "blocks of 'all'"),
        (compressed_tensors("tensor") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "a sparsity_config"),
        (compressed_tensors("tensor") | {"transform_config": {"config_groups": {"R1": {}}}}, "a transform_config"),
        (compressed_tensors("tensor") | {"config_groups": {}}, "no config_groups"),
        (compressed_tensors("tensor") | {"config_groups": {"group_0": {"weights": None}}}, "says of no weights"),
        (mixed(compressed_tensors("tensor"), num_bits=8, type="int"), "in several ways"),
        (mixed(compressed_tensors("block", block_structure=[8, 8]), block_structure=[4, 4]), "in several ways"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any], complaint: str) -> None:
    build_oracle("llama", tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=complaint):
        ModelConfig.from_folder(tmp_path)
