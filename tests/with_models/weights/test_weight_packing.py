"""Checkpoints of AWQ, GPTQ, MXFP4 and compressed-tensors' whole numbers: packed here code by code, as their formats
say, and loaded by the engine."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cluster.command.check import worker_memory
from cluster.command.weight_sizes import expanded_on_cpus, weight_sizes
from cluster.config.load import load_config
from engine.checkpoint.packing import WeightPacking
from engine.checkpoint.quantisation import Quantisation, QuantisationName
from engine.checkpoint.weights import expected_shapes, load_output_layer, load_weights
from engine.model.config import ModelConfig
from engine.model.shards import WHOLE, Shard, shards_of
from kernels.native.linear import can_pack_quantised
from kernels.quantised_weight import QuantisedWeight
from tests.support.model_families import build_oracle
from tests.support.small_models import random_prompts
from tests.support.stepping import Stepper, recording_runner

GROUP = 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
# Of llm-compressor: W4A16 with groups, and W8A8 with a scale for each output.
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "bits": 4, "group_size": GROUP}
WHOLE_NUMBERS = {"quant_method": "compressed-tensors", "format": "int-quantized", "bits": 8, "group_size": None}


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def packed_rows(codes: list[list[int]], bits: int, order: tuple[int, ...]) -> Tensor:
    """Each row's codes, so many to a word of 32 bits: field i of a word holds its code `order[i]`."""
    per_word = 32 // bits
    words = [
        [
            signed(sum(row[first + order[field]] << (bits * field) for field in range(per_word)))
            for first in range(0, len(row), per_word)
        ]
        for row in codes
    ]
    return torch.tensor(words, dtype=torch.int32)


