"""The CPU's kernels against their plain twins: odd shapes, both types, memory outside live slots full of NaN."""

from __future__ import annotations

import importlib.metadata
import math
import random
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kv.cache import KVCache, KVLayout
from kernels import ops, reference
from kernels.cpu import kernels as cpu
from kernels.interface import Activation, Kernels, Segment
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import AMX, AVX2, AVX512, Instructions, native_library
from kernels.ops import kernels_for

DTYPES = (torch.float32, torch.bfloat16)


def _cpu_kernels() -> dict[str, Kernels]:
    """Those of every CPU, and the C++ ones where this machine has what they take."""
    library = native_library()
    return {"torch": cpu} if library is None else {"torch": cpu, "native": NativeCpuKernels(library)}


CPU_KERNELS = _cpu_kernels()


@pytest.fixture(params=CPU_KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return CPU_KERNELS[request.param]


def assert_like_twin(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = 2e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`segments` are (queries, context) pairs in packed order."""

    segments: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    block_size: int = 16
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    latent_dim: int | None = None

    @property
    def sinks(self) -> Tensor | None:
        """From next to nothing to nearly all of a row's weight."""
        return torch.linspace(-4.0, 9.0, self.num_heads) if self.has_sinks else None


CASES = {
    "one token of context": Case(segments=((1, 1),)),
    "decode, ragged": Case(segments=((1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 90), (1, 91))),
    "decode, equal lengths": Case(segments=((1, 33),) * 5),
    "decode, several buckets by unevenness": Case(segments=((1, 3), (1, 4), (1, 400), (1, 401), (1, 1000))),
    "decode, several buckets by size": Case(
        segments=tuple((1, n) for n in range(1500, 1507)), num_heads=4, num_kv_heads=2, head_dim=96
    ),
    "decode, windowed": Case(segments=((1, 4), (1, 16), (1, 17), (1, 23), (1, 40), (1, 200)), window=19, block_size=7),
    "decode, window of one": Case(segments=((1, 1), (1, 5), (1, 8)), window=1, block_size=4),
    "decode, soft-capped": Case(segments=((1, 4), (1, 37)), softcap=2.5),
    "prefill from the start": Case(segments=((2, 2), (37, 37))),
    "prefill after a context": Case(segments=((2, 40), (37, 61), (5, 16))),
    "prefill over several tiles": Case(segments=((600, 611),), num_heads=4, num_kv_heads=1, head_dim=16),
    "prefill, windowed, from the start": Case(segments=((300, 300), (9, 9)), window=11, block_size=5),
    "prefill, windowed, after a context": Case(segments=((3, 100), (290, 310)), window=30, block_size=5),
    "prefill, window no shorter than the context": Case(segments=((20, 20),), window=20),
    "prefill, soft-capped": Case(segments=((20, 20), (20, 33)), softcap=1.5, window=None),
    "mixed, soft-capped, windowed": Case(segments=((1, 3), (1, 60), (30, 30), (8, 50)), softcap=1.5, window=12),
    "mixed": Case(segments=((1, 3), (1, 60), (17, 17), (8, 50))),
    "mixed, sinks": Case(segments=((1, 3), (1, 60), (1, 900), (17, 17), (8, 50)), has_sinks=True),
    "mixed, sinks, windowed": Case(segments=((1, 3), (1, 60), (30, 30), (8, 50)), has_sinks=True, window=12),
    "sinks, soft-capped": Case(segments=((1, 3), (1, 60), (17, 20)), has_sinks=True, softcap=1.5),
    "one key head": Case(segments=((1, 3), (1, 60), (17, 20)), num_heads=4, num_kv_heads=1, head_dim=256),
    "no grouping": Case(segments=((1, 3), (1, 60), (17, 20)), num_heads=3, num_kv_heads=3, head_dim=8, block_size=1),
    "latent": Case(segments=((1, 3), (1, 60), (17, 17), (8, 50)), num_kv_heads=1, head_dim=40, latent_dim=32),
    "latent, sinks": Case(
        segments=((1, 3), (1, 60), (17, 17), (8, 50)), num_kv_heads=1, head_dim=40, latent_dim=32, has_sinks=True
    ),
    "latent, of DeepSeek's sizes": Case(
        segments=((1, 3), (1, 90), (9, 50)), num_heads=16, num_kv_heads=1, head_dim=576, latent_dim=512
    ),
}


@dataclass(frozen=True)
class World:
    """A poisoned cache with the contexts of a case in shuffled blocks, and one step's inputs."""

    kv_cache: KVCache
    segments: list[Segment]
    q: Tensor
    k: Tensor
    v: Tensor
    layer: int


def build_world(case: Case, dtype: torch.dtype, layers_per_group: int = 2) -> World:
    torch.manual_seed(0)
    layout = KVLayout(
        num_layers=3,
        layers_per_group=layers_per_group,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=dtype,
        latent_dim=case.latent_dim,
    )
    columns = [-(-context // case.block_size) + 1 for _, context in case.segments]
    kv_cache = KVCache(layout, layout.num_layer_groups * sum(columns) + 3)
    kv_cache.tensor.fill_(torch.nan)
    blocks = random.Random(0).sample(range(kv_cache.num_blocks), layout.num_layer_groups * sum(columns))
    tables = np.array(blocks, dtype=np.int32).reshape(layout.num_layer_groups, -1)
    num_tokens = sum(queries for queries, _ in case.segments)
    q = torch.randn(num_tokens, case.num_heads + 1, case.head_dim).to(dtype)[:, 1:]  # not contiguous, as in the model
    kv = torch.randn(num_tokens, layout.num_planes, case.num_kv_heads, case.head_dim).to(dtype)
    layer, row, segments = 1, 0, []
    for (queries, context), table in zip(case.segments, np.split(tables, np.cumsum(columns)[:-1], axis=1), strict=True):
        slab = torch.randn(layout.slab_shape(context)).to(dtype)
        slab[:, context - queries :] = kv[row : row + queries].transpose(0, 1)
        kv_cache.write_layer(layer, table[layer // layers_per_group], 0, slab)
        segments.append(Segment(first_row=row, num_queries=queries, context_len=context, block_table=table))
        row += queries
    return World(kv_cache, segments, q, kv[:, 0], kv[:, -1, :, : case.latent_dim], layer)


def run_attention(kernels: Kernels, case: Case, world: World) -> Tensor:
    layout = world.kv_cache.layout
    plan = kernels.plan_attention(world.segments, layout.geometry, window=case.window, dtype=layout.dtype)
    return plan.attend(
        world.q,
        world.k,
        world.v,
        world.kv_cache.layer_rows(world.layer),
        group=world.layer // layout.layers_per_group,
        scale=case.head_dim**-0.5,
        softcap=case.softcap,
        sinks=case.sinks,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_is_its_twin_and_sees_live_slots_only(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    world = build_world(case, dtype)
    actual = run_attention(kernels, case, world)
    assert actual.shape == (*world.q.shape[:2], case.latent_dim or case.head_dim)
    assert actual.is_contiguous()
    assert_like_twin(actual, run_attention(reference, case, world))


@pytest.mark.parametrize("layers_per_group", [1, 3])
def test_attention_of_other_groupings(kernels: Kernels, layers_per_group: int) -> None:
    case = CASES["mixed"]
    world = build_world(case, torch.float32, layers_per_group)
    assert_like_twin(run_attention(kernels, case, world), run_attention(reference, case, world))


def test_attention_leaves_the_cache_alone(kernels: Kernels) -> None:
    case = CASES["decode, ragged"]
    world = build_world(case, torch.float32)
    before = world.kv_cache.tensor.clone()
    run_attention(kernels, case, world)
    torch.testing.assert_close(world.kv_cache.tensor, before, equal_nan=True, rtol=0, atol=0)


def test_reference_attention_by_hand() -> None:
    """Two keys, one head of size one: softmax([0, ln 3]) is [1/4, 3/4]."""
    case = Case(segments=((1, 2),), num_heads=1, num_kv_heads=1, head_dim=1)
    world = build_world(case, torch.float32)
    table = world.segments[0].block_table[0]
    world.kv_cache.write_layer(1, table, 0, torch.tensor([[0.0, math.log(3.0)], [8.0, 16.0]]).view(2, 2, 1, 1))
    world.q.fill_(1.0)
    assert run_attention(reference, case, world).item() == pytest.approx(8 / 4 + 16 * 3 / 4)


def test_reference_sinks_by_hand() -> None:
    """One key with a score of 0 and a sink of ln 3: a quarter of its value."""
    one, sinks = torch.ones(1, 1, 1), torch.full((1, 1, 1), math.log(3.0))
    assert reference.dense_attention(one * 0, one, one * 8, None, 1.0, None, sinks).item() == pytest.approx(2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("num_inputs", [16, 64, 66, 67])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(kernels: Kernels, dtype: torch.dtype, rows: int, num_inputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(131, num_inputs).to(dtype) / 8, torch.randn(131).to(dtype) if bias else None
    x, residual = torch.randn(rows, num_inputs).to(dtype), torch.randn(rows, 131).to(dtype)
    plain, packed = reference.pack_linear(weight, offset), kernels.pack_linear(weight, offset)
    assert_like_twin(packed(x), plain(x))
    assert_like_twin(packed.add_to(residual, x), plain.add_to(residual, x))


def test_weights_are_packed_where_onednn_is_there() -> None:
    assert isinstance(cpu.pack_linear(torch.randn(8, 8), None), cpu.PackedLinear)
    assert isinstance(cpu.pack_linear(torch.randn(8, 8, dtype=torch.float64), None), reference.PlainLinear)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5, 576), (3, 4, 33)])
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype) * 3, torch.randn(shape[1:]).to(weight_dtype)
    assert_like_twin(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (6, 5, 64), (3, 12, 96)])
def test_rotation(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    num_tokens, _, head_dim = shape
    angles = torch.randn(num_tokens, 1, head_dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    x = torch.randn(shape).to(dtype)
    assert_like_twin(cpu.rotate(x, cos, signed_sin), reference.rotate(x, cos, signed_sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated_activation(kernels: Kernels, dtype: torch.dtype, activation: Activation) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(5, 2 * 37) * 4).to(dtype)
    before = gate_up.clone()
    actual = kernels.gated_activation(gate_up, activation)
    assert_like_twin(actual, reference.gated_activation(gate_up, activation))
    assert torch.equal(gate_up, before)


def test_a_cpu_has_the_fastest_kernels_that_it_can_run() -> None:
    on_cpu = kernels_for(torch.device("cpu"))
    assert isinstance(on_cpu, type(cpu) if native_library() is None else NativeCpuKernels)


@pytest.mark.parametrize("instructions", [AMX, AVX512, AVX2])
def test_what_sums_are_made_by_is_told_as_far_as_bits_depend_on_it(
    instructions: Instructions, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_device = torch.device("cpu")
    monkeypatch.setattr(ops, "native_library", object)
    monkeypatch.setattr(ops, "processor_instructions", lambda: instructions)
    name = instructions.name
    assert ops.arithmetic(cpu_device, torch.bfloat16) == f"{name} {ops.SUMS[name]}"
    by_registers = f"registers {ops.SUMS['registers']}"
    assert ops.arithmetic(cpu_device, torch.float32) == by_registers, "whatever the processor"
    by_torch = f"torch ({torch.backends.cpu.get_cpu_capability()})"
    assert ops.arithmetic(cpu_device, torch.bfloat16, beside_torch=True) == f"{name} {ops.SUMS[name]} and {by_torch}"
    assert ops.arithmetic(cpu_device, torch.float16) == by_torch, "the C++ kernels have none of these"
    monkeypatch.setattr(ops, "native_library", lambda: None)
    assert ops.arithmetic(cpu_device, torch.float32) == by_torch


def test_what_a_gpu_s_sums_are_made_by_names_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds may sum in another order, and are both of one protocol. Triton may be there under another name, as
    `pytorch-triton` is with PyTorch's nightly builds."""

    def nothing_is_called(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    ops._gpu_build.cache_clear()
    monkeypatch.setattr(importlib.metadata, "distribution", nothing_is_called)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    told = [ops.arithmetic(torch.device("cuda", 0), torch.bfloat16)]
    monkeypatch.setattr(ops, "TRITON_SOURCES", shutil.copytree(ops.TRITON_SOURCES, tmp_path / "triton"))
    told.append(ops.arithmetic(torch.device("cuda", 0), torch.bfloat16))
    monkeypatch.setattr(ops, "TRITON_SOURCES", shutil.copytree(ops.TRITON_SOURCES, tmp_path / "changed"))
    with (tmp_path / "changed" / "matmul.py").open("a") as source:
        source.write("# other sums\n")
    told.append(ops.arithmetic(torch.device("cuda", 0), torch.bfloat16))
    assert told[0] == told[1] != told[2]
    assert all(text.startswith(f"NVIDIA H200, torch {torch.__version__}, Triton ") for text in told)
