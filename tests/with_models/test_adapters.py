"""Adapters on one runner: in float32 the tokens of the merged model, and a row's bits are the same in any company."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoint.adapters import (
    WEIGHTS_NAME,
    AdapterLayout,
    adapter_digest,
    largest_adapter_bytes,
)
from engine.model.adapters import AdapterSlot, adapter_pool
from engine.model.config import ModelConfig
from engine.model.transformer import Model
from engine.sequence import Sequence
from engine.steps.threads import StepThreads
from kernels import reference
from kernels.adapters import Adapter, LowRank
from kernels.cpu import kernels as cpu
from kernels.cpu.huge_pages import whole_pages
from kernels.cpu.thread_team import set_team
from kernels.interface import Kernels
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import native_library
from kernels.native.linear import NativeLinear
from tests.engine.checkpoint.test_adapter_folders import parts_of, write_parts
from tests.kernels.test_thread_team import threads_of_process
from tests.support.adapters import ALL, ATTENTION, is_what_the_model_says, merged_tokens, write_adapter
from tests.support.model_families import WITH_HEADS, build_oracle
from tests.support.small_models import random_prompts
from tests.support.stepping import RecordingSampler, Stepper, recording_runner
from tests.support.thoroughness import THOROUGH, combined
from tests.support.waiting import HANGS_S, wait_until

LIBRARIES = [library for library in (native_library(),) if library is not None]  # none where torch computes
NATIVE = [NativeCpuKernels(library) for library in LIBRARIES]
NUM_NEW_TOKENS = 8
NUM_COMPARED = NUM_NEW_TOKENS if THOROUGH else 4  # where it is bits, or other kernels than those that serve


@dataclass(frozen=True)
class Adapted:
    """A model, and the folders of its adapters, which differ in all that they may differ in."""

    folder: Path
    adapters: tuple[Path, ...]
    is_mixture: bool


@pytest.fixture(scope="module", params=WITH_HEADS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    root = tmp_path_factory.mktemp(request.param)
    build_oracle(request.param, root / "model")
    model, is_mixture = root / "model", "moe" in request.param or request.param in ("mixtral", "gpt-oss")
    targets = ATTENTION if is_mixture else ALL
    adapters = (
        write_adapter(root / "whole", model, seed=1, rank=4, targets=targets),
        write_adapter(root / "odd", model, seed=2, rank=7, use_rslora=True, targets=("q_proj", "v_proj", "o_proj")),
        write_adapter(
            root / "wide", model, seed=3, rank=40, layers=(1, 3), alpha_pattern={"v_proj": 9}, targets=targets
        ),
        write_adapter(root / "half", model, seed=4, rank=2, dtype=torch.bfloat16, lora_alpha=5, targets=targets),
    )
    return Adapted(model, adapters, is_mixture)


def slots(model: Model, adapted: Adapted) -> list[AdapterSlot | None]:
    """All of them, and none."""
    pool = adapter_pool(model, ModelConfig.from_folder(adapted.folder), max_loaded=1, max_rank=64)
    named = [(adapter_digest(folder), folder) for folder in adapted.adapters]
    return [None, *(AdapterSlot(digest, folder, pool.load(digest, folder)) for digest, folder in named)]


def drive(
    adapted: Adapted, dtype: torch.dtype, kernels: Kernels | ModuleType | None = None, *, fused: bool = True
) -> tuple[Stepper, RecordingSampler, list[AdapterSlot | None]]:
    runner, sampler = recording_runner(
        adapted.folder, layers_per_group=3, block_size=5, dtype=dtype, num_blocks=900, kernels=kernels
    )
    assert isinstance(runner.model, Model)
    if not fused:
        runner.model.fused = None
    return Stepper(runner, seed=3), sampler, slots(runner.model, adapted)


def with_adapters(stepper: Stepper, found: list[AdapterSlot | None], lengths: list[int]) -> list[Sequence]:
    """A sequence of each length, with the adapters in turn."""
    seqs = [stepper.add(prompt, str(number)) for number, prompt in enumerate(random_prompts(lengths))]
    for number, seq in enumerate(seqs):
        seq.adapter = found[number % len(found)]
    return seqs


@pytest.mark.parametrize("adapted", ["llama"], indirect=True)
def test_what_is_loaded_under_a_digest_is_what_that_is_of(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another adapter lay in the folder just while it was read."""
    first, second, folder = *adapted.adapters[:2], tmp_path / "replaced"
    digest, config = adapter_digest(first), ModelConfig.from_folder(adapted.folder)
    runner, _ = recording_runner(adapted.folder)
    model = runner.model
    assert isinstance(model, Model)
    packer_of = model.adapter_packer

    def put_back(layout: AdapterLayout) -> Callable[[memoryview], Adapter]:
        shutil.copytree(first, folder, dirs_exist_ok=True)
        return packer_of(layout)

    monkeypatch.setattr(model, "adapter_packer", put_back)
    pool = adapter_pool(model, config, max_loaded=1, max_rank=64)
    shutil.copytree(first, folder)
    assert pool.load(digest, folder).num_bytes
    shutil.copytree(second, folder, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="is another one by now"):
        pool.load(digest, folder)
    assert pool.load(digest, folder).num_bytes, "what is there again is loaded"