def pack(method: str, bits: int, codes: Tensor, zeros: Tensor, less: int) -> dict[str, Tensor]:
    """From `codes [O, I]` and `zeros [O, G]`, which are stored `less` so much."""
    stored_zeros = (zeros.t() - less).tolist()
    if method == "awq":
        awq_order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": packed_rows(codes.t().tolist(), 4, awq_order),
            "qzeros": packed_rows(stored_zeros, 4, awq_order),
        }
    order = tuple(range(32 // bits))
    if method == "compressed-tensors":
        spare = -len(zeros) % len(order)
        rows = torch.nn.functional.pad(zeros.t(), (0, spare)).tolist()
        return {
            "weight_packed": packed_rows(codes.tolist(), bits, order),
            "weight_zero_point": packed_rows(rows, bits, order).t().contiguous(),
            "weight_shape": torch.tensor(codes.shape),
        }
    groups = torch.arange(codes.shape[1], dtype=torch.int32) // GROUP
    qweight = packed_rows(codes.tolist(), bits, order).t().contiguous()
    return {"qweight": qweight, "qzeros": packed_rows(stored_zeros, bits, order), "g_idx": groups}


def write_packed(
    folder: Path,
    quantization: dict[str, Any],
    *,
    symmetric: bool = False,
    family: str = "qwen2",
    width: int = 64,
    **changes: Any,
) -> dict[str, Tensor]:
    """A small model whose projections in the layers are packed, in two files; the values of all its tensors."""
    build_oracle(family, folder, intermediate_size=width, num_hidden_layers=2, **changes)
    bits = quantization["bits"]
    less = 1 if quantization["quant_method"] == "gptq" and quantization.get("checkpoint_format") != "gptq_v2" else 0
    values: dict[str, Tensor] = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in values.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        num_outputs, num_inputs = tensor.shape
        codes = torch.randint(0, 2**bits, (num_outputs, num_inputs))
        group = quantization["group_size"] or num_inputs
        shape = (num_outputs, num_inputs // group)
        zeros = torch.full(shape, 2 ** (bits - 1)) if symmetric else torch.randint(less, 2**bits, shape)
        scales = (torch.rand(shape) / 50).half()
        expand = torch.arange(num_inputs) // group
        values[name] = (codes - zeros[:, expand]).float() * scales[:, expand].float()
        if quantization["quant_method"] != "compressed-tensors":
            parts = pack(quantization["quant_method"], bits, codes, zeros, less) | {"scales": scales.t().contiguous()}
        elif quantization["format"] == "pack-quantized":
            parts = pack("compressed-tensors", bits, codes, zeros, 0) | {"weight_scale": scales}
        else:
            as_bytes = {"weight": codes - 128, "weight_zero_point": zeros - 128}
            parts = {part: tensor.to(torch.int8) for part, tensor in as_bytes.items()} | {"weight_scale": scales}
        if symmetric:
            parts.pop("weight_zero_point", None)
        stored |= {f"{name.removesuffix('weight')}{part}": packed for part, packed in parts.items()}
    save_in_two(stored, folder)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": quantization["group_size"]}
    stated = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}} | quantization
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def save_in_two(tensors: dict[str, Tensor], folder: Path) -> None:
    """Every other tensor in each file, so that projections are torn apart."""
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "quantization",
    [
        *(AWQ, GPTQ, GPTQ | {"bits": 8}, GPTQ | {"checkpoint_format": "gptq_v2"}),
        *(
            PACKED,
            PACKED | {"bits": 8, "group_size": None},
            WHOLE_NUMBERS,
            WHOLE_NUMBERS | {"format": "naive-quantized"},
        ),
    ],
    ids=["awq", "gptq", "gptq-8", "gptq-v2", "packed", "packed-8", "int", "naive"],
)
def test_values_are_those_of_the_format(tmp_path: Path, quantization: dict[str, Any], symmetric: bool) -> None:
    torch.manual_seed(0)
    expected = write_packed(tmp_path, quantization, symmetric=symmetric)
    config = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.float32)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        if isinstance(weight, QuantisedWeight):
            group = quantization["group_size"] or weight.shape[1]
            assert (weight.bits, weight.group_size) == (quantization["bits"], group)
            assert (weight.minimums is None) == symmetric
            weight = weight.dequantise(torch.float32)
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("quantization", [AWQ, GPTQ, PACKED], ids=["awq", "gptq", "compressed-tensors"])
def test_projections_that_are_stored_as_one_are_taken_apart(tmp_path: Path, quantization: dict[str, Any]) -> None:
    expected = write_packed(tmp_path, quantization, family="phi-3")
    weights = load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32)
    for whole, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        module = "model.layers.1." + whole.partition(".")[0]
        found = [weights[f"{module}.{part}_proj.weight"] for part in parts]
        values = [part.dequantise(torch.float32) for part in found if isinstance(part, QuantisedWeight)]
        assert torch.equal(torch.cat(values), expected[f"model.layers.1.{whole}.weight"])


def test_a_packed_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    write_packed(tmp_path, GPTQ)
    damaged = tmp_path / "model-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model-1\.safetensors is not a whole safetensors file"):
        load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32)


def write_mxfp4(folder: Path, **changes: Any) -> Any:
    """A small gpt-oss whose experts are random blocks and scales, in two files; the model with their values, by
    transformers."""
    model = build_oracle("gpt-oss", folder, **{"intermediate_size": 64, "num_hidden_layers": 2} | changes)
    stored: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(layer.mlp.experts, name)
            num_experts, num_inputs, num_outputs = whole.shape
            blocks = torch.randint(256, (num_experts, num_outputs, num_inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)
            whole.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            prefix = f"model.layers.{index}.mlp.experts.{name}"
            del stored[prefix]
            stored |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    save_in_two(stored, folder)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return model


@pytest.mark.parametrize(
    "shard", [WHOLE, Shard(1, 2), Shard(1, 2, expert_parallel=True)], ids=["whole", "a rank's", "a rank's whole ones"]
)
def test_values_of_mxfp4_are_those_of_transformers(tmp_path: Path, shard: Shard) -> None:
    torch.manual_seed(0)
    experts = write_mxfp4(tmp_path).model.layers[1].mlp.experts
    weights = load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32, shard=shard)
    own = slice(0, 64) if shard.is_whole or shard.expert_parallel else slice(32, 64)
    numbers = shard.experts(6)
    assert sum(".experts." in name and name.endswith("weight") for name in weights) == 2 * 3 * len(numbers)
    for number in numbers:
        gates_and_ups = experts.gate_up_proj[number].T
        for name, expected in (
            ("gate_proj", gates_and_ups[0::2][own]),
            ("up_proj", gates_and_ups[1::2][own]),
            ("down_proj", experts.down_proj[number].T[:, own]),
        ):
            weight = weights[f"model.layers.1.mlp.experts.{number}.{name}.weight"]
            assert isinstance(weight, QuantisedWeight) and (weight.bits, weight.group_size) == (4, 32)
            assert torch.equal(weight.dequantise(torch.float32), expected)
        biases = weights[f"model.layers.1.mlp.experts.{number}.up_proj.bias"]
        assert isinstance(biases, Tensor) and torch.equal(biases, experts.gate_up_proj_bias[number, 1::2][own])


