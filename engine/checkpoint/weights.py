"""A model's tensors, read from its checkpoint, checked against its config, and cut for a shard.

Projections may be of 4 or 8 bits: stored so, or rounded as they are loaded. Knows the names and shapes of tensors and
which kinds of checkpoints there are; not how each of them stores blocks, nor what is computed with them. Nothing but
safetensors and GGUF files is ever opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.gguf.store import GGUF_NAME
from engine.checkpoint.packing import WeightPacking
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.stacked_tensors import TensorPart, fused_parts, unstacked
from engine.memory.devices import CPU
from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.shards import WHOLE, Part, Shard
from kernels.quantised_weight import QuantisedWeight

Weights = dict[str, Tensor | QuantisedWeight]
"""By their names in the checkpoint; only projections may be quantised. A quantised `lm_head.weight` is there even if it
is the embedding. Who builds a model takes the tensors out, so that none is held twice."""

LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class LoadProgress:
    """How much of a checkpoint a process has loaded, in bytes of its files: written by the thread that loads, read by
    who tells of it.

    `read_bytes` have been read, as far as they are not only mapped; `placed_bytes` of them lie as the kernels want
    them. Who passes over the weights once more, as the first one to pack them does, adds nothing. All 0: not begun.
    """

    total_bytes: int = 0
    read_bytes: int = 0
    placed_bytes: int = 0


_DERIVED = ".rotary_emb.inv_freq"  # a buffer that some old checkpoints saved
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_BASE = "model."
# What Mixtral, gpt-oss and Qwen2-MoE call otherwise than the others.
_RENAMED = re.compile(r"\.block_sparse_moe\.|(?<=\.)w[123](?=\.)|\.mlp\.router\.|\.shared_expert(?=[._])")
_OTHERS = {
    ".block_sparse_moe.": ".mlp.",
    ".mlp.router.": ".mlp.gate.",
    ".shared_expert": ".shared_experts",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_LATENTS_KEYS_AND_VALUES = "kv_b_proj.weight"
_CORRECTION = "mlp.gate.e_score_correction_bias"  # of a router: whose differences bfloat16 would lose
_PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_SCALES = ("weight_scale_inv", "weight_scale")  # as transformers calls them, and as others do
_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
_BESIDE_SCALES = ("weight_zero_point", "weight_g_idx", "weight_shape")
_COMPARED_ROWS = 4096
_BY_NAME: Final = dict(zip(("F32", "BF16", "F16"), LOADABLE_DTYPES, strict=True))  # as files call them
_LENGTH_BYTES: Final = 8  # of the header's length, with which a file of tensors begins
_LONGEST_HEADER: Final = 100_000_000  # bytes, by the format
# To round activations and KV by, which loses what is not lost here: they stay as they are.
_ROUNDING = re.compile(r".*\.(input|output|activation|[qkv]|kv)_(scale|zero_point)")


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    quantisation: Quantisation | None = None,
    *,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
    progress: LoadProgress | None = None,
) -> Weights:
    """Every tensor of the model, or what a shard has of it, as `dtype` where it is not quantised.

    A shard's values are those of the whole. They go to `device` one by one, straight from the file: host memory never
    holds more than one of them beside those that belong there. Raises ValueError if one lacks, has a wrong shape, or is
    unknown, if the model is to be rounded by `quantisation` and has codes already, and as `Quantisation.quantise`.
    `progress` is told of each tensor that is read, and of each that is taken out of what this gives.
    """
    if dtype not in LOADABLE_DTYPES:
        raise ValueError(f"weights can be loaded as float32, bfloat16 or float16, not as {dtype}")
    weights = _Counted(progress or LoadProgress(), Path(folder), config)
    # What is rounded is rounded on the CPU.
    for name, stored in _stored(Path(folder), config, quantisation, CPU if quantisation else device):
        is_quantised = quantisation is not None or isinstance(stored, QuantisedWeight)
        is_head_too = is_quantised and name == _EMBEDDING and config.tied_embeddings
        for target in (name, _HEAD) if is_head_too else (name,):
            part = shard.part(target, tuple(stored.shape), config)
            if part is None:
                weights.placed(target)
            else:
                weight = _part_of(stored, part, quantisation, target)
                if isinstance(weight, QuantisedWeight) and not is_projection(target):
                    weight = weight.dequantise(dtype)
                stays = torch.float32 if target.endswith(_CORRECTION) else dtype
                # Some columns are not contiguous, as they are read.
                weights[target] = weight.to(device, stays).contiguous() if isinstance(weight, Tensor) else weight
        weights.read(name)
    return weights


def load_output_layer(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """`[vocabulary, hidden size]`, alone. Raises ValueError as `load_weights` does."""
    found: dict[str, Tensor | QuantisedWeight] = {}
    last = _HEAD if not config.tied_embeddings or _has_head(folder) else _EMBEDDING
    for name, stored in _stored(folder, config, None, CPU):
        if name == _HEAD or (name == _EMBEDDING and config.tied_embeddings):
            found[name] = _part_of(stored, (), None, name)
        if name == last:  # of what is packed each tensor costs its unpacking
            break
    layer = found.popitem()[1]  # of two the head, which comes last
    return layer.dequantise(dtype) if isinstance(layer, QuantisedWeight) else layer.to(dtype)


class _Counted(dict[str, Tensor | QuantisedWeight]):
    """Weights that tell how many of them were put in, and taken out again. Counted by tensors' sizes in the model: what
    each takes in a file is its format's affair."""

    def __init__(self, progress: LoadProgress, folder: Path, config: ModelConfig) -> None:
        super().__init__()
        files = [path for kind in ("*.safetensors", GGUF_NAME) for path in folder.glob(kind)]
        progress.total_bytes = sum(path.stat().st_size for path in files)
        self._progress = progress
        self._sizes = {name: prod(shape) for name, shape in expected_shapes(config).items()}
        self._num_values = sum(self._sizes.values())
        self._num_read = self._num_placed = 0

    def read(self, name: str) -> None:
        self._num_read += self._sizes.get(name, 0)
        self._progress.read_bytes = max(self._progress.read_bytes, self._bytes(self._num_read))

    def placed(self, name: str) -> None:
        self._num_placed += self._sizes.get(name, 0)
        self._progress.placed_bytes = max(self._progress.placed_bytes, self._bytes(self._num_placed))

    def pop(self, name: str, *default: Any) -> Any:
        weight = super().pop(name, *default)
        self.placed(name)
        return weight

    def _bytes(self, num_values: int) -> int:
        return self._progress.total_bytes * num_values // self._num_values


