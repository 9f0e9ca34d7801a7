"""GGUF files computed with as they are: blocks against gguf's own values, and whole models against converted ones."""

from __future__ import annotations

import math
import random
import re
import shutil
import struct
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as ValueKind
from gguf.gguf_writer import GGUFValue
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cluster.command.check import worker_memory
from cluster.config.load import load_config
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.gguf.blocks import quantised_weight
from engine.checkpoint.gguf.checkpoint import convert_gguf, describe_gguf
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.store import resolve_model
from engine.checkpoint.weights import Weights, load_weights
from engine.model.config import ModelConfig
from engine.model.shards import shards_of
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from kernels.native.library import native_library
from kernels.native.linear import can_pack_quantised
from kernels.quantised_weight import QuantisedWeight, side_by_side
from tests.support.model_families import VOCAB_SIZE, build_oracle
from tests.support.small_models import greedy

# Bytes of a block, and where its float16 numbers begin.
BLOCKS = {
    Kind.Q4_0: (18, (0,)),
    Kind.Q4_1: (20, (0, 2)),
    Kind.Q5_0: (22, (0,)),
    Kind.Q5_1: (24, (0, 2)),
    Kind.Q8_0: (34, (0,)),
    Kind.Q4_K: (144, (0, 2)),
    Kind.Q6_K: (210, (208,)),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_library()  # else it would be compiled anew for that cache
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_gguf_says_they_are(kind: Kind) -> None:
    block_bytes, halves = BLOCKS[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (6, 5, block_bytes), dtype=np.uint8)
    for first in halves:
        blocks[..., first : first + 2] = random.standard_normal((6, 5, 1)).astype(np.float16).view(np.uint8)
    data = blocks.reshape(6, -1)
    weight = quantised_weight(data, kind)
    assert weight is not None
    assert np.array_equal(weight.dequantise(torch.float32).numpy(), gguf.dequantize(data, kind))


def test_other_kinds_have_no_such_form() -> None:
    assert quantised_weight(np.zeros((2, 110), dtype=np.uint8), Kind.Q3_K) is None


# What llama.cpp's converter calls the tensors of Llama, Qwen and Phi.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q4_1, "attn_output": Kind.F16, "output": Kind.Q8_0}


def write_gguf(
    path: Path,
    folder: Path,
    config: Any,
    changes: dict[str, GGUFValue] | None = None,
    *,
    in_blocks: bool = True,
    rope_divisors: list[float] | None = None,
) -> None:
    """The model in `folder`, its projections in blocks of several kinds. `changes`: to what is said of it."""
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.model_type == "phi3":
        width = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(config.rope_parameters.get("partial_rotary_factor", 1.0) * width))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["t", "1", *(f"t{index}" for index in range(1, VOCAB_SIZE - 1))])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["t 1"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        add_tensor(writer, name, tensor.numpy(), config, in_blocks)
    for kind in ("short", "long"):
        if factors := config.rope_parameters.get(f"{kind}_factor"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, dtype=np.float32))
    if rope_divisors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, dtype=np.float32))
    writer.kv_data[0].update(changes or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: Any, name: str, values: npt.NDArray[np.float32], config: Any, in_blocks: bool) -> None:
    stem, _, ending = name.rpartition(".")
    prefix, _, rest = stem.rpartition("layers.")[2].partition(".") if "layers." in stem else ("", "", stem)
    short = NAMES[rest]
    full = f"blk.{prefix}.{short}.{ending}" if prefix else f"{short}.{ending}"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
    if heads is not None and config.model_type == "llama":  # the two halves of a head become neighbours
        rows, columns = values.shape
        values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    is_plain = not in_blocks or "norm" in short or ending == "bias"
    kind = Kind.F32 if is_plain else KINDS.get(short, Kind.Q4_0)
    if kind == Kind.F32:
        writer.add_tensor(full, values)
    else:
        writer.add_tensor(full, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def gguf_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = build_oracle("llama", tmp_path / "hf", intermediate_size=128, tie_word_embeddings=request.param)
    path = tmp_path / "small.gguf"
    write_gguf(path, tmp_path / "hf", model.config)
    return path


def test_a_file_is_loaded_in_its_blocks(gguf_file: Path, tmp_path: Path) -> None:
    """With the values that it converts to, of which bfloat16 keeps eight bits; and nothing is written but text."""
    folder = resolve_model(str(gguf_file))
    assert (folder / "model.gguf").resolve() == gguf_file
    assert sum(path.stat().st_size for path in folder.iterdir() if not path.is_symlink()) < 50_000
    assert resolve_model(str(gguf_file)) == folder
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, dtype=torch.float32)
    convert_gguf(gguf_file, tmp_path / "converted", progress=lambda message: None)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    head = {"lm_head.weight": converted["model.embed_tokens.weight"]} if config.tied_embeddings else {}
    assert weights.keys() == converted.keys() | head.keys()
    for name, expected in (converted | head).items():
        weight = weights[name]
        values = weight.dequantise(torch.float32) if isinstance(weight, QuantisedWeight) else weight
        assert torch.equal(values.bfloat16(), expected), name
    kept = {name.split(".")[-2] for name, weight in weights.items() if isinstance(weight, QuantisedWeight)}
    assert kept == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi-3", "phi-3-long"])
