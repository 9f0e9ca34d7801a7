"""Every shipped kernel compiles for GPUs that are not here, without spills: as recorded, and some of them anew. And
what models launch is shipped."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
import triton
import triton.language as tl

from benchmarks.gpu.compilation import read_record
from engine.checkpoint.adapters import AdapterLayout
from engine.checkpoint.weights import Weights, expected_shapes
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, KVLayout
from engine.model.batch import Batch, build_batch
from engine.model.config import SUPPORTED_ARCHITECTURES, ModelConfig
from engine.model.shards import Shard, possible_degrees
from engine.model.transformer import Model
from engine.sequence import StepPlan
from engine.steps.calibration import compile_kernels
from engine.steps.loading import LoadedModel
from engine.steps.memory_profile import StepSize
from kernels import cache_folder
from kernels.adapters import RowAdapters, StoredLowRank, StoredRows
from kernels.interface import Segment
from kernels.triton import matmul, shipped
from kernels.triton.attention import tiles
from kernels.triton.kernels import GpuKernels
from kernels.triton.sampling.rows import RowOptions, no_edits, pack_edits, pack_rows
from kernels.triton.sampling.sample import sample
from kernels.triton.shipped import Shipped
from tests.support.interpreted import device, uninterpreted_environment
from tests.support.thoroughness import in_test_long

pytestmark = pytest.mark.timeout(3600)  # of a machine that does other work, too

ADVICE = "run python -m benchmarks.gpu.compilation"


@pytest.fixture(scope="module")
def report() -> Any:
    return json.loads(uninterpreted("tests.interpreted.compile_child", *in_test_long("all")))


def uninterpreted(module: str, *arguments: str) -> str:
    """What a module prints that is run without TRITON_INTERPRET."""
    child = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=uninterpreted_environment(),
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_the_record_is_of_what_is_shipped(report: Any) -> None:
    recorded = {name: entry["fingerprint"] for name, entry in read_record()["kernels"].items()}
    shipped = report["fingerprints"]
    assert {name for name in recorded.keys() | shipped.keys() if recorded.get(name) != shipped.get(name)} == set(), (
        ADVICE
    )


def test_every_architecture_is_recorded(report: Any) -> None:
    for name, entry in read_record()["kernels"].items():
        assert entry.keys() == {"fingerprint", *(f"sm_{arch}" for arch in report["architectures"][name])}, ADVICE


def test_how_long_kernels_were_compiled_is_known(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a worker which is the first on its machine is not taken for one that loads for minutes. Those that were
    compiled before are read."""
    assert report["compiling_s"] > 0.0
    monkeypatch.setattr(cache_folder, "_compiling_s", 0.0)
    for cache_hit in (True, False):
        told: dict[str, Any] = {"src": None, "metadata": {}, "metadata_group": {}, "cache_hit": cache_hit}
        triton.knobs.compilation.listener(times=SimpleNamespace(total=2_000_000), **told)
    assert cache_folder.compiling_s() == 2.0


def test_portable_kernels_are_for_all_architectures(report: Any) -> None:
    """A configuration for some architectures only stands beside one of the same operation for all of them."""
    everywhere = {name.partition("-")[0] for name, archs in report["architectures"].items() if len(archs) == 3}
    assert {name.partition("-")[0] for name in report["architectures"]} == everywhere