@pytest.mark.parametrize("adapted", ["llama"], indirect=True)
def test_who_loads_one_leaves_no_threads_behind(adapted: Adapted, tmp_path: Path) -> None:
    """Those that compute steps look for each other no longer as soon as there are more threads than cores."""
    config = ModelConfig.from_folder(adapted.folder)
    model = recording_runner(adapted.folder)[0].model
    assert isinstance(model, Model)
    pool = adapter_pool(model, config, max_loaded=1, max_rank=512)
    large = write_adapter(tmp_path / "large", adapted.folder, seed=1, rank=512)

    def load(digest: str) -> None:
        set_team(3)
        before = threads_of_process()
        pool.load(digest, large)
        wait_until(lambda: not threads_of_process() - before)  # one that was joined may still be on its way out

    with ThreadPoolExecutor(1) as executor:
        executor.submit(load, adapter_digest(large)).result(2 * HANGS_S)


@pytest.mark.parametrize("adapted", ["llama", "phi-3", "mixtral"], indirect=True)
@pytest.mark.parametrize("kernels", [cpu, reference, *NATIVE], ids=["torch", "reference", *["native"] * len(NATIVE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_reckoned_for_the_largest_is_what_it_takes(
    adapted: Adapted, tmp_path: Path, kernels: Kernels, dtype: torch.dtype
) -> None:
    """And an adapter with less of anything takes no more."""
    runner, _ = recording_runner(adapted.folder, dtype=dtype, kernels=kernels)
    model, config = runner.model, ModelConfig.from_folder(adapted.folder)
    assert isinstance(model, Model)
    targets = ATTENTION if adapted.is_mixture else ALL

    def taken(rank: int, layers: tuple[int, ...] | None = None, **told: Any) -> int:
        folder = write_adapter(
            tmp_path / "made", adapted.folder, seed=1, rank=rank, targets=targets, layers=layers, **told
        )
        pool = adapter_pool(model, config, max_loaded=1, max_rank=rank)
        made = pool.load(adapter_digest(folder), folder)
        assert made.num_bytes == bytes_of(made, config.num_layers)
        return made.num_bytes

    for rank in (1, 8, 15, 24, 64):
        reckoned = largest_adapter_bytes(config, rank, dtype, kernels.packed_bytes)
        assert reckoned == taken(rank)
        assert reckoned >= max(taken(-(-rank // 2)), taken(rank, layers=(0, 2)))
    assert reckoned == taken(64, lora_alpha=64), "what is not scaled is not kept where it lies in the file"


def bytes_of(adapter: Adapter, num_layers: int) -> int:
    """All memory that its weights lie in."""
    storages: dict[int, int] = {}
    total, native = 0, []
    for low_rank in low_ranks(adapter, num_layers):
        for linear in () if low_rank is None else (low_rank.down, *(up.linear for up in low_rank.ups)):
            if isinstance(linear, cpu.PackedLinear):
                total += torch.ops.mkldnn._nbytes(linear.weight)
            elif isinstance(linear, NativeLinear):
                native.append(linear.packed)
            else:
                assert isinstance(linear, reference.PlainLinear)
                storage = linear.weight.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    if native:
        first, last = (choose(native, key=Tensor.data_ptr) for choose in (min, max))
        in_one_mapping = last.data_ptr() + last.nbytes - first.data_ptr()
        assert in_one_mapping == sum(packed.nbytes for packed in native)
        total += whole_pages(in_one_mapping)
    return total + sum(storages.values())


@pytest.mark.parametrize("kernels", NATIVE, ids=["native"] * len(NATIVE))
@combined(dtype=[torch.float32, torch.bfloat16], adapted=WITH_HEADS, indirect=["adapted"])
def test_what_one_call_packs_is_what_is_packed_weight_by_weight(
    adapted: Adapted, tmp_path: Path, kernels: Kernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, from files of any type, also where the tensors of several lie behind each other."""
    model = recording_runner(adapted.folder, dtype=dtype, kernels=kernels)[0].model
    config = ModelConfig.from_folder(adapted.folder)
    assert isinstance(model, Model)
    targets = ATTENTION if adapted.is_mixture else ALL
    half = write_adapter(
        tmp_path / "float16", adapted.folder, seed=5, rank=33, dtype=torch.float16, lora_alpha=7, targets=targets
    )
    pool = adapter_pool(model, config, max_loaded=1, max_rank=64)
    for folder in (*adapted.adapters, half, in_several_types(half, tmp_path / "mixed")):
        found = pool.load(adapter_digest(folder), folder)
        with monkeypatch.context() as patched:
            patched.setattr(NativeCpuKernels, "adapter_form", lambda *_: None)
            by_weights = adapter_pool(model, config, max_loaded=1, max_rank=64)
            expected = by_weights.load(adapter_digest(folder), folder)
        assert expected.native is None
        assert found.native is not None and found.num_bytes == expected.num_bytes
        pairs = list(zip(*(low_ranks(each, config.num_layers) for each in (found, expected)), strict=True))
        assert any(low_rank is not None for _, low_rank in pairs)
        for one, other in pairs:
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert [(up.ranks, up.outputs) for up in one.ups] == [(up.ranks, up.outputs) for up in other.ups]
                assert packed_weights(one) == packed_weights(other)


def in_several_types(adapter: Path, folder: Path) -> Path:
    """The same adapter with each second tensor in float32, wherever that comes to lie."""
    shutil.copytree(adapter, folder)
    header, data = parts_of(adapter / WEIGHTS_NAME)
    pieces, place = [], 0
    for number, (name, fields) in enumerate(header.items()):
        if name == "__metadata__":
            continue
        stored = torch.frombuffer(bytearray(data[slice(*fields["data_offsets"])]), dtype=torch.float16)
        piece = (stored.float() if number % 2 else stored).numpy().tobytes()
        fields["dtype"], fields["data_offsets"] = "F32" if number % 2 else "F16", [place, place + len(piece)]
        pieces.append(piece)
        place += len(piece)
    write_parts(folder / WEIGHTS_NAME, header, b"".join(pieces))
    return folder


def low_ranks(adapter: Adapter, num_layers: int) -> list[LowRank | None]:
    layers = map(adapter.layer, range(num_layers))
    return [low for layer in layers for low in (layer.qkv, layer.output, layer.gate_up, layer.down)]


def packed_weights(low_rank: LowRank) -> list[bytes]:
    linears = (low_rank.down, *(up.linear for up in low_rank.ups))
    packed = [linear.packed for linear in linears if isinstance(linear, NativeLinear)]
    assert len(packed) == len(linears)
    return [weight.view(torch.uint8).numpy().tobytes() for weight in packed]


@pytest.mark.parametrize("adapted", ["llama"], indirect=True)
@pytest.mark.parametrize("kernels", NATIVE, ids=["native"] * len(NATIVE))
def test_the_second_of_a_recipe_makes_no_tensor_for_each_weight(
    adapted: Adapted, tmp_path: Path, kernels: Kernels
) -> None:
    """Hundreds of calls would take longer than all that they do."""
    model = recording_runner(adapted.folder, kernels=kernels)[0].model
    assert isinstance(model, Model)
    pool = adapter_pool(model, ModelConfig.from_folder(adapted.folder), max_loaded=1, max_rank=64)
    first, second = (write_adapter(tmp_path / str(seed), adapted.folder, seed=seed) for seed in (1, 2))
    pool.load(adapter_digest(first), first)
    with CountingOperators() as operators:
        pool.load(adapter_digest(second), second)
    assert operators.num_called < 10 < len(load_file(second / WEIGHTS_NAME))


class CountingOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_called = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_called += 1
        return func(*args, **(kwargs or {}))


def assert_merged(adapted: Adapted, seq: Sequence, num_tokens: int = NUM_NEW_TOKENS) -> None:
    adapter, found = None if seq.adapter is None else seq.adapter.folder, seq.output_token_ids[:num_tokens]
    assert found == merged_tokens(adapted.folder, adapter, seq.prompt_token_ids, num_tokens, guess=found)


def test_many_in_one_batch_bring_the_merged_models_tokens(adapted: Adapted) -> None:
    stepper, _, found = drive(adapted, torch.float32)
    seqs = with_adapters(stepper, found, [3, 17, 40, 1, 25, 33, 9, 20, 5, 12])
    stepper.generate_mixed(seqs, NUM_NEW_TOKENS)
    for seq in seqs:
        assert_merged(adapted, seq)
    changed = {
        seq.adapter
        for seq in seqs
        if seq.adapter is not None
        and not is_what_the_model_says(adapted.folder, seq.prompt_token_ids, seq.output_token_ids[:NUM_NEW_TOKENS])
    }
    assert changed == set(found) - {None}, "an adapter that changes nothing shows nothing"


@combined(kernels={"torch": cpu, "reference": reference}, adapted=WITH_HEADS, indirect=["adapted"])
def test_so_does_any_other_set_of_kernels(adapted: Adapted, kernels: ModuleType) -> None:
    stepper, _, found = drive(adapted, torch.float32, kernels)
    seqs = with_adapters(stepper, found, [3, 17, 4, 9, 12])
    stepper.generate_mixed(seqs, NUM_COMPARED)
    for seq in seqs:
        assert_merged(adapted, seq, NUM_COMPARED)


@pytest.mark.parametrize("library", LIBRARIES, ids=["native"] * len(LIBRARIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequences_bits_are_the_same_in_any_company(adapted: Adapted, library: object, dtype: torch.dtype) -> None:
    """Alone, beside others with and without adapters, in any chunks, in one call of the layers or in several."""
    lengths = [3, 17, 40, 1, 25, 33, *([9, 20, 5, 12] if THOROUGH else [])]
    stepper, sampler, found = drive(adapted, dtype)
    for seq in with_adapters(stepper, found, lengths):
        stepper.generate(seq, NUM_COMPARED)
    alone = {request_id: torch.stack(rows) for request_id, rows in sampler.sampled.items()}
    for fused in (True, False):
        stepper, sampler, found = drive(adapted, dtype, fused=fused)
        stepper.generate_mixed(with_adapters(stepper, found, lengths), NUM_COMPARED)
        for request_id, logits in alone.items():
            assert torch.equal(torch.stack(sampler.sampled[request_id])[:NUM_COMPARED], logits)
            assert logits.isfinite().all()


@pytest.mark.parametrize("library", LIBRARIES, ids=["native"] * len(LIBRARIES))
@combined(dtype=[torch.float32, torch.bfloat16], adapted=WITH_HEADS, indirect=["adapted"])
def test_the_same_bits_where_each_thread_takes_rows_of_its_own(
    adapted: Adapted, library: object, dtype: torch.dtype
) -> None:
    """In steps of several hundred rows."""
    lengths = [290, 150, 61, 200, 120, 90]  # more than three threads need for rows of their own
    seen = []
    for num_threads in (1, 2, 3):
        runner, sampler = recording_runner(
            adapted.folder,
            layers_per_group=3,
            dtype=dtype,
            num_blocks=1500,
            threads=StepThreads(num_threads, few_tokens=16),
        )
        assert isinstance(runner.model, Model)
        stepper = Stepper(runner, seed=3)
        seqs = with_adapters(stepper, slots(runner.model, adapted), lengths)
        stepper.step([(seq, seq.num_uncomputed - 7) for seq in seqs])
        stepper.step([(seq, 7) for seq in seqs])
        stepper.step([(seq, 1) for seq in seqs])
        seen.append(torch.stack([row for seq in seqs for row in sampler.sampled[seq.request_id]]))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert seen[0].isfinite().all()