def test_a_file_is_the_model_that_it_was_made_of(family: str, tied: bool, tmp_path: Path) -> None:
    rope = {} if "phi" in family else {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    model = build_oracle(family, tmp_path / "hf", tie_word_embeddings=tied, **rope)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", model.config, in_blocks=False)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    config = ModelConfig.from_folder(folder)
    assert config == ModelConfig.from_folder(tmp_path / "hf")
    weights, stored = (load_weights(path, config, dtype=torch.float32) for path in (folder, tmp_path / "hf"))
    assert weights.keys() - stored.keys() <= {"lm_head.weight"}  # which may be another than the embedding
    for name, expected in stored.items():
        found = weights[name]
        assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
        assert torch.equal(found, expected), name


def held_bytes(weights: Weights) -> int:
    """In bfloat16 on a CPU: what lies side by side is of one form, or values where a scale is of too few inputs."""
    together: dict[str, list[torch.Tensor | QuantisedWeight]] = {}
    for name, weight in weights.items():
        together.setdefault(re.sub("(gate|up)_proj|[qkv]_proj", "together", name), []).append(weight)
    num_bytes = 0
    for parts in together.values():
        quantised = [part for part in parts if isinstance(part, QuantisedWeight)]
        whole = side_by_side(quantised) if len(quantised) == len(parts) else None
        is_kept = whole is not None and can_pack_quantised(whole, torch.bfloat16)
        num_bytes += whole.nbytes if whole is not None and is_kept else 2 * sum(prod(part.shape) for part in parts)
    return num_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "phi-3"])
def test_what_legato_check_says_of_a_file_is_what_is_held(family: str, tmp_path: Path, num_ranks: int) -> None:
    """Of 96 inputs four ranks have 24 each, and no scale has 16."""
    model = build_oracle(family, tmp_path, intermediate_size=96)
    write_gguf(tmp_path / "small.gguf", tmp_path, model.config)
    tree = {"model": {"ref": str(tmp_path / "small.gguf")}, "prefill": {"replicas": 0}}
    folder = resolve_model(str(tmp_path / "small.gguf"))
    config = ModelConfig.from_folder(folder)
    loaded = [load_weights(folder, config, dtype=torch.bfloat16, shard=shard) for shard in shards_of(config, num_ranks)]
    said = worker_memory("decode", load_config(tree | {"decode": {"tensor_parallel": num_ranks}}), folder)
    assert said.weight_bytes == sum(map(held_bytes, loaded))


def test_a_file_generates_what_its_values_generate(gguf_file: Path, tmp_path: Path) -> None:
    """In float32: as a checkpoint that stores the same values."""
    folder = resolve_model(str(gguf_file.parent))
    stored = tmp_path / "stored"
    stored.mkdir()
    for path in folder.iterdir():
        if not path.is_symlink():
            shutil.copy(path, stored)
    weights = load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)
    values = {
        name: weight.dequantise(torch.float32) if isinstance(weight, QuantisedWeight) else weight
        for name, weight in weights.items()
    }
    save_file(values, stored / "model.safetensors", metadata={"format": "pt"})
    assert generated(str(gguf_file)) == generated(str(stored))