SHARED_LIMITS = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one block of threads may have (CUDA C++ Programming Guide, compute capabilities). Of an
A100 163 KiB, but of 8.6, 8.9 and 12.x, which are given the same configurations, 99."""


def check(name: str, entry: Any) -> None:
    for architecture, limit in SHARED_LIMITS.items():
        figures = entry.get(f"sm_{architecture}")
        if figures is not None:
            assert figures["spill_store_bytes"] == figures["spill_load_bytes"] == 0, (name, architecture)
            assert figures["shared_bytes"] <= limit, (name, architecture)


def test_nothing_recorded_spills_or_exceeds_shared_memory() -> None:
    for name, entry in read_record()["kernels"].items():
        check(name, entry)


@pytest.mark.parametrize(
    ("capability", "suiting"),
    [
        ((8, 0), 80),
        ((8, 6), 80),
        ((8, 9), 80),
        ((9, 0), 90),
        ((10, 0), 100),
        ((10, 3), 100),
        ((12, 0), 80),
        ((12, 1), 80),
    ],
)
def test_a_gpu_is_given_what_it_has_the_instructions_and_the_memory_for(
    capability: tuple[int, int], suiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Blackwell of 12.x has neither those of servers, nor more than 99 KiB of shared memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda", 0)
    assert shipped.architecture.__wrapped__(gpu) == suiting
    monkeypatch.setattr(matmul, "architecture", shipped.architecture.__wrapped__)
    way = matmul._fetch.__wrapped__(gpu)
    assert suiting in matmul.configuration(torch.bfloat16, True, way, False, False).architectures


def test_decode_fetches_keys_and_values_ahead() -> None:
    """Three tiles of 32 tokens at once: that so many were asked for is not enough (`AHEAD` in `attend_tiles`)."""
    tile_bytes = 2 * 32 * 128 * 2
    entry = read_record()["kernels"]["decode_attention-bf16-128-narrow"]
    assert all(entry[f"sm_{architecture}"]["shared_bytes"] >= 3 * tile_bytes for architecture in (80, 90, 100))


def test_one_configuration_of_each_kernel_compiles_now(report: Any) -> None:
    assert report["compiled"]
    for name, entry in report["compiled"].items():
        check(name, entry)


def test_all_kernels_of_attention_lay_their_products_out_alike() -> None:
    """Batch-invariant attention is to round alike on prefill and decode. With the same instructions over the same
    shapes, spread over the same threads, sums are taken in the same order."""
    products = json.loads(uninterpreted("tests.interpreted.attention_layouts_child").splitlines()[-1])
    assert products["prefill"] == products["decode"] == products["cascade"]
    assert len(products["prefill"]) == 2, "scores, and weighted values; masked and not"
    assert all("instrShape = [16, 8]" in product for product in products["prefill"])


# What checkpoints say beside their family's defaults in transformers, which are mostly those of one of its models.
_ALSO_SAID: dict[str, list[dict[str, Any]]] = {
    "MistralForCausalLM": [{}, {"sliding_window": None}],
    "Qwen2ForCausalLM": [{}, {"use_sliding_window": True, "max_window_layers": 2}],
    "Gemma2ForCausalLM": [{}, {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16}],
    "Gemma3ForCausalLM": [{"sliding_window_pattern": 4}],
    "Phi3ForCausalLM": [{}, {"sliding_window": 2047}],
    "DeepseekV2ForCausalLM": [
        {"num_experts_per_tok": 6, "moe_intermediate_size": 1408} | groups
        for groups in ({}, {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3})
    ],
    "DeepseekV3ForCausalLM": [
        {"n_group": num_groups, "topk_group": -(-num_groups // 2), "norm_topk_prob": normalised}
        for num_groups in (1, 8)
        for normalised in (False, True)
    ],
    "Glm4MoeForCausalLM": [{"head_dim": 128, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}],
    **{
        architecture: [{"norm_topk_prob": normalised} for normalised in (False, True)]
        for architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")
    },
}
_SAID = [(name, also) for name in SUPPORTED_ARCHITECTURES for also in _ALSO_SAID.get(name, [{}])]
_NOT_SHIPPED = {"prefill_attention-bf16-576-invariant"}  # see `kernels.triton.attention.prefill.shipped`
_NUM_LAYERS = 4  # of which one is of another type than the others, where a family has types
_CONTEXT = 9000  # longer than any window


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("architecture", "also"), _SAID)
def test_what_a_model_launches_is_shipped(
    architecture: str, also: dict[str, Any], batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any family, at the size that it has, and of a rank's part of it: by a forward pass and a sampling of tensors
    without memory, in which launches are noted in place of made. In bfloat16, as checkpoints are."""
    launched: set[str] = set()
    monkeypatch.setattr(Shipped, "launch", lambda shipped, grid, **arguments: launched.add(shipped.name))
    kind = getattr(transformers, architecture).config_class
    kind(num_hidden_layers=_NUM_LAYERS, architectures=[architecture], **also).save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    for degree in {1, 2, 8}.intersection(possible_degrees(config)):
        model, kv_cache = _without_memory(Shard(0, degree).config(config), batch_invariant)
        for capability in (80, 90):  # tiles of 100 are those of 90
            monkeypatch.setattr(tiles, "architecture", lambda device, capability=capability: capability)
            _launch_all(model, kv_cache)
    assert any(name.startswith("prefill_attention") for name in launched)
    assert any(name.startswith("sample_logprobs") for name in launched)
    assert launched - read_record()["kernels"].keys() <= _NOT_SHIPPED


