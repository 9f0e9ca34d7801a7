"""Triton's products by weights as they are stored, against their values': FP8, 8 and 4 bits, odd sizes, NaN around the
inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.command.check import worker_memory
from cluster.command.weight_sizes import forms_on_gpus
from cluster.config.load import load_config
from engine.checkpoint.gguf.checkpoint import describe_gguf
from engine.checkpoint.gguf.store import GGUF_NAME
from engine.checkpoint.quantisation import Quantisation, QuantisationName
from engine.checkpoint.weights import load_weights
from engine.model.config import ModelConfig
from engine.model.shards import Shard
from engine.model.transformer import Model
from kernels import reference
from kernels.interface import GatedMlp, Linear
from kernels.quantised_weight import LOWEST_E2M1, LOWEST_E4M3, QuantisedWeight
from kernels.triton import quantised
from kernels.triton.experts import GpuExperts
from kernels.triton.kernels import CublasLinear, GpuKernels
from kernels.triton.quantised import QuantisedLinear
from tests.interpreted.gpu_stepping import SMALL_VOCABULARY, prompts, stepper_on
from tests.support.interpreted import DTYPES, device
from tests.support.model_families import build_oracle
from tests.support.thoroughness import combined
from tests.with_models.weights.test_fp8_checkpoints import FP8, compressed_tensors, write_fp8
from tests.with_models.weights.test_gguf_weights import write_gguf
from tests.with_models.weights.test_weight_packing import AWQ, GPTQ, PACKED, WHOLE_NUMBERS, write_packed

FLOAT8 = torch.float8_e4m3fn
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Bits, what the lowest code stands for, inputs of a group, and whether codes stand above a zero point of their group,
# as minimums say. None: all inputs share a scale.
FORMS = (
    (8, LOWEST_E4M3, 128, False),
    (8, LOWEST_E4M3, None, False),
    (8, -128, 64, False),
    (8, -128, None, False),
    (4, -8, 128, False),
    (4, -8, 32, False),
    (4, 0, 64, True),
    (4, 0, 32, True),
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random_weight(
    num_outputs: int, num_inputs: int, bits: int, lowest: int, group: int | None, minimums: bool
) -> QuantisedWeight:
    """Every code occurs, and of E4M3 every number."""
    codes = torch.arange(num_outputs * num_inputs).view(num_outputs, num_inputs)[:, torch.randperm(num_inputs)]
    if lowest == LOWEST_E4M3:
        stored = codes.to(torch.uint8).view(FLOAT8)
        stored = torch.where(stored.float().isnan(), 0.0, stored.float()).to(FLOAT8)
    else:
        stored = (codes % 2**bits + lowest).to(torch.int8)
    num_groups = 1 if group is None else num_inputs // group
    # Of as many bits as AWQ's and GPTQ's, so that a minimum is exact.
    scales = (torch.randn(num_outputs, num_groups) / stored.float().std()).half().float()
    zeros = torch.randint(16, scales.shape)
    return QuantisedWeight(
        codes=stored, scales=scales, minimums=-zeros * scales if minimums else None, bits=bits, lowest=lowest
    )


def poisoned(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows with NaN before, after and between them."""
    around = torch.full((num_rows + 2, width + 16), torch.nan, dtype=dtype, device=device())
    view = around[1:-1, :width]
    return view.copy_(torch.randn(num_rows, width))


def packed(
    weight: QuantisedWeight, dtype: torch.dtype, bias: Tensor | None = None, *, invariant: bool = False
) -> Linear:
    return GpuKernels(device(), batch_invariant=invariant).pack_quantised(weight, bias, dtype)


def assert_like_values(actual: Tensor, x: Tensor, weight: QuantisedWeight, *added: Tensor) -> None:
    """Of the values in float32, which a product never rounds."""
    values = weight.dequantise(torch.float32).to(x.device)
    expected = x.float() @ values.t() + sum(part.float() for part in added)
    tolerance = TOLERANCES[x.dtype]
    assert actual.dtype == x.dtype
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * float(expected.std()))