def generated(model_ref: str) -> list[list[int]]:
    model = load_model(
        EngineConfig(model_ref=model_ref, model_name="small", dtype="float32", kv_blocks=64, num_threads=1)
    )
    seqs = [
        Sequence(request_id=str(length), attempt=0, params=greedy(12), prompt_token_ids=list(range(3, 3 + length)))
        for length in (2, 40)
    ]
    for _ in LocalEngine(model).run(seqs):
        pass
    return [seq.output_token_ids for seq in seqs]


def test_what_cannot_be_done_with_it_is_said(gguf_file: Path, tmp_path: Path) -> None:
    folder = resolve_model(str(gguf_file))
    config = ModelConfig.from_folder(folder)
    with pytest.raises(ValueError, match="quantised already"):
        load_weights(folder, config, Quantisation(name="int8", group_size=32), dtype=torch.float32)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF but no more")
    with pytest.raises(ValueError, match=r"damaged\.gguf cannot be used as the GGUF file"):
        resolve_model(str(damaged))


def mutated(data: bytes, seed: int) -> bytes:
    """With a few things wrong before its tensors begin."""
    rng = random.Random(seed)
    described = data.index(b"output_norm.weight") + 500
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(min(described, len(changed)))
        few = rng.choice([rng.randbytes(1), rng.randbytes(4), bytes(8), b"\xff" * 8, b"\1" + bytes(7)])
        kept = rng.choice([at, at + len(few), at + len(few), at + len(few), at + 4, len(changed) - 8])
        changed[at:kept] = few
    return bytes(changed)


def test_a_tensor_that_is_damaged_is_named(gguf_file: Path) -> None:
    """Here one whose rows are gone: its count lies behind its name and its number of dimensions, as in every GGUF."""
    data, name = bytearray(gguf_file.read_bytes()), b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 8
    data[at : at + 8] = bytes(8)
    damaged = gguf_file.with_name("damaged.gguf")
    damaged.write_bytes(data)
    folder = resolve_model(str(damaged))
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.ffn_down\.weight' of the GGUF file .* cannot be used"):
        load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)


def test_a_damaged_file_is_refused_in_words(gguf_file: Path) -> None:
    """Or it is one that works: whatever its readers stumble over is a ValueError that names the file."""
    data = gguf_file.read_bytes()
    damaged = gguf_file.with_name("damaged.gguf")
    refused = 0

    @settings(max_examples=60)
    @given(st.integers(0, 2**32))
    def load(seed: int) -> None:
        nonlocal refused
        damaged.write_bytes(mutated(data, seed))
        try:
            folder = resolve_model(str(damaged))
            load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)
        except ValueError as error:
            assert "gguf" in str(error).lower() or str(folder) in str(error), error
            refused += 1

    load()
    assert refused > 20


@pytest.mark.parametrize(
    ("key", "value", "kind", "stumbled"),
    [
        ("llama.attention.head_count", 0, ValueKind.UINT32, "ZeroDivisionError"),
        ("tokenizer.ggml.tokens", 7, ValueKind.UINT32, "TypeError"),
        ("tokenizer.ggml.merges", ["no token"], ValueKind.ARRAY, "Exception: Error while initializing BPE"),
        ("llama.embedding_length", "many", ValueKind.STRING, "StrictDataclassFieldValidationError"),
    ],
)
def test_a_value_that_its_readers_stumble_over_is_the_file_s(
    key: str, value: Any, kind: ValueKind, stumbled: str, tmp_path: Path
) -> None:
    model = build_oracle("llama", tmp_path / "hf", intermediate_size=128)
    write_gguf(tmp_path / "odd.gguf", tmp_path / "hf", model.config, {key: GGUFValue(value, kind)})
    with pytest.raises(ValueError, match=rf"odd\.gguf cannot be used .*{stumbled}"):
        resolve_model(str(tmp_path / "odd.gguf"))


def described_llama(tmp_path: Path, **told: Any) -> ModelConfig:
    """The config of a Llama's file that says so of its rotary embedding and its tokens, too."""
    kinds = {str: ValueKind.STRING, float: ValueKind.FLOAT32, int: ValueKind.UINT32}
    changes = {name.replace("__", "."): GGUFValue(value, kinds[type(value)]) for name, value in told.items()}
    model = build_oracle("llama", tmp_path / "hf", intermediate_size=128)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", model.config, changes)
    return ModelConfig.from_folder(resolve_model(str(tmp_path / "model.gguf")))