def test_tokens_of_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = write_mxfp4(tmp_path)
    model.generation_config.eos_token_id = None
    runner, _ = recording_runner(tmp_path, layers_per_group=2)
    stepper = Stepper(runner)
    seqs = [stepper.add(prompt, str(index)) for index, prompt in enumerate(random_prompts((5, 40, 61)))]
    stepper.generate_mixed(seqs, 16)
    for seq in seqs:
        ids = torch.tensor([seq.prompt_token_ids])
        found = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert seq.output_token_ids[:16] == found.tolist()


def test_experts_of_mxfp4_stay_packed(tmp_path: Path) -> None:
    """In bfloat16: the loaded weights take about as much as their file, by what `legato check` says as well."""
    write_mxfp4(tmp_path, vocab_size=32)
    config = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.bfloat16)
    loaded = sum(weight.nbytes for weight in weights.values())
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert loaded < files  # what is not packed has 4 bytes there
    stored = weight_sizes(tmp_path, config, torch.bfloat16, None)
    assert 0.7 < sum(stored.values()) / files <= 1.0
    values = sum(prod(shape) for shape in expected_shapes(config).values())
    assert sum(weight_sizes(tmp_path, config, torch.float16, None).values()) == 2 * values
    experts = sum(size for name, size in stored.items() if ".mlp.experts." in name)
    (tmp_path / "tokenizer.json").write_text("{}")
    told = worker_memory("decode", load_config({"model": {"ref": str(tmp_path), "dtype": "bfloat16"}}), tmp_path)
    assert told.token_bytes == told.weight_bytes - experts / 2, "three of six experts"


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        # Taken for two groups of 80, most values would be wrong.
        ({"weight": torch.zeros(4, 160, dtype=torch.int8), "weight_scale": torch.ones(4, 2)}, "each group of 128"),
        ({"weight_zero_point": torch.zeros(4, 1, dtype=torch.int32)}, "zero points of torch.int32"),
        (
            {
                "weight_packed": torch.zeros(4, 32, dtype=torch.int32),
                "weight_shape": torch.tensor([4, 128]),
                "weight_zero_point": torch.zeros(4, 1, dtype=torch.int32),
            },
            "4 words of zero points for 4 outputs",
        ),
    ],
    ids=["groups", "whole zero points", "packed zero points"],
)
def test_parts_of_compressed_tensors_that_do_not_fit_are_refused(parts: dict[str, Tensor], complaint: str) -> None:
    packing = WeightPacking(method="compressed-tensors", bits=8, has_zeros=True, group_size=128)
    fitting = {"weight": torch.zeros(4, 128, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    packing.unpack(fitting, "it")
    with pytest.raises(ValueError, match=complaint):
        packing.unpack(fitting | parts, "it")


def test_mxfp4_without_scales_is_refused_by_name(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    lost = "model.layers.0.mlp.experts.down_proj_scales"
    for file in tmp_path.glob("*.safetensors"):
        save_file({name: tensor for name, tensor in load_file(file).items() if name != lost}, file)
    with pytest.raises(ValueError, match=r"lacks tensors: .*layers.0.mlp.experts.0.down_proj.weight"):
        load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32)


def test_groups_that_are_not_side_by_side_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, GPTQ)
    file = tmp_path / "model-0.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="desc_act: false"):
        load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize(
    ("lost", "complaint"),
    [
        ("weight_zero_point", r"beside it, where one of weight_scale_inv or weight_scale and weight_zero_point"),
        ("weight_scale", r"up_proj.weight_packed in .* is I32 with weight_zero_point and weight_shape beside it"),
        ("weight_packed", r"lacks tensors: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_lacks_of_compressed_tensors_is_named(tmp_path: Path, lost: str, complaint: str) -> None:
    write_packed(tmp_path, PACKED | {"bits": 8})
    for file in tmp_path.glob("*.safetensors"):
        gone = f"model.layers.1.mlp.up_proj.{lost}"
        save_file({name: tensor for name, tensor in load_file(file).items() if name != gone}, file)
    with pytest.raises(ValueError, match=complaint):
        load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32)


def test_biases_that_add_nothing_are_passed_over(tmp_path: Path) -> None:
    """AutoGPTQ writes one for each projection; one that adds something, or beside AWQ's, is another model's."""
    torch.manual_seed(0)
    for quantization, value, is_taken in ((GPTQ, 0.0, True), (GPTQ, 0.1, False), (AWQ, 0.0, False)):
        folder = tmp_path / f"{quantization['quant_method']} {value}"
        write_packed(folder, quantization)
        config = ModelConfig.from_folder(folder)
        expected = load_weights(folder, config, dtype=torch.float32)
        bias = {"model.layers.1.self_attn.o_proj.bias": torch.full((64,), value)}
        path = folder / "model-1.safetensors"
        save_file(load_file(path) | bias, path)
        if is_taken:
            assert load_weights(folder, config, dtype=torch.float32).keys() == expected.keys()
        else:
            with pytest.raises(ValueError, match=r"has unknown tensors: .*o_proj\.bias"):
                load_weights(folder, config, dtype=torch.float32)


@pytest.mark.parametrize("are_in_order", [True, False])
def test_an_order_of_inputs_is_none_or_refused(tmp_path: Path, are_in_order: bool) -> None:
    """-1 stands for groups that lie as they are counted."""
    write_packed(tmp_path, PACKED)
    file = tmp_path / "model-0.safetensors"
    tensors = load_file(file)
    order = torch.full([64], -1) if are_in_order else torch.arange(64) % 2
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight_g_idx": order.int()}, file)
    config = ModelConfig.from_folder(tmp_path)
    if are_in_order:
        load_weights(tmp_path, config, dtype=torch.float32)
    else:
        with pytest.raises(ValueError, match="actorder: group"):
            load_weights(tmp_path, config, dtype=torch.float32)


@pytest.mark.parametrize("quantization", [PACKED, WHOLE_NUMBERS], ids=["packed", "int"])
def test_what_compressed_tensors_packed_stays_so(tmp_path: Path, quantization: dict[str, Any]) -> None:
    """In bfloat16: no more than its file has, by what `legato check` says as well."""
    write_packed(tmp_path, quantization)
    config = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.bfloat16)
    projections = {name: weight for name, weight in weights.items() if name.endswith("_proj.weight")}
    assert all(isinstance(weight, QuantisedWeight) for weight in projections.values())
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert sum(weight.nbytes for weight in weights.values()) < files  # what is not packed has 4 bytes there
    stored = weight_sizes(tmp_path, config, torch.bfloat16, None)
    assert 0.7 < sum(stored.values()) / files <= 1.0
    with pytest.raises(ValueError, match="quantised already"):
        load_weights(tmp_path, config, Quantisation(name="int4", group_size=32), dtype=torch.float32)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("quantization", [AWQ, PACKED, WHOLE_NUMBERS, "int4"], ids=str)
def test_codes_that_ranks_cut_too_small_are_told_to_become_values(
    tmp_path: Path, quantization: dict[str, Any] | QuantisationName, num_ranks: int
) -> None:
    """Of 96 inputs four ranks have 24 each, and no scale has 16."""
    rounding = None
    if isinstance(quantization, dict):
        write_packed(tmp_path, quantization, width=96)
    else:
        build_oracle("qwen2", tmp_path, intermediate_size=96)
        rounding = Quantisation.of(quantization)
    config = ModelConfig.from_folder(tmp_path)
    shards = shards_of(config, num_ranks)
    weights = [load_weights(tmp_path, config, rounding, dtype=torch.bfloat16, shard=shard) for shard in shards]
    values, num_values, kept = set(), 0, Counter[str]()
    for name, weight in ((name, weight) for of_rank in weights for name, weight in of_rank.items()):
        if not isinstance(weight, QuantisedWeight):
            continue
        if can_pack_quantised(weight, torch.bfloat16):
            kept[name] += weight.nbytes
        else:
            values.add(name)
            num_values += weight.codes.numel()
    expanded = expanded_on_cpus(tmp_path, config, rounding, shards)
    assert expanded == values and (num_ranks == 1) == (not values)
    told = weight_sizes(tmp_path, config, torch.bfloat16, rounding, shards=shards)
    of_values = {name: size for name, size in told.items() if f"{name.rpartition('.')[0]}.weight" in values}
    assert of_values.keys() == values and sum(of_values.values()) == 2 * num_values
    told_of_kept: dict[str, float] = defaultdict(float)
    for name, size in told.items():
        module, _, part = name.rpartition(".")
        if f"{module}.weight" in kept and part != "bias":
            told_of_kept[f"{module}.weight"] += size
    assert told_of_kept.keys() == kept.keys()
    if num_ranks == 1:  # zero points take more as minimums than in their file; what several ranks hold is not told here
        assert all(0.9 <= size / told_of_kept[name] < 1.15 for name, size in kept.items())
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = {"ref": str(tmp_path), "dtype": "bfloat16", "quantization": quantization if rounding else None}
    tree = load_config({"model": settings, "prefill": {"replicas": 0}, "decode": {"tensor_parallel": num_ranks}})
    assert worker_memory("decode", tree, tmp_path).weight_bytes == round(sum(told.values()))


LOST = "model.layers.1.mlp.up_proj.qzeros"


def test_what_lacks_is_named(tmp_path: Path) -> None:
    write_packed(tmp_path, AWQ)
    files = [tmp_path / f"model-{index}.safetensors" for index in (0, 1)]
    for file in files:
        kept = {name: tensor for name, tensor in load_file(file).items() if name != LOST}
        save_file(kept, file)
    with pytest.raises(ValueError, match=LOST):
        load_weights(tmp_path, ModelConfig.from_folder(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("quantization", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_a_tied_output_layer_is_read_without_the_layers(tmp_path: Path, quantization: dict[str, Any]) -> None:
    """Which would all be unpacked for nothing; so none misses what one of them lacks."""
    torch.manual_seed(0)
    values = write_packed(tmp_path, quantization, tie_word_embeddings=True)
    for file in (tmp_path / f"model-{index}.safetensors" for index in (0, 1)):
        kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("down_proj.qzeros")}
        save_file(kept, file)
    config = ModelConfig.from_folder(tmp_path)
    layer = load_output_layer(tmp_path, config, torch.float32)
    assert torch.equal(layer, values["model.embed_tokens.weight"])
    head = values["model.embed_tokens.weight"].flip(0)
    save_file(load_file(tmp_path / "model-0.safetensors") | {"lm_head.weight": head}, tmp_path / "model-0.safetensors")
    assert torch.equal(load_output_layer(tmp_path, config, torch.float32), head)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": "gemv"}, "'gemv'; supported are 4 bits in 'gemm'"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        (
            {"quant_method": "hqq"},
            "quantised by 'hqq'; supported are awq, gptq, mxfp4, fp8",
        ),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    write_packed(tmp_path, AWQ)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=complaint):
        ModelConfig.from_folder(tmp_path)


def test_it_is_not_rounded_twice(tmp_path: Path) -> None:
    write_packed(tmp_path, AWQ)
    config = ModelConfig.from_folder(tmp_path)
    with pytest.raises(ValueError, match="quantised already"):
        load_weights(tmp_path, config, Quantisation(name="int4", group_size=32), dtype=torch.float32)