class Launching:
    """A runner of tensors without memory, which samples nothing."""

    def __init__(self, config: ModelConfig, model: Model, kv_cache: KVCache) -> None:
        self.config, self._model, self._kv_cache = config, model, kv_cache

    def execute(self, plan: StepPlan) -> None:
        self._model.forward(build_batch(plan, self._kv_cache), self._kv_cache)


_CHUNKS = (*range(1, 18), 32, 33, 64, 65, 300, 1024, 2048)


def _heads(group: int) -> dict[str, Any]:
    """Two key heads and so many query heads for each."""
    return {"hidden_size": 256 * group, "num_attention_heads": 2 * group, "num_key_value_heads": 2}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        *(("LlamaForCausalLM", _heads(group)) for group in (1, 2, 3, 4, 5, 7, 8, 12, 16)),
        ("LlamaForCausalLM", {"num_key_value_heads": 1, "num_attention_heads": 8, "head_dim": 64}),
        *(("MistralForCausalLM", _heads(group)) for group in (1, 4, 7)),
        *((name, {}) for name in ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "Gemma2ForCausalLM")),
        ("DeepseekV2ForCausalLM", _ALSO_SAID["DeepseekV2ForCausalLM"][0]),
    ],
)
def test_no_step_compiles_a_kernel(
    architecture: str, said: dict[str, Any], batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model's forward passes launch was launched when it was loaded: of one decoding or several, which share a
    prefix or do not, of chunks of any length and these beside decoding, within windows and beyond."""
    launched: set[str] = set()
    monkeypatch.setattr(Shipped, "launch", lambda shipped, grid, **arguments: launched.add(shipped.name))
    kind = getattr(transformers, architecture).config_class
    kind(num_hidden_layers=_NUM_LAYERS, architectures=[architecture], **said).save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    model, kv_cache = _without_memory(config, batch_invariant, num_blocks=4096)
    loaded = SimpleNamespace(
        runner=Launching(config, model, kv_cache),
        kv_cache=kv_cache,
        sequence_kv=kv_cache,
        layout=kv_cache.layout,
        block_pool=BlockPool(4096),
        max_model_len=_CONTEXT,
        largest_step=StepSize(num_tokens=2048),
        draft_model=None,
    )
    compile_kernels(cast(LoadedModel, loaded))
    compiled = frozenset(launched)
    launched.clear()
    steps = [[count] for count in _CHUNKS] + [[1, 300], [1] * 64]
    for context_len in (2048, _CONTEXT):
        for queries in steps:
            model.forward(_batch(queries, model.device, context_len), kv_cache)
    assert any(name.startswith("prefill_attention") for name in launched)
    assert launched <= compiled


def test_a_step_with_adapters_asks_the_device_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever launches it would wait for all that is queued: tensors without memory cannot be looked at."""
    monkeypatch.setattr(Shipped, "launch", lambda shipped, grid, **arguments: None)
    transformers.LlamaConfig(num_hidden_layers=2, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    model, kv_cache = _without_memory(ModelConfig.from_folder(tmp_path), batch_invariant=False)
    down = StoredRows(0, torch.bfloat16, num_rows=8, num_columns=4096)
    up = StoredRows(8 * 4096 * 2, torch.bfloat16, num_rows=4096, num_columns=8)
    layout = AdapterLayout(0, {"model.layers.1.self_attn.o_proj": StoredLowRank(down, up)})
    adapter = model.adapter_packer(layout)(memoryview(bytearray(2 * 8 * 4096 * 2)))
    of_row = torch.tensor([0, -1, 0, 0, 0])
    adapters = RowAdapters((adapter,), of_row=of_row, of_output=of_row, device=model.device)
    model.forward(dataclasses.replace(_batch([1, 1, 3], model.device), adapters=adapters), kv_cache)


def _launch_all(model: Model, kv_cache: KVCache) -> None:
    device = model.device
    for queries in ([1, 1, 1], [1 + 4], [700]):  # who share a prefix, one with drafts, a prompt
        hidden = model.forward(_batch(queries, device), kv_cache)
    logits = model.logits(hidden).float()  # as its sampler reads them
    ids, amounts = np.ones(1, dtype=np.int64), np.ones(1, dtype=np.float32)
    edits = pack_edits(ids, ids, amounts, amounts)
    for temperature, top_k, num_top, edited in ((0.0, 0, -1, False), (1.0, 0, 5, True), (1.0, 9, 5, True)):
        options = RowOptions(
            seed=0,
            position=0,
            temperature=temperature,
            top_k=top_k,
            num_top=num_top,
            edits=edits if edited else no_edits(),
        )
        packed = pack_rows([options] * len(logits), model.config.vocab_size)
        sample(logits, packed, torch.from_numpy(packed.words).to(device))


def _without_memory(config: ModelConfig, batch_invariant: bool, num_blocks: int = 16) -> tuple[Model, KVCache]:
    device, dtype = torch.device("meta"), torch.bfloat16
    shapes = expected_shapes(config)
    weights: Weights = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        latent_dim=config.latent_dim,
        block_size=16,
        dtype=dtype,
    )
    kernels = GpuKernels(device, batch_invariant=batch_invariant)
    return Model(config, weights, kernels), KVCache(layout, num_blocks, device)


def _batch(queries: Sequence[int], device: torch.device, context_len: int = _CONTEXT) -> Batch:
    table = np.zeros((1, -(-context_len // 16)), dtype=np.int32)
    firsts, num_rows = np.cumsum([0, *queries]).tolist(), sum(queries)
    rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return Batch(
        token_ids=rows,
        positions=rows,
        slot_mapping=rows.unsqueeze(0),
        segments=tuple(
            Segment(first_row=first, num_queries=count, context_len=context_len, block_table=table)
            for first, count in zip(firsts, queries, strict=False)
        ),
        output_rows=rows,
        sampling_items=(),
        prompt_spans=(),
    )


@triton.jit
def doubled(x, out, num, BLOCK: tl.constexpr):
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + numbers, tl.load(x + numbers, mask=numbers < num, other=0.0) * 2, mask=numbers < num)


def doubling(**changes: Any) -> Shipped:
    types = {"x": "*fp32", "out": "*fp32", "num": "i32"}
    wishes: dict[str, Any] = {"types": types, "constants": {"BLOCK": 64}} | changes
    return Shipped(name="doubled", kernel=doubled, num_warps=1, num_stages=1, **wishes)


def test_a_shipped_kernel_is_launched_with_its_constants() -> None:
    x = torch.randn(100, device=device())
    out = torch.full((128,), 7.0, device=device())
    doubling().launch((2,), x=x, out=out, num=100)
    assert torch.equal(out[:100], x * 2)
    assert (out[100:] == 7.0).all()


def test_every_parameter_has_either_a_type_or_a_value() -> None:
    with pytest.raises(ValueError, match="BLOCK must be a parameter"):
        doubling(constants={})
    with pytest.raises(ValueError, match="WIDTH must be a parameter"):
        doubling(constants={"BLOCK": 64, "WIDTH": 1})
    with pytest.raises(ValueError, match="num must be a parameter"):
        doubling(constants={"BLOCK": 64, "num": 1})
    with pytest.raises(ValueError, match="WIDTH"):
        doubling(aligned=frozenset({"WIDTH"}))