def test_positions_are_scaled_as_the_file_says(tmp_path: Path) -> None:
    told = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    ropes = {layer.rope for layer in described_llama(tmp_path, **told).layers}
    assert [(rope.kind, rope.factor) for rope in ropes] == [("linear", 4.0)]


def test_a_file_that_says_nothing_of_positions(tmp_path: Path) -> None:
    """As those of Llama 2, which turn by the usual base."""
    model = build_oracle("llama", tmp_path / "hf", intermediate_size=128)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", model.config)
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"llama.rope.freq_base", b"llama.rope.freq_gone"))
    assert ModelConfig.from_folder(resolve_model(str(tmp_path / "model.gguf"))).layers[0].rope.theta == 10_000.0


def test_a_scaling_of_positions_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scaled by 'yarn'"):
        described_llama(tmp_path, llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0)


LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama_3_divisors(head_dim: int, factor: float) -> list[float]:
    """As llama.cpp's converter works them out of the above."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500_000.0 ** (index / head_dim)
        kept = min(max((8192 / wavelength - 1.0) / 3.0, 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return divisors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_1_s_positions_are_known_by_their_divisors(factor: float, tmp_path: Path) -> None:
    model = build_oracle("llama", tmp_path / "hf", rope_parameters=LLAMA_3_1 | {"factor": factor})
    divisors = llama_3_divisors(model.config.head_dim, factor)
    assert 1.0 in divisors and any(1.0 < divisor < factor for divisor in divisors) and factor in divisors
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", model.config, in_blocks=False, rope_divisors=divisors)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    assert ModelConfig.from_folder(folder).layers == ModelConfig.from_folder(tmp_path / "hf").layers
    load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)


def test_other_divisors_of_positions_are_refused(tmp_path: Path) -> None:
    model = build_oracle("llama", tmp_path / "hf", rope_parameters=LLAMA_3_1)
    divisors = [min(2.0 * divisor, 8.0) for divisor in llama_3_divisors(model.config.head_dim, 8.0)]
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", model.config, in_blocks=False, rope_divisors=divisors)
    with pytest.raises(ValueError, match="scaled by other divisors"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_the_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    assert described_llama(tmp_path, tokenizer__ggml__eot_token_id=7).eos_token_ids == (2, 7)


def test_llama_2_s_tokenizer_is_not_taken_for_gemma_s(tmp_path: Path) -> None:
    """Both are named the same, but before a text it puts a space."""
    with pytest.raises(ValueError, match="begin with a space"):
        described_llama(tmp_path, tokenizer__ggml__model="llama", tokenizer__ggml__pre="default")


def described_gemma3(folder: Path, *, num_layers: int, factor: float | None = None) -> ModelConfig:
    """The config of a file that says all of a Gemma 3, and has none of its tensors."""
    writer = gguf.GGUFWriter(folder / "gemma.gguf", "gemma3")
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_block_count(num_layers)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_context_length(256)
    writer.add_sliding_window(7)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "<unk>", "a"])
    writer.add_token_types([3, 3, 3, 2, 1])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "described").mkdir()
    describe_gguf(folder / "gemma.gguf", folder / "described")
    return ModelConfig.from_folder(folder / "described")


def test_gemma_3_scales_the_positions_of_its_full_layers(tmp_path: Path) -> None:
    config = described_gemma3(tmp_path, num_layers=6, factor=8.0)
    *sliding, full = [(layer.window, layer.rope.kind, layer.rope.factor) for layer in config.layers]
    assert full == (None, "linear", 8.0)
    assert {(window, kind) for window, kind, _ in sliding} == {(7, "default")}


@pytest.mark.parametrize(("num_layers", "divided_by"), [(18, 32), (62, 16)])
def test_the_largest_gemma_3_scales_attention_by_its_width(num_layers: int, divided_by: int, tmp_path: Path) -> None:
    assert described_gemma3(tmp_path, num_layers=num_layers).attention_scale == divided_by**-0.5


def test_arrays_within_arrays_are_refused(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", ValueKind.ARRAY, 1) * 3_000 + struct.pack("<IQB", ValueKind.UINT8, 1, 0)
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    path = tmp_path / "nested.gguf"
    path.write_bytes(header + struct.pack("<Q4sI", 4, b"deep", ValueKind.ARRAY) + nested)
    with pytest.raises(ValueError, match=r"nested\.gguf cannot be used .*RecursionError"):
        resolve_model(str(path))
