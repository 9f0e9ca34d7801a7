"""The C++ kernels: compiled once, left to torch where they cannot be, and rows that do not depend on one another."""

from __future__ import annotations

import ctypes
import hashlib
import io
import logging
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Final, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import cache_folder
from kernels.interface import Activation, CacheGeometry, KVSlots, Linear, Segment
from kernels.native import library as compiling
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import SWITCH, native_library
from kernels.native.linear import NativeLinear, pack_quantised
from kernels.ops import SUMS, kernels_for
from kernels.quantised_weight import ActivationBits, QuantisedWeight
from tests.support.forked_child import ForkedChild

ACTIVATION_BITS: Final[tuple[ActivationBits, ...]] = (8, 16)


def kernels_of_a_new_process(**environment: str) -> tuple[str, str]:
    """Which kernels it takes, and what it logs, also of its being asked for batch invariance."""
    with ForkedChild(tell_kernels, environment) as process:
        kernels, log = process.told()
    return kernels, log


def tell_kernels(environment: dict[str, str], pipe: Connection) -> None:
    assert not native_library.cache_info().currsize, "nobody has chosen for this process"
    os.environ.update(environment)
    log = io.StringIO()
    logging.basicConfig(stream=log, force=True)
    kernels = type(kernels_for(torch.device("cpu"))).__name__
    try:
        kernels_for(torch.device("cpu"), batch_invariant=True)
    except ValueError as error:
        logging.error(error)
    pipe.send((kernels, log.getvalue()))