def canonical_name(given: str, expected: Container[str]) -> str:
    """What a tensor of a checkpoint is called in `expected_shapes`, of whose names are `expected`."""
    name = _RENAMED.sub(lambda match: _OTHERS[match[0]], given)
    # A model that was saved without its head, as most that are made for embeddings.
    return f"{_BASE}{name}" if name.startswith("layers.") or f"{_BASE}{name}" in expected else name


def is_projection(name: str) -> bool:
    """Whether a tensor of this name is multiplied with activations, and so may be quantised."""
    if name.endswith(_LATENTS_KEYS_AND_VALUES):  # half of it is multiplied from the other side
        return False
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or name == _HEAD


def require_roundable(folder: Path, config: ModelConfig, quantisation: Quantisation) -> None:
    """Raises ValueError where the weights have codes already, or some have inputs that do not divide into groups. Reads
    no weights."""
    if (folder / GGUF_NAME).exists() or (config.packing is not None and config.packing.stays_packed):
        raise ValueError(
            f"the model in {folder} is quantised already, so model.quantization: {quantisation.name} would round it"
            " twice; leave it out"
        )
    for name, shape in expected_shapes(config).items():
        if is_projection(name):
            quantisation.require_groups(shape[1])


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that a checkpoint of this model must hold."""
    embedding = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = embedding
    for index, layer in enumerate(config.layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config, layer.experts)})
    return shapes


def _layer_shapes(config: ModelConfig, experts: ExpertsConfig | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    projections = list(_attention_projections(config))
    width, mlps = config.intermediate_size, {"mlp": config.intermediate_size}
    if experts is not None:
        projections.append(("mlp.gate", experts.num_experts, hidden, experts.router_bias))
        mlps = {f"mlp.experts.{number}": experts.width for number in range(experts.num_experts)}
        if experts.shared_width:
            mlps["mlp.shared_experts"] = experts.shared_width
        if experts.shared_gate:
            projections.append(("mlp.shared_experts_gate", 1, hidden, False))
        if experts.corrected:
            yield _CORRECTION, (experts.num_experts,)
    for mlp, width in mlps.items():
        projections += [(f"{mlp}.{name}_proj", width, hidden, config.mlp_bias) for name in ("gate", "up")]
        projections.append((f"{mlp}.down_proj", hidden, width, config.mlp_bias))
    for name, rows, columns, has_bias in projections:
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)
    norms = config.norms
    for norm in (norms.attention, norms.attention_output, norms.mlp, norms.mlp_output):
        if norm is not None:
            yield f"{norm}.weight", (hidden,)
    if config.attention_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    if config.qk_norm is not None:
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            normed = heads if config.qk_norm == "all heads" else 1
            yield f"self_attn.{name}_norm.weight", (normed * config.head_dim,)
    if config.latent is not None:
        yield "self_attn.kv_a_layernorm.weight", (config.latent.rank,)
        if config.latent.query_rank is not None:
            yield "self_attn.q_a_layernorm.weight", (config.latent.query_rank,)


def _attention_projections(config: ModelConfig) -> Iterator[tuple[str, int, int, bool]]:
    """Name, outputs, inputs, and whether it has a bias."""
    hidden, latent = config.hidden_size, config.latent
    if latent is None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        yield "self_attn.q_proj", q_size, hidden, config.qkv_bias
        yield "self_attn.k_proj", kv_size, hidden, config.qkv_bias
        yield "self_attn.v_proj", kv_size, hidden, config.qkv_bias
        yield "self_attn.o_proj", hidden, q_size, config.output_bias
        return
    q_size = config.num_heads * config.query_dim
    if latent.query_rank is None:
        yield "self_attn.q_proj", q_size, hidden, False
    else:
        yield "self_attn.q_a_proj", latent.query_rank, hidden, config.qkv_bias
        yield "self_attn.q_b_proj", q_size, latent.query_rank, False
    yield "self_attn.kv_a_proj_with_mqa", latent.rank + latent.rotary_dim, hidden, config.qkv_bias
    yield "self_attn.kv_b_proj", config.num_heads * (latent.plain_dim + latent.value_dim), latent.rank, False
    yield "self_attn.o_proj", hidden, config.num_heads * config.value_dim, config.output_bias


@dataclass(frozen=True, slots=True)
class _FileTensor:
    """A tensor of an open file, of which nothing has been read yet."""

    name: str
    path: Path
    file: Any  # safetensors' handle

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """As safetensors calls it."""
        return str(self.file.get_slice(self.name).get_dtype())

    def stored(self, part: Part) -> Tensor:
        """Read this part of the file, which is mapped, and nothing else of it."""
        tensor: Tensor = self.file.get_slice(self.name)[part] if part else self.file.get_tensor(self.name)
        return tensor

    def read(self, part: Part) -> Tensor:
        """Read this part, as `stored` does. Raises ValueError for a type that is not loadable."""
        tensor = self.stored(part)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(
                f"{self.name} in {self.path} is {tensor.dtype}; only float32, bfloat16 and float16 can be loaded"
            )
        return tensor


_Stored = Tensor | QuantisedWeight | _FileTensor | TensorPart


def _part_of(stored: _Stored, part: Part, quantisation: Quantisation | None, target: str) -> Tensor | QuantisedWeight:
    """What is loaded as `target`. The whole is not kept for a part of it."""
    rows, columns = (*part, slice(None), slice(None))[:2]
    if isinstance(stored, _FileTensor) and quantisation is None:
        return stored.read(part)
    if isinstance(stored, _FileTensor | TensorPart):
        stored = stored.load() if isinstance(stored, TensorPart) else stored.read(())
        if quantisation is not None and is_projection(target):
            if isinstance(stored, QuantisedWeight):  # in FP8
                stored = stored.dequantise(torch.float32)
            rounding = quantisation.of_the_head if target == _HEAD else quantisation
            return rounding.quantise_part(stored, rows, columns)
    if not part:
        return stored
    return stored.part(rows, columns) if isinstance(stored, QuantisedWeight) else stored[part].clone()


def _rows_of(stored: _Stored, rows: slice) -> _Stored:
    if rows == slice(None):
        return stored
    if isinstance(stored, QuantisedWeight):
        return stored.part(rows, slice(None))
    if isinstance(stored, Tensor):
        return stored[rows]
    num_rows, *others = stored.shape
    load = partial(stored.read, (rows,)) if isinstance(stored, _FileTensor) else partial(_loaded_rows, stored, rows)
    return TensorPart((len(range(*rows.indices(num_rows))), *others), load)


def _loaded_rows(stored: TensorPart, rows: slice) -> Tensor | QuantisedWeight:
    """The whole is not kept for them."""
    whole = stored.load()
    return whole.part(rows, slice(None)) if isinstance(whole, QuantisedWeight) else whole[rows].clone()


def _stored(
    folder: Path, config: ModelConfig, quantisation: Quantisation | None, device: torch.device
) -> Iterator[tuple[str, _Stored]]:
    """Every tensor of the model, one by one. Raises ValueError: see `load_weights`."""
    gguf_file = folder / GGUF_NAME
    is_gguf = gguf_file.exists()
    packing = config.packing
    if quantisation is not None:
        require_roundable(folder, config, quantisation)
    if is_gguf:
        from engine.checkpoint.gguf.checkpoint import (
            stored_gguf_tensors,  # takes seconds to import: only who reads such a file pays
        )

        return _checked(gguf_file.resolve(), config, stored_gguf_tensors(gguf_file))
    files = _weight_files(folder)
    if packing is not None and packing.method in ("awq", "gptq"):
        return _checked(folder, config, _unpacked(files, packing))
    return _checked(folder, config, _tensors(files, device, packing))


def _checked(where: Path, config: ModelConfig, stored: Iterator[tuple[str, _Stored]]) -> Iterator[tuple[str, _Stored]]:
    """Of a model with tied embeddings also a head that the checkpoint has, behind the embedding, where it is another
    one: transformers does not tie the two then, whatever the config says."""
    expected = expected_shapes(config)
    optional = {_HEAD: expected[_EMBEDDING]} if config.tied_embeddings and _has_head(where) else {}
    shapes = expected | optional
    has_idle_biases = config.packing is not None and config.packing.method == "gptq"
    behind = range(config.num_layers, config.num_layers + config.num_drafting_layers)
    unread = tuple(f"{_BASE}layers.{layer}." for layer in behind)
    found: set[str] = set()
    tied: dict[str, _Stored] = {}
    unknown: list[str] = []
    parts = (
        (name, _rows_of(whole, rows))
        for given, whole in stored
        for name, rows in fused_parts(canonical_name(given, expected), expected).items()
    )
    for name, tensor in parts:
        if name in shapes:
            if (shape := tuple(tensor.shape)) != shapes[name]:
                raise ValueError(f"{name} in {where} has the shape {shape}; the model's config asks for {shapes[name]}")
            if name in expected:
                found.add(name)
                yield name, tensor
            if optional and name in (_EMBEDDING, _HEAD):
                tied[name] = tensor
                if len(tied) == 2:
                    if not _are_equal(*tied.values()):
                        yield _HEAD, tied[_HEAD]
                    tied.clear()
        elif not (name.endswith(_DERIVED) or name.startswith(unread) or (has_idle_biases and _is_idle(name, tensor))):
            unknown.append(name)
    _complain(where, "lacks", sorted(expected.keys() - found))
    _complain(where, "has unknown", unknown)


def _is_idle(name: str, tensor: _Stored) -> bool:
    """Whether it is a bias that adds nothing, of which AutoGPTQ writes one for each projection."""
    return name.endswith("_proj.bias") and isinstance(tensor, Tensor) and not bool(tensor.any())


def _are_equal(one: _Stored, other: _Stored) -> bool:
    """Whether two tensors of the same shape have the same values, of which some rows at a time are read."""
    for start in range(0, one.shape[0], _COMPARED_ROWS):
        rows = (slice(start, start + _COMPARED_ROWS),)
        pair = [_part_of(stored, rows, None, _HEAD) for stored in (one, other)]
        values = [part.float() for part in pair if isinstance(part, Tensor)]
        if len(values) < 2 or not torch.equal(*values):
            return False
    return True


def _has_head(where: Path) -> bool:
    """Whether a folder's safetensors files have an output layer, in whatever form, by their headers. A GGUF file that
    has one is no model of tied embeddings."""
    if where.is_file() or (where / GGUF_NAME).exists():
        return False
    for path in _weight_files(where):
        with _open(path, CPU) as file:
            if any(name.startswith(_HEAD.removesuffix("weight")) for name in file.keys()):  # noqa: SIM118 - not a dict
                return True
    return False


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if single.exists():
            return [single]
        raise ValueError(f"{folder} holds neither model.safetensors nor {index.name}; no other format is loaded")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({error!r}); fetch it again") from error
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
            raise ValueError(f"{index} names the file {name!r}, which is not in {folder}; fetch the model again")
    return [folder / name for name in names]


def _tensors(
    files: list[Path], device: torch.device, packing: WeightPacking | None
) -> Iterator[tuple[str, _FileTensor | TensorPart]]:
    """While the iterator lasts, so do the open files."""
    with ExitStack() as opened:
        tensors: dict[str, _FileTensor] = {}
        for path in files:
            file = opened.enter_context(_open(path, device))
            for name in file.keys():  # noqa: SIM118 - not a dict: it has no iterator
                tensors[name] = _FileTensor(name, path, file)
        if packing is not None and packing.method in ("fp8", "compressed-tensors"):
            yield from _with_scales(tensors, packing)
        else:
            yield from unstacked(tensors)


def _with_scales(
    tensors: Mapping[str, _FileTensor], packing: WeightPacking
) -> Iterator[tuple[str, _FileTensor | TensorPart]]:
    """Every tensor, but for one that has scales what both stand for, which is worked out when it is loaded. Raises
    ValueError."""
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        beside = {part: tensors[f"{stem}.{part}"] for part in _SCALES + _BESIDE_SCALES if f"{stem}.{part}" in tensors}
        scales = [part for part in _SCALES if part in beside]
        is_packed = kind == "weight_packed"
        if is_packed or (kind == "weight" and (scales or tensor.dtype not in _PLAIN_DTYPES)):
            needed = [*(["weight_zero_point"] * packing.has_zeros), *(["weight_shape"] * is_packed)]
            if len(scales) != 1 or not beside.keys() >= set(needed):
                wanted = " and ".join([f"one of {' or '.join(_SCALES)}", *needed])
                raise ValueError(
                    f"{name} in {tensor.path} is {tensor.dtype} with {' and '.join(beside) or 'no scales'} beside it,"
                    f" where {wanted} should be; fetch it again"
                )
            shape = tuple(beside["weight_shape"].stored(()).tolist()) if is_packed else tensor.shape
            yield f"{stem}.weight", TensorPart(shape, partial(_scaled, packing, tensor, kind, beside, scales[0]))
        elif kind in _SCALES + _BESIDE_SCALES:
            if tensors.keys().isdisjoint((f"{stem}.weight", f"{stem}.weight_packed")):
                yield name, tensor  # and is complained of
        elif not _ROUNDING.fullmatch(name):
            yield name, tensor


def _scaled(
    packing: WeightPacking, tensor: _FileTensor, kind: str, beside: dict[str, _FileTensor], scale: str
) -> Tensor | QuantisedWeight:
    """Raises ValueError."""
    where = f"{tensor.name} in {tensor.path}"
    if packing.stays_packed:
        named = beside | {kind: tensor, "weight_scale": beside[scale]}
        return packing.unpack({part: stored.stored(()).cpu() for part, stored in named.items()}, where)
    zeros = beside.get("weight_zero_point")
    if zeros is not None and zeros.stored(()).float().any():
        raise ValueError(f"{where} is in FP8 with zero points that are not 0, which is not supported")
    return packing.scaled(tensor.stored(()), beside[scale].stored(()), where)


class StoredTensor(NamedTuple):
    """What a safetensors file says of a tensor."""

    dtype: torch.dtype | None  # None: none of `LOADABLE_DTYPES`
    shape: list[int]
    place: tuple[int, int]  # in bytes, from the first tensor


def read_header(path: Path) -> tuple[bytes, int]:
    """The beginning of a safetensors file, with all of its header where the file is whole, and how many bytes the file
    has. For `stored_tensors`. Raises OSError."""
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        begin = length + file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER))
        return begin, os.fstat(file.fileno()).st_size


def header_bytes(begin: bytes | memoryview) -> int:
    """How many bytes of a safetensors file stand before its tensors, by its `begin`."""
    return _LENGTH_BYTES + int.from_bytes(begin[:_LENGTH_BYTES], "little")


def stored_tensors(path: Path, begin: bytes | memoryview, num_bytes: int) -> tuple[int, dict[str, StoredTensor]]:
    """Where the tensors begin in a safetensors file of so many bytes, and what each is, by its name, from the file's
    `begin`, which has all of the header. Raises ValueError unless the file is whole.

    safetensors' own functions map the file, so whoever cuts it off ends the process that reads it, or copy each tensor.
    The format: https://github.com/huggingface/safetensors#format.
    """
    start = header_bytes(begin)
    try:
        if start > len(begin):
            raise ValueError("its header is cut off")
        header = json.loads(bytes(begin[_LENGTH_BYTES:start]).decode())
        header.pop("__metadata__", None)
        stored = {name: _as_stored(fields) for name, fields in header.items()}
        stops = [0]
        for first, stop in sorted(one.place for one in stored.values()):
            if first != stops[-1]:
                raise ValueError("its tensors do not lie side by side")
            stops.append(stop)
        if start + stops[-1] != num_bytes:
            raise ValueError(f"it has {num_bytes:,} bytes in place of {start + stops[-1]:,}")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
    return start, stored


def _as_stored(fields: dict[str, Any]) -> StoredTensor:
    """Raises KeyError, TypeError, ValueError for what is no tensor."""
    dtype, shape, (first, stop) = _BY_NAME.get(fields["dtype"]), fields["shape"], fields["data_offsets"]
    numbers = (*shape, first, stop)
    if set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise ValueError("a tensor has a size or a place that is no number")
    num_bytes = stop - first if dtype is None else prod(shape) * dtype.itemsize
    if not first <= stop == first + num_bytes:
        raise ValueError("a tensor's place is of another size than the tensor")
    return StoredTensor(dtype, list(shape), (first, stop))


def _open(path: Path, device: torch.device) -> Any:
    """Safetensors' handle, a context. Raises ValueError for a file that is not whole."""
    try:
        return safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error


def _unpacked(files: list[Path], packing: WeightPacking) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    """The parts of a projection become one; they may lie in different files."""
    with ExitStack() as opened:
        handles = [opened.enter_context(_open(path, CPU)) for path in files]
        parts = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 - not a dict
        for name, handle in parts.items():
            stem, _, kind = name.rpartition(".")
            if kind == "qweight":
                mine = {part: parts[f"{stem}.{part}"] for part in _PACKED_PARTS if f"{stem}.{part}" in parts}
                lacking = [f"{stem}.{part}" for part in _PACKED_PARTS[:3] if part not in mine]
                _complain(files[0].parent, "lacks", lacking)
                tensors = {part: source.get_tensor(f"{stem}.{part}") for part, source in mine.items()}
                yield f"{stem}.weight", packing.unpack(tensors, f"{stem} in {files[0].parent}")
            elif kind not in _PACKED_PARTS:
                yield name, handle.get_tensor(name)


def _complain(folder: Path, what: str, names: list[str]) -> None:
    """Raises ValueError if there are any."""
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(
            f"the checkpoint in {folder} {what} tensors: {shown}; config and weights are not the same model's"
        )
