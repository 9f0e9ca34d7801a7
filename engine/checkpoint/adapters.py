"""LoRA adapters as PEFT saves them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Read, checked against the model that they are for, and named by a digest of what they hold. What cannot be computed
exactly is refused in a sentence. Nothing but safetensors is ever opened, and no file is mapped: whoever writes over one
would write into what is loaded.

An adapter adds `scale * B(A(x))` to projections of `x`: `A [rank, in]`, `B [out, rank]` (arXiv:2106.09685, section
4.1).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from engine.checkpoint.stacked_tensors import fused_parts
from engine.checkpoint.weights import StoredTensor, expected_shapes, header_bytes, read_header, stored_tensors
from engine.model.config import ModelConfig
from kernels.adapters import StoredLowRank, StoredRows, even_rank
from kernels.interface import PackedBytes

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
_PICKLE_NAME: Final = "adapter_model.bin"
_READ_BYTES: Final = 1 << 20  # at a time
MAX_LAYOUTS: Final = 8  # that are known, some 100 KB each
_OF_SCALES: Final = ("lora_alpha", "alpha_pattern", "use_rslora")  # fields that scales depend on

# Says nothing of what the adapter computes, or is looked at below; of any other field only what is false, or nothing.
_HARMLESS: Final = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Ways to begin that leave the model's own weights as they are.
_BEGINNINGS: Final = (True, False, None, "gaussian", "eva", "orthogonal")

_TENSOR: Final = re.compile(r"base_model\.model\.(model\.layers\.\d+\.\w+\.\w+)\.lora_([AB])\.weight")
_ADAPTED: Final = re.compile(r"model\.layers\.\d+\.\w+\.\w+_proj\.weight")
SIDE_BY_SIDE: Final = {
    "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
    "output": ("self_attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
"""A layer's projections as they are packed, by the names of `AdapterLayer`."""
_PROJECTIONS: Final = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj"


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """Where adapters with the same header and the same scales have their weights. `projections`: by their names in the
    model, such as `model.layers.0.self_attn.q_proj`."""

    start: int  # of the tensors, in the file
    projections: Mapping[str, StoredLowRank]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFiles:
    """An adapter's two files, each read once: what is made of them is what the digest is of, whoever writes over them
    meanwhile."""

    folder: Path
    config: bytes
    tensors: memoryview  # the whole file
    _read: Future[hashlib._Hash]  # of the tensors

    @classmethod
    def read(cls, folder: Path, beside: Executor) -> Self:
        """Raises ValueError where the folder holds no adapter. The digest is taken in `beside`, a thread of its own,
        from the first bytes on."""
        config, path, read = _config_bytes(folder), _file(folder, WEIGHTS_NAME), hashlib.sha256()
        with _in_words(path), path.open("rb", buffering=0) as file:
            tensors = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8).numpy().data
            num_read = 0
            while got := file.readinto(tensors[num_read : num_read + _READ_BYTES]):
                beside.submit(read.update, tensors[num_read : num_read + got])
                num_read += got
        return cls(folder, config, tensors[:num_read], beside.submit(read.copy))

    def digest(self) -> str:
        """As `adapter_digest` has it."""
        return _digest((hashlib.sha256(self.config), self._read.result()))


class AdapterReader:
    """Finds one model's weights in adapters' files. Some adapters of one recipe lie in theirs alike, and one that comes
    again lies as it did: how the last ones do is known. May be used by several threads."""

    def __init__(self, model: ModelConfig, max_rank: int) -> None:
        self._model, self._max_rank = model, max_rank
        self._shapes = expected_shapes(model)
        self._layouts: OrderedDict[tuple[bytes, int, str], AdapterLayout] = OrderedDict()  # the last came last

    def layout(self, files: AdapterFiles) -> AdapterLayout:
        """Where its weights lie. Raises ValueError where they are not whole, or cannot be computed exactly."""
        return self._layout(files.folder, files.config, files.tensors, len(files.tensors))

    def check(self, folder: Path) -> None:
        """Raises ValueError as `layout` does, for what can be told without reading the weights."""
        config, path = _config_bytes(folder), _file(folder, WEIGHTS_NAME)
        with _in_words(path):
            begin, num_bytes = read_header(path)
        self._layout(folder, config, begin, num_bytes)

    def _layout(self, folder: Path, stored_config: bytes, begin: bytes | memoryview, num_bytes: int) -> AdapterLayout:
        """`begin`, of a file of so many bytes, has all of its header if that is whole."""
        config = _config(folder, stored_config, self._model)
        header = hashlib.sha256(bytes(begin[: header_bytes(begin)])).digest()
        key = header, num_bytes, repr([config.get(field) for field in _OF_SCALES])
        layout = self._layouts.pop(key, None)  # each of these steps is one for several threads
        if layout is None:
            start, stored = stored_tensors(folder / WEIGHTS_NAME, begin, num_bytes)
            modules = _modules(folder, stored, self._shapes, self._max_rank)
            layout = AdapterLayout(start, dict(self._projections(config, stored, modules)))
        self._layouts[key] = layout
        if len(self._layouts) > MAX_LAYOUTS:
            self._layouts.popitem(last=False)
        return layout

    def _projections(
        self, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], modules: Iterable[str]
    ) -> Iterator[tuple[str, StoredLowRank]]:
        """The model's projections, of which one of a file may be several."""
        for module in modules:
            down, up = (_rows(stored[_tensor_name(module, part)]) for part in "AB")
            up = replace(up, scale=_scale(config, module, rank=down.num_rows))
            for name, rows in fused_parts(f"{module}.weight", self._shapes).items():
                yield name.removesuffix(".weight"), StoredLowRank(down, up[rows])