def test_without_a_compiler_torch_computes_and_the_log_says_why(tmp_path: Path) -> None:
    kernels, log = kernels_of_a_new_process(LEGATO_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert kernels == "module"
    assert "CPU kernels are torch's own" in log


def write_compiler(path: Path, *macros: str) -> None:
    """One that says these of itself."""
    path.write_text("#!/bin/sh\n" + "".join(f"echo '#define {macro}'\n" for macro in macros))
    path.chmod(0o755)
    compiling._macros.cache_clear()


def test_clang_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by it with LLVM's OpenMP, threads wrote each other's rows."""
    clang, gnus = tmp_path / "my-clang++", tmp_path / "g++"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(clang))
    write_compiler(clang, "__GNUC__ 4", "__clang__ 1")
    with pytest.raises(compiling.NativeUnavailableError, match=r"my-clang\+\+ is clang\+\+.*; install g\+\+"):
        compiling.find_compiler()
    write_compiler(gnus, "__GNUC__ 12")
    assert compiling.find_compiler() == str(gnus)


def test_another_compiler_of_the_same_name_compiles_anew(tmp_path: Path) -> None:
    """That of another machine, with which the folder is shared, or after an upgrade."""
    compiler, names = tmp_path / "g++", set()
    for version in ("12.2.0", "13.3.0", "12.2.0"):
        write_compiler(compiler, f'__VERSION__ "{version}"')
        names.add(compiling._digest(str(compiler), compiling.AVX2))
    assert len(names) == 2


def test_how_long_it_was_compiled_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that failed; it takes no time where the file is there."""
    clock = [0.0]
    has_room = False

    def compile_library(compiler: str, instructions: compiling.Instructions, target: Path) -> None:
        clock[0] += 300.0
        if not has_room:
            raise compiling.NativeUnavailableError("no room")
        target.touch(0o700)

    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "find_compiler", lambda: "g++")
    monkeypatch.setattr(compiling, "processor_instructions", lambda: compiling.AVX2)
    monkeypatch.setattr(compiling, "compile_library", compile_library)
    monkeypatch.setattr(compiling, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(cache_folder, "_compiling_s", 0.0)
    with pytest.raises(compiling.NativeUnavailableError, match="no room"):
        compiling._library()
    assert cache_folder.compiling_s() == 300.0
    has_room = True
    for _ in range(2):
        compiling._library()
        assert cache_folder.compiling_s() == 600.0


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no such option >&2\nexit 3\n")
    compiler.chmod(0o755)
    with pytest.raises(compiling.NativeUnavailableError, match="no such option"):
        compiling.compile_library(str(compiler), compiling.AVX2, tmp_path / "legato.so")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_the_switch_leaves_them_to_torch_and_refuses_batch_invariance() -> None:
    kernels, log = kernels_of_a_new_process(**{SWITCH: "0"})
    assert kernels == "module"
    assert f"{SWITCH}=0 asks for it" in log and "leave batch_invariant off" in log


@pytest.mark.parametrize(
    ("present", "switch", "expected"),
    [
        (compiling.AMX.flags + compiling.AVX2.flags, "", compiling.AMX),
        (compiling.AMX.flags + compiling.AVX2.flags, "avx512", compiling.AVX512),
        (compiling.AMX.flags + compiling.AVX2.flags, "AVX2", compiling.AVX2),
        (compiling.AMX.flags + compiling.AVX2.flags, "1", compiling.AMX),
        (compiling.AVX512.flags + compiling.AVX2.flags, "", compiling.AVX512),
        ((*compiling.AVX2.flags, "avx512f"), "", compiling.AVX2),  # without bfloat16
    ],
)
def test_a_processor_runs_the_best_that_it_has(
    monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...], switch: str, expected: compiling.Instructions
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setattr(compiling, "_processor_flags", lambda: frozenset(present))
    assert compiling.processor_instructions() == expected


# What Linux says of them in /proc/cpuinfo, as far as it matters: some names have underscores, some have none.
HASWELL = "fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm abm bmi1 avx2 smep bmi2 erms"
ZEN_4 = f"""{HASWELL} avx512f avx512dq rdseed adx smap avx512ifma clflushopt clwb avx512cd sha_ni avx512bw avx512vl
avx512_bf16 avx512vbmi umip avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq"""
SAPPHIRE_RAPIDS = f"{ZEN_4} avx_vnni amx_bf16 avx512_fp16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(SAPPHIRE_RAPIDS, compiling.AMX), (ZEN_4, compiling.AVX512), (HASWELL, compiling.AVX2)],
    ids=["Sapphire Rapids", "Zen 4", "Haswell"],
)
def test_what_a_processor_has_is_told_in_the_systems_words(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: compiling.Instructions
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"flags : {' '.join(flags.split())}\n")
    monkeypatch.setattr(compiling, "_ask_for_tiles", lambda: True)
    assert compiling.processor_instructions() == expected


def test_a_word_that_the_switch_does_not_know_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "avx-512")
    with pytest.raises(compiling.NativeUnavailableError, match=r"avx-512 is none of amx, avx512, avx2 and 0"):
        compiling.processor_instructions()