@combined(one_in=3, num_rows=[1, 16, 37, 90], form=FORMS, dtype=DTYPES)
def test_a_product_is_that_of_the_values(
    dtype: torch.dtype, form: tuple[int, int, int | None, bool], num_rows: int
) -> None:
    weight = random_weight(75, 256, *form)
    linear = packed(weight, dtype)
    assert isinstance(linear, QuantisedLinear)
    assert linear.codes.nbytes == 75 * 256 * form[0] // 8, "it stays as it is stored"
    x = poisoned(num_rows, 256, dtype)
    assert_like_values(linear(x), x, weight)


@pytest.mark.parametrize("form", FORMS[:3])
def test_of_many_outputs_tiles_are_wide(
    form: tuple[int, int, int | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "_WIDE_OUTPUTS", 75)
    weight, x = random_weight(75, 256, *form), poisoned(9, 256, DTYPES[-1])
    assert_like_values(packed(weight, x.dtype)(x), x, weight)


@combined(num_rows=[1, 20], form=[FORMS[0], FORMS[6]], biased=[False, True])
def test_bias_and_residual_are_added(biased: bool, form: tuple[int, int, int | None, bool], num_rows: int) -> None:
    weight = random_weight(75, 128, *form)
    bias = torch.randn(75, device=device()) if biased else None
    linear = packed(weight, torch.float32, bias)
    x, residual = poisoned(num_rows, 128, torch.float32), poisoned(num_rows, 75, torch.float32)
    biases = [] if bias is None else [bias]
    assert_like_values(linear(x), x, weight, *biases)
    before = residual.clone()
    assert_like_values(linear.add_to(residual, x), x, weight, before, *biases)


@pytest.mark.parametrize("form", FORMS)
def test_many_rows_are_multiplied_by_the_values(
    form: tuple[int, int, int | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worked out to the bit as they are defined."""
    monkeypatch.setattr(quantised, "VALUES_FROM_ROWS", num_rows := 70)
    weight = random_weight(75, 256, *form)
    linear = packed(weight, torch.float32)
    assert isinstance(linear, QuantisedLinear)
    assert torch.equal(linear.weight.cpu(), weight.dequantise(torch.float32))
    x, residual = poisoned(num_rows, 256, torch.float32), poisoned(num_rows, 75, torch.float32)
    assert torch.equal(linear(x), x @ linear.weight.t())
    assert_like_values(linear.add_to(residual.clone(), x), x, weight, residual)


@pytest.mark.parametrize("form", FORMS)
def test_of_an_output_layer_no_values_are_worked_out(
    form: tuple[int, int, int | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows have the sums that they have where values are for more of them only, but for other projections."""
    weight, x = random_weight(75, 256, *form), poisoned(70, 256, DTYPES[-1])
    kernels = GpuKernels(device(), batch_invariant=False)
    layer, other = (kernels.pack_quantised(weight, None, x.dtype, is_output_layer=last) for last in (True, False))
    stored = other(x)
    monkeypatch.setattr(quantised, "VALUES_FROM_ROWS", 70)
    assert torch.equal(layer(x), stored) and not torch.equal(other(x), stored)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(
    form: tuple[int, int, int | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the type that has tiles for few, some and many rows."""
    monkeypatch.setattr(quantised, "VALUES_FROM_ROWS", 90)
    dtype = DTYPES[-1]
    linear = packed(random_weight(35, 256, *form), dtype, invariant=True)
    assert isinstance(linear, QuantisedLinear)
    x = poisoned(90, 256, dtype)
    whole = linear(x)
    for rows in (slice(0, 1), slice(5, 21), slice(7, 47), slice(20, 90)):
        assert torch.equal(linear(x[rows]), whole[rows])


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(random_weight(8, 200, 8, LOWEST_E4M3, None, False), id="inputs that end amid a step"),
        pytest.param(random_weight(8, 64, 8, LOWEST_E4M3, 32, False), id="groups smaller than a step"),
        pytest.param(random_weight(8, 64, 4, -8, 16, False), id="groups too small for any step"),
        pytest.param(random_weight(8, 64, 4, LOWEST_E2M1, 32, False), id="E2M1"),
        pytest.param(
            replace(random_weight(8, 64, 4, 0, 32, True), minimums=torch.full((8, 2), 0.3)), id="no zero point"
        ),
        pytest.param(replace(random_weight(8, 64, 8, -128, 32, False), minimums=torch.ones(8, 2)), id="of 8 bits"),
        pytest.param(
            replace(
                random_weight(2, 128, 8, LOWEST_E4M3, 128, False), codes=torch.full((2, 128), torch.nan).to(FLOAT8)
            ),
            id="NaN",
        ),
    ],
)
def test_others_are_expanded_to_their_values(weight: QuantisedWeight) -> None:
    linear = packed(weight, torch.float32)
    assert isinstance(linear, CublasLinear)
    expected = weight.dequantise(torch.float32)
    torch.testing.assert_close(linear.weight.cpu(), expected, rtol=0, atol=0, equal_nan=True)


SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": SMALL_VOCABULARY}


def in_fp8_blocks(folder: Path) -> None:
    """With biases."""
    block = {"weight_block_size": [128, 128]}
    write_fp8(folder, "qwen2", FP8 | block, block=(128, 128), hidden_size=128, intermediate_size=256, **SMALL)


def experts_in_fp8(folder: Path) -> None:
    """Of DeepSeek's kind: the first layer's MLP is dense, the others have experts and one that is every row's."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "v_head_dim": 32} | SMALL
    stated = compressed_tensors("channel")
    write_fp8(folder, "deepseek-v3", stated, sharing="channels", scale="weight_scale", **sizes)


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "FP8 by blocks": in_fp8_blocks,
    "experts in FP8": experts_in_fp8,
    "AWQ": lambda folder: write_packed(folder, AWQ),
    "GPTQ": lambda folder: write_packed(folder, GPTQ, symmetric=True),
    "compressed-tensors of 4 bits": lambda folder: write_packed(folder, PACKED, family="phi-3-long"),
    "compressed-tensors of 8 bits": lambda folder: write_packed(folder, WHOLE_NUMBERS, symmetric=True),
}


@pytest.mark.parametrize(
    ("checkpoint", "batch_invariant"),
    [*((name, False) for name in CHECKPOINTS), ("FP8 by blocks", True), ("AWQ", True)],
)
def test_a_checkpoint_gives_the_tokens_of_its_values(checkpoint: str, batch_invariant: bool, tmp_path: Path) -> None:
    """Projections lie as they are stored, experts by their values."""
    torch.manual_seed(0)
    CHECKPOINTS[checkpoint](tmp_path)
    found = []
    for kernels in (GpuKernels(device(), batch_invariant), reference):
        stepper, sampler = stepper_on(kernels, tmp_path)
        seqs = [stepper.add(prompt, str(index)) for index, prompt in enumerate(prompts())]
        stepper.step([(seqs[0], 1), (seqs[1], 7)])
        stepper.step([(seq, seq.num_uncomputed) for seq in seqs])
        for _ in range(3):
            stepper.step([(seq, 1) for seq in seqs])
        found.append((stepper, sampler, seqs))
    (stepper, sampler, seqs), (_, twin, twins) = found
    assert isinstance(stepper.runner.model, Model)
    for layer in stepper.runner.model._layers:
        output: Any = layer.output
        mlp: Any = layer.mlp
        dense = mlp if isinstance(mlp, GatedMlp) else mlp.shared
        for linear in (output.output if layer.latent else output, dense.gate_up, dense.down):
            assert isinstance(linear, QuantisedLinear)
        assert mlp is dense or isinstance(mlp.routed, GpuExperts)
    for seq, expected in zip(seqs, twins, strict=True):
        assert seq.output_token_ids == expected.output_token_ids
        logits, twin_logits = (torch.stack(each.sampled[seq.request_id]) for each in (sampler, twin))
        torch.testing.assert_close(logits, twin_logits, rtol=0, atol=1e-4)


def held_bytes(part: Any) -> dict[int, int]:
    """The sizes of all memory that a model keeps for its weights, by address."""
    if isinstance(part, Tensor):
        return {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()}
    inner: list[Any] = list(part) if isinstance(part, list | tuple) else []
    if is_dataclass(part):
        inner = [getattr(part, field.name) for field in fields(part)]
    if isinstance(part, Model):
        inner = [part._embedding, part._head, part._layers, part._final_norm]
    return {address: size for each in inner for address, size in held_bytes(each).items()}


def in_small_blocks(folder: Path) -> None:
    write_fp8(folder, "llama", FP8 | {"weight_block_size": [48, 32]}, **SMALL)


def plain(family: str) -> Callable[[Path], object]:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32} | SMALL
    if family == "qwen2-moe":
        sizes["shared_expert_intermediate_size"] = 256
    return lambda folder: build_oracle(family, folder, **sizes)


def in_gguf(folder: Path) -> None:
    """Of queries, keys and values not all are of one kind, and down projections have minimums."""
    model = build_oracle("llama", folder.parent / "hf", hidden_size=128, intermediate_size=256, head_dim=32)
    write_gguf(folder / GGUF_NAME, folder.parent / "hf", model.config)
    describe_gguf(folder / GGUF_NAME, folder)


@pytest.mark.parametrize(
    ("write", "quantization"),
    [
        *(pytest.param(write, None, id=name) for name, write in CHECKPOINTS.items()),
        pytest.param(in_small_blocks, None, id="FP8 by blocks smaller than a step"),
        pytest.param(in_gguf, None, id="GGUF"),
        pytest.param(plain("qwen2"), "int8", id="int8"),
        pytest.param(plain("qwen2"), "int4", id="int4"),
        pytest.param(plain("qwen2-moe"), "int8", id="int8, a shared expert with a gate"),
    ],
)
def test_the_memory_that_is_told_is_what_a_gpu_keeps(
    write: Callable[[Path], object], quantization: QuantisationName | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    (folder := tmp_path / "model").mkdir()
    write(folder)
    settings = {"ref": str(folder), "dtype": "bfloat16", "quantization": quantization}
    told = worker_memory("decode", load_config({"model": settings, "decode": {"num_gpus": 1}}), folder)
    config, rounding = ModelConfig.from_folder(folder), Quantisation.of(quantization)
    weights = load_weights(folder, config, rounding, dtype=torch.bfloat16, device=device())
    model = Model(config, weights, GpuKernels(device(), batch_invariant=False))
    assert told.weight_bytes == pytest.approx(sum(held_bytes(model).values()), rel=0.005), "but for a few biases"
    assert not isinstance(model._head, QuantisedLinear) or not model._head.expands


@pytest.mark.parametrize("name", ["FP8 by blocks", "GPTQ"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_told_to_stay_is_what_there_are_kernels_for(name: str, num_ranks: int, tmp_path: Path) -> None:
    """Where ranks cut a group, smaller ones may be too small."""
    torch.manual_seed(0)
    (folder := tmp_path / "model").mkdir()
    CHECKPOINTS[name](folder)
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, dtype=torch.bfloat16, shard=Shard(0, num_ranks))
    stays = {
        name: weight.group_size
        for name, weight in weights.items()
        if isinstance(weight, QuantisedWeight) and isinstance(packed(weight, torch.bfloat16), QuantisedLinear)
    }
    forms = forms_on_gpus(folder, config, None, num_ranks)
    assert stays and {name: form.group_size for name, form in forms.items()} == stays