def _rows(stored: StoredTensor) -> StoredRows:
    assert stored.dtype is not None, "refused by its type"
    num_rows, num_columns = stored.shape
    return StoredRows(stored.place[0], stored.dtype, num_rows, num_columns)


def tensors_in(data: memoryview, dtype: torch.dtype) -> Callable[[StoredRows], Tensor]:
    """Gives tensors of a file, which is given from its first one on, in the model's type, scaled and in their order.
    They are copies, as kernels may keep them, and what lies in the file would keep all of it. There are hundreds, so
    each takes few calls of torch's."""

    @functools.cache
    def numbers(stored: torch.dtype) -> Tensor:
        return torch.frombuffer(data, dtype=stored, count=len(data) // stored.itemsize)

    def tensor(rows: StoredRows) -> Tensor:
        shape = rows.num_rows, rows.num_columns
        first, rest = divmod(rows.first, rows.dtype.itemsize)
        if rest:  # behind a tensor of another type
            stop = rows.first + math.prod(shape) * rows.dtype.itemsize
            found = torch.frombuffer(bytearray(data[rows.first : stop]), dtype=rows.dtype).view(shape)
        else:
            found = numbers(rows.dtype).as_strided(shape, (rows.num_columns, 1), first)
        scaled = found * rows.scale if found.dtype == dtype else (found.float() * rows.scale).to(dtype)
        return scaled if rows.order is None else scaled[rows.order]

    return tensor


def adapter_digest(folder: Path) -> str:
    """SHA-256 of the adapter's two files: equal for equal adapters, and for no others. Raises ValueError where the
    folder holds no adapter."""

    def of_file(name: str) -> hashlib._Hash:
        path = _file(folder, name)
        with _in_words(path), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256")

    return _digest(map(of_file, (CONFIG_NAME, WEIGHTS_NAME)))


def product_shapes(model: ModelConfig, ranks: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """`[out, in]` of all products by which an adapter of these ranks, by the projections' names, is computed: down to
    the ranks of all projections side by side, and up from each one's."""
    shapes = expected_shapes(model)
    for layer, side_by_side in itertools.product(range(len(model.layers)), SIDE_BY_SIDE.values()):
        names = [name for part in side_by_side if (name := f"model.layers.{layer}.{part}_proj") in ranks]
        even = [even_rank(ranks[name]) for name in names]
        projections = [shapes[f"{name}.weight"] for name in names]
        for rank, (num_outputs, _) in zip(even, projections, strict=True):
            yield num_outputs, rank
        if projections:
            yield sum(even), projections[0][1]


def largest_adapter_bytes(model: ModelConfig, max_rank: int, dtype: torch.dtype, packed_bytes: PackedBytes) -> int:
    """The most memory that an adapter may take with kernels that pack so: one of the largest rank, for all projections
    that there are adapters for."""
    adapted = (name.removesuffix(".weight") for name in expected_shapes(model) if _ADAPTED.fullmatch(name))
    return packed_bytes(product_shapes(model, dict.fromkeys(adapted, max_rank)), dtype)


def _digest(of_files: Iterable[hashlib._Hash]) -> str:
    """Of an adapter, from those of its two files."""
    return hashlib.sha256(b"".join(digest.digest() for digest in of_files)).hexdigest()


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Raises ValueError in place of what reading a file may raise."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _config_bytes(folder: Path) -> bytes:
    path = _file(folder, CONFIG_NAME)
    with _in_words(path):
        return path.read_bytes()


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_file():
        return path
    if name == WEIGHTS_NAME and (folder / _PICKLE_NAME).exists():
        raise ValueError(
            f"the adapter in {folder} is a pickle, {_PICKLE_NAME}, which is never opened; save it as {WEIGHTS_NAME}"
        )
    raise ValueError(f"{folder} holds no {name}; an adapter is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}")


def _config(folder: Path, stored: bytes, model: ModelConfig) -> Mapping[str, Any]:
    """What an adapter's config says. Raises ValueError for what is not computed."""
    if model.latent is not None:
        raise ValueError(
            f"the adapter in {folder} is for a model whose attention is by a latent, {model.architecture}, for which"
            " adapters are not computed"
        )
    try:
        config = json.loads(stored.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG_NAME} is no JSON ({error}); fetch it again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"the adapter in {folder} is of the kind {kind!r}; only LORA is computed")
    if config.get("bias", "none") != "none":
        raise ValueError(f"the adapter in {folder} has biases (bias: {config['bias']!r}), which are not computed")
    if config.get("init_lora_weights", True) not in _BEGINNINGS:
        raise ValueError(
            f"the adapter in {folder} was begun by {config['init_lora_weights']!r}, which changes the model's own"
            " weights; save it converted to a plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if unknown := sorted(name for name, value in config.items() if value and name not in _HARMLESS):
        raise ValueError(
            f"the adapter in {folder} sets {unknown[0]}, which is not computed; train a plain LoRA without it"
        )
    _check_scales(folder, config)
    return config


def _check_scales(folder: Path, config: Mapping[str, Any]) -> None:
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in patterns):
        raise ValueError(
            f"the adapter in {folder} has an alpha_pattern that is not by modules' names, such as q_proj; write it so"
        )
    for alpha in (config.get("lora_alpha"), *patterns.values()):
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
            raise ValueError(
                f"the adapter in {folder} has the lora_alpha {alpha!r}, which is no number; fetch it again"
            )


def _modules(
    folder: Path, stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], max_rank: int
) -> list[str]:
    """The projections that a file's tensors are for, each with both of its parts, in a model whose tensors have these
    `shapes`. Raises ValueError for what is not for that."""
    modules: dict[str, None] = {}
    for name, tensor in stored.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(
                f"the adapter in {folder} has the tensor {name[:200]}, which is of no projection that adapters are"
                f" computed for: {_PROJECTIONS} of a model's layers"
            )
        if tensor.dtype is None:
            raise ValueError(
                f"the adapter in {folder} has another type than float32, bfloat16 and float16 for {match[1]}; only"
                " these can be loaded"
            )
        modules[match[1]] = None
    lacking = {_tensor_name(module, part) for module in modules for part in "AB"} - stored.keys()
    if lacking or not modules:
        raise ValueError(f"the adapter in {folder} lacks {min(lacking, default='any tensor')}; fetch it again")
    for module in modules:
        down, up = (stored[_tensor_name(module, part)].shape for part in "AB")
        parts = [shapes[part] for part in fused_parts(f"{module}.weight", shapes) if part in shapes]
        projection = (sum(rows for rows, *_ in parts), parts[0][-1]) if parts else None
        _check_shapes(folder, module, down, up, projection, max_rank)
    return list(modules)


def _tensor_name(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"


def _check_shapes(
    folder: Path,
    module: str,
    down: list[int],
    up: list[int],
    projection: tuple[int, ...] | None,
    max_rank: int,
) -> None:
    if projection is None or not module.endswith("_proj"):
        raise ValueError(
            f"the adapter in {folder} is for {module}, which the model does not have or which adapters are not computed"
            f" for: they are for {_PROJECTIONS}"
        )
    rank = down[0] if down else 0
    if rank < 1 or down != [rank, projection[1]] or up != [projection[0], rank]:
        raise ValueError(
            f"the adapter in {folder} has the shapes {down} and {up} for {module}, which is {list(projection)} in this"
            " model; it is for another one"
        )
    if rank > max_rank:
        raise ValueError(
            f"the adapter in {folder} has the rank {rank}, more than the {max_rank} of adapters.max_rank; raise that"
        )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The scale of one projection, as PEFT has it: a pattern names modules by the end of their names, and the first one
    counts."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    matching = (alpha for key, alpha in patterns.items() if f".{module}".endswith(f".{key}"))
    alpha = next(matching, config["lora_alpha"])
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