def test_tiles_are_left_where_the_system_does_not_let_a_process_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some containers and under older kernels: the instructions would end the process."""
    flags = (*compiling.AMX.flags, *compiling.AVX2.flags)
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"flags : {' '.join(flags)}\n")
    for allowed, expected in ((True, compiling.AMX), (False, compiling.AVX512)):
        monkeypatch.setattr(compiling, "_ask_for_tiles", lambda allowed=allowed: allowed)
        assert compiling.processor_instructions() == expected


def test_what_an_old_processor_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_processor_flags", lambda: frozenset(compiling.AVX2.flags) - {"fma", "movbe"})
    with pytest.raises(compiling.NativeUnavailableError, match=r"lacks fma, movbe$"):
        compiling.processor_instructions()


def test_this_machine_compiles_them_if_it_can() -> None:
    """So that a kernel that does not compile is no silent fall back to torch."""
    try:
        compiling.processor_instructions()
        compiling.find_compiler()
    except compiling.NativeUnavailableError:
        assert native_library() is None
    else:
        assert native_library() is not None


def test_what_sources_use_of_avx512_there_is_for_avx2() -> None:
    """Else nothing compiles there, and torch computes. What only tiles use is asked of no such processor."""
    paths = (*compiling._sources(), *compiling.SOURCE_FOLDER.glob("*.h"))
    sources = {path.name: path.read_text() for path in paths}
    there = set(re.findall(r"^#define (_mm512_\w+)", sources["vectors_avx2.h"], re.MULTILINE))
    for name in sources.keys() - {"vectors.h", "vectors_avx2.h"}:
        without_tiles = re.sub(r"^#if[^\n]*__AMX_BF16__.*?^#endif", "", sources[name], flags=re.MULTILINE | re.DOTALL)
        assert set(re.findall(r"_mm512_\w+", without_tiles)) <= there, name


def products(library: ctypes.CDLL) -> bytes:
    """Of 50 rows by weights of 4 and 8 bits."""
    torch.manual_seed(0)
    found = []
    for bits, lowest in ((4, -8), (8, -128)):
        for activation_bits in ACTIVATION_BITS:
            codes = (torch.randint(2**bits, (70, 576)) + lowest).to(torch.int8)
            scales, minimums = torch.randn(2, 70, 9)
            weight = QuantisedWeight(codes=codes, scales=scales, minimums=minimums, bits=bits, lowest=lowest)
            linear = pack_quantised(library, weight, None, activation_bits)
            found.append(linear(torch.randn(50, 576).bfloat16()))
    return torch.stack(found).view(torch.uint8).numpy().tobytes()


def tell_products(library: Path, pipe: Connection) -> None:
    pipe.send(products(ctypes.CDLL(str(library))))


def test_quantised_products_are_the_same_bits_with_and_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sources the one that has them is compiled without tiles: all of them take half a minute."""
    library = native_library()
    if library is None or compiling.processor_instructions() is not compiling.AMX:
        return
    monkeypatch.setenv(SWITCH, "avx512")
    monkeypatch.setattr(compiling, "_sources", lambda: [compiling.SOURCE_FOLDER / "quantised.cpp"])
    with ForkedChild(tell_products, compiling._library()) as process:
        assert process.told() == products(library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(131, 66), (576, 1536)])
def test_a_rows_projection_does_not_depend_on_the_others(
    dtype: torch.dtype, num_threads: int, num_outputs: int, num_inputs: int
) -> None:
    library = native_library()
    if library is None:
        return  # torch's kernels promise no such thing
    kernels = NativeCpuKernels(library)
    torch.manual_seed(0)
    linear = kernels.pack_linear(torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype))
    x = torch.randn(50, num_inputs).to(dtype)
    residual = torch.randn(50, num_outputs).to(dtype)
    alone = torch.cat([linear.add_to(residual[row : row + 1], x[row : row + 1]) for row in range(50)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for count in range(1, 51):
            assert torch.equal(linear.add_to(residual[:count], x[:count]), alone[:count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 1536), (576, 4096)])
def test_rows_are_the_same_in_parts_of_many_and_over_what_they_are_added_to(num_outputs: int, num_inputs: int) -> None:
    """Many rows are multiplied part by part, in tiles that may share some; and the sum takes the residual's place."""
    library = native_library()
    if library is None:
        return
    torch.manual_seed(1)
    kernels = NativeCpuKernels(library)
    linear = kernels.pack_linear(torch.randn(num_outputs, num_inputs).bfloat16(), torch.randn(num_outputs).bfloat16())
    assert isinstance(linear, NativeLinear)
    x, residual = torch.randn(700, num_inputs).bfloat16(), torch.randn(700, num_outputs).bfloat16()
    alone = torch.cat([linear.add_to(residual[row : row + 1], x[row : row + 1]) for row in range(700)])
    for count in (17, 33, 70, 257, 300, 523, 700):
        out = residual[:count].clone()
        linear.compute(
            x.data_ptr(),
            count,
            num_inputs,
            linear.packed.data_ptr(),
            num_outputs,
            None if linear.bias is None else linear.bias.data_ptr(),
            out.data_ptr(),
            out.data_ptr(),
        )
        assert torch.equal(out, alone[:count])


@pytest.mark.parametrize(("num_inputs", "dtype"), [(64, torch.bfloat16), (66, torch.bfloat16), (64, torch.float32)])
def test_a_projection_of_no_rows(num_inputs: int, dtype: torch.dtype) -> None:
    """In a thread that has computed nothing before."""
    library = native_library()
    if library is None:
        return
    linear = NativeCpuKernels(library).pack_linear(torch.randn(40, num_inputs).to(dtype), None)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(linear, torch.empty(0, num_inputs, dtype=dtype)).result().shape == (0, 40)


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of 8 bits, the same on any machine: torch draws others where it computes by other instructions."""
    count = torch.arange(math.prod(shape))
    return (((count + 31 * seed) * (7919 + 2 * seed) % 251 - 125) / 128).view(shape).to(dtype)


def forward_pass(kernels: NativeCpuKernels, dtype: torch.dtype) -> Tensor:
    """A layer's, of a token behind 40 others and of a prompt of 150."""
    heads, kv_heads, dim, hidden, width, block_size = 4, 2, 64, 192, 256, 16
    segments = [
        Segment(first_row=0, num_queries=1, context_len=41, block_table=np.array([[0, 1, 2]], dtype=np.int32)),
        Segment(first_row=1, num_queries=150, context_len=150, block_table=np.arange(3, 13, dtype=np.int32)[None]),
    ]
    geometry = CacheGeometry(block_size=block_size, block_stride=2, num_kv_heads=kv_heads, head_dim=dim)
    count = sum(segment.num_queries for segment in segments)

    def weight(num_outputs: int, num_inputs: int, seed: int) -> Linear:
        return kernels.pack_linear(numbers(num_outputs, num_inputs, dtype=dtype, seed=seed) / 16, None)

    x = numbers(count, hidden, dtype=dtype, seed=1)
    cos, signed_sin = (numbers(count, 1, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    norms = numbers(2, hidden, dtype=dtype, seed=4) + 1
    cache = numbers(2 * 13, block_size * kv_heads * dim, dtype=dtype, seed=5)
    by_slot = cache.view(-1, kv_heads, dim)
    tokens = torch.arange(150)
    slots = torch.cat((torch.tensor([2 * 2 * block_size + 8]), (3 + tokens // block_size) * 2 * block_size))
    slots[1:] += tokens % block_size

    qkv = weight((heads + 2 * kv_heads) * dim, hidden, 6)(kernels.rms_norm(x, norms[0], 1e-6))
    by_head = qkv.view(count, -1, dim)
    qk, v = by_head[:, : heads + kv_heads], by_head[:, heads + kv_heads :]
    into = KVSlots(by_slot, by_slot[block_size:], slots)
    q, k = kernels.rotate_and_store(qk, v, cos, signed_sin, into)
    attention = kernels.plan_attention(segments, geometry, window=None, dtype=dtype)
    attended = attention.attend(q, k, v, cache, group=0, scale=dim**-0.5, softcap=None).flatten(1)
    normed, total = kernels.add_rms_norm(x, weight(hidden, heads * dim, 7)(attended), norms[1], 1e-6)
    gate_up, down = weight(2 * width, hidden, 8)(normed), weight(hidden, width, 9)
    return torch.cat([down.add_to(total, kernels.gated_activation(gate_up, act)) for act in get_args(Activation)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_workers_tell_of_the_sums_that_they_make(dtype: torch.dtype) -> None:
    """Two whose sums differ are told of: so a change of sums, or of their order, changes what they say."""
    library = native_library()
    if library is None:
        return
    found = forward_pass(NativeCpuKernels(library), dtype)
    assert found.isfinite().all()
    digest = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
    name = compiling.processor_instructions().name if dtype is torch.bfloat16 else "registers"
    assert SUMS[name] == digest, f"the sums of {name} are others than they were: write {digest} into kernels/ops.py"
