"""How many bytes a model's weights take once they are loaded, and in which codes, by the headers of its files alone.

`cluster.command.check` adds what else a worker has in memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd, prod
from pathlib import Path
from typing import Final

import torch

from engine.checkpoint.gguf.store import GGUF_NAME
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.stacked_tensors import fused_parts, unstacked_shapes
from engine.checkpoint.weights import (
    StoredTensor,
    canonical_name,
    expected_shapes,
    is_projection,
    read_header,
    stored_tensors,
)
from engine.model.config import DecoderConfig, ModelConfig
from engine.model.shards import WHOLE, Shard
from kernels.quantised_weight import LOWEST_E2M1, LOWEST_E4M3, CodeFormat

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_ZEROS: Final = ("qzeros", "weight_zero_point")
_SIDE_BY_SIDE: Final = re.compile(r"\.(?:((?:gate|up)_proj)|(?:[qkv]|q_a|kv_a)_proj(?:_with_mqa)?)\.")


def forms_on_gpus(
    folder: Path, model: ModelConfig, quantisation: Quantisation | None, num_ranks: int
) -> Mapping[str, CodeFormat]:
    """How each weight lies on GPUs that multiply by it as it is stored, cut for so many ranks. Of what only a weight's
    numbers tell, that they have no kernel for it is assumed: of minimums, and where codes of 8 bits have zero points.
    Raises ValueError if files are damaged."""
    is_gguf = (folder / GGUF_NAME).exists()
    is_gated = any(layer.experts is not None and layer.experts.shared_gate for layer in model.layers)
    forms = _cut_forms(folder, model, quantisation, [Shard(rank, num_ranks) for rank in range(num_ranks)])
    return {
        name: form
        for name, form in forms.items()
        if ".experts." not in name
        and not (is_gated and ".shared_experts." in name)
        and not ((quantisation is not None or is_gguf) and form.has_minimums)
        and form.inputs_at_once is not None
    }


def expanded_on_cpus(
    folder: Path, model: ModelConfig, quantisation: Quantisation | None, shards: Sequence[Shard]
) -> frozenset[str]:
    """The weights that have codes in a checkpoint, or are to be rounded to some, and by whose values CPUs multiply all
    the same: a scale has too few inputs, or has where it is cut for these ranks. Raises ValueError if files are
    damaged."""
    forms = _cut_forms(folder, model, quantisation, shards)
    return frozenset(name for name, form in forms.items() if form.on_cpus is None)


def _cut_forms(
    folder: Path, model: ModelConfig, quantisation: Quantisation | None, shards: Sequence[Shard]
) -> Mapping[str, CodeFormat]:
    """The codes of each projection that has some, as the ranks' parts of it have them."""
    expected = expected_shapes(model)
    if quantisation is not None or (folder / GGUF_NAME).exists():
        expected[_HEAD] = expected[_EMBEDDING]
    if quantisation is not None:
        stored: Mapping[str, CodeFormat] = {name: _rounded_form(quantisation, name) for name in expected}
    elif (folder / GGUF_NAME).exists():
        stored = {part: form for name, form in _gguf_forms(folder).items() for part in fused_parts(name, expected)}
    else:
        stored = _stored_forms(folder, expected, model)
    forms = {}
    for name, form in stored.items():
        if not is_projection(name):
            continue
        group_size, shape = form.group_size, expected[name]
        for shard in shards:
            _, columns = (*(shard.part(name, shape, model) or ()), slice(None), slice(None))[:2]
            start, stop, _ = columns.indices(shape[1])
            group_size = gcd(group_size, start, stop)  # as `QuantisedWeight.part` cuts it
        forms[name] = replace(form, group_size=group_size)
    return _as_they_lie(forms, filter(is_projection, expected))


def _as_they_lie(forms: Mapping[str, CodeFormat], projections: Iterable[str]) -> Mapping[str, CodeFormat]:
    """Of projections that lie side by side, as `pack_projections` has them: of one form, and where one has no codes,
    each input has a scale of its own, for which there are no kernels."""
    together: dict[str, list[str]] = {}
    for name in projections:
        together.setdefault(_beside(name), []).append(name)
    found = {}
    for names in together.values():
        if known := [forms[name] for name in names if name in forms]:
            form = CodeFormat.around(known)
            form = form if len(known) == len(names) else replace(form, group_size=1)
            found.update({name: form for name in names if name in forms})
    return found


def _beside(name: str) -> str:
    """The same for all projections that lie side by side."""
    return _SIDE_BY_SIDE.sub(lambda found: ".mlp." if found[1] else ".attention.", name)


@lru_cache(maxsize=2)
def _gguf_forms(folder: Path) -> Mapping[str, CodeFormat]:
    """How a GGUF file stores each of the model's weights that has codes. Reading its header takes seconds where its
    vocabulary is large, and the folder is of one file that does not change. Raises ValueError for a damaged one."""
    from engine.checkpoint.gguf.checkpoint import stored_gguf_forms  # with the library of such files

    found = stored_gguf_forms(folder / GGUF_NAME)
    forms = {name: form for name, form in found.items() if form is not None}
    if _HEAD not in found and _EMBEDDING in forms:  # they are tied, and what has codes is there a second time
        forms[_HEAD] = forms[_EMBEDDING]
    return forms


def _rounded_form(quantisation: Quantisation, name: str) -> CodeFormat:
    rounding = quantisation if name != _HEAD else quantisation.of_the_head
    if rounding.name == "int8":
        return CodeFormat(bits=8, lowest=-128, group_size=rounding.group_size, has_minimums=False)
    return CodeFormat(bits=4, lowest=0, group_size=rounding.group_size, has_minimums=True)


def _stored_forms(
    folder: Path, expected: Mapping[str, tuple[int, ...]], model: ModelConfig
) -> Mapping[str, CodeFormat]:
    """How a checkpoint stores each of the model's weights that has scales beside it."""
    packing = model.packing
    if packing is None:
        return {}
    tensors = _stored_tensors(folder)
    lowest = {"fp8": LOWEST_E4M3, "mxfp4": LOWEST_E2M1}.get(packing.method, -(2 ** (packing.bits - 1)))
    forms = {}
    for name, stored in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("scales", "weight_scale", "weight_scale_inv"):
            continue
        shape = stored.shape
        num_groups = shape[0] if kind == "scales" else shape[1] if len(shape) == 2 else 1
        has_zeros = packing.method != "fp8" and any(f"{module}.{zeros}" in tensors for zeros in _ZEROS)
        for part in fused_parts(canonical_name(f"{module}.weight", expected), expected):
            if part in expected:
                num_inputs = expected[part][1]
                forms[part] = CodeFormat(
                    bits=packing.bits,
                    lowest=lowest,
                    group_size=1 if num_inputs % num_groups else num_inputs // num_groups,
                    has_minimums=has_zeros,
                )
    return forms


def most_values(folder: Path, model: ModelConfig, quantisation: Quantisation | None, num_ranks: int) -> int:
    """Of the largest weight that is worked out in a step of many rows on so many GPUs, as weights lie side by side
    there. Raises ValueError if files are damaged."""
    forms = forms_on_gpus(folder, model, quantisation, num_ranks)
    together: Counter[str] = Counter()
    for name, shape in expected_shapes(model).items():
        if name in forms and name != _HEAD:
            together[_beside(name)] += prod(shape)
    return max(together.values(), default=0)


def weight_sizes(
    folder: Path,
    model: DecoderConfig,
    dtype: torch.dtype,
    quantisation: Quantisation | None,
    *,
    on_gpus: bool = False,
    shards: Sequence[Shard] | None = None,
) -> Mapping[str, float]:
    """How many bytes the weights take once they are loaded to compute in this type, by the tensors that they come from.
    `shards`: of all ranks, of which several may have the same; None: of one. A head beside tied embeddings is counted
    too, even one whose values are the embedding's. Raises ValueError if some are missing or files are damaged."""
    tensors = _stored_tensors(folder)
    if not isinstance(model, ModelConfig):  # only the model's own code knows which it needs: count all that are stored
        return {name: float(prod(stored.shape) * dtype.itemsize) for name, stored in tensors.items()}
    shards = shards or [WHOLE]
    if _stays_packed(model) and not on_gpus and dtype == torch.bfloat16:
        shapes = expected_shapes(model)
        sizes = _packed_sizes(tensors, shapes, expanded_on_cpus(folder, model, quantisation, shards), dtype)
    else:
        shapes = _loaded_shapes(folder, model, quantisation, tensors)
        in_codes = _bytes_in_codes(folder, model, dtype, quantisation, shards, on_gpus=on_gpus)
        sizes = {name: prod(shape) * in_codes.get(name, dtype.itemsize) for name, shape in shapes.items()}
    return _on_all_ranks(sizes, shapes, model, shards)


def _stays_packed(model: ModelConfig) -> bool:
    return model.packing is not None and model.packing.stays_packed


def _packed_sizes(
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    expanded: frozenset[str],
    dtype: torch.dtype,
) -> dict[str, float]:
    """Of a checkpoint in codes that CPUs multiply by: what its files take, but for the weights that are `expanded`, of
    which the values are held."""
    sizes = {name: float(prod(shapes[name]) * dtype.itemsize) for name in expanded & shapes.keys()}
    for name, stored in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "bias" or canonical_name(f"{module}.weight", shapes) not in expanded:
            sizes[name] = stored.place[1] - stored.place[0]
    return sizes


def _loaded_shapes(
    folder: Path, model: ModelConfig, quantisation: Quantisation | None, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[int, ...]]:
    """The shapes of all that is loaded of `tensors`: of what a model has, and of a head beside tied embeddings, where
    one is stored or made of them. Raises ValueError if some are missing."""
    shapes = expected_shapes(model)
    head = {_HEAD: shapes[_EMBEDDING]} if model.tied_embeddings else {}
    is_gguf = (folder / GGUF_NAME).exists()
    if _HEAD in tensors:  # which may be another than the embedding
        shapes = {**head, **shapes}
    if not is_gguf and not _stays_packed(model):
        _require_all(folder, shapes, tensors)
    if quantisation is not None or (is_gguf and _HEAD in _gguf_forms(folder)):  # the head is there a second time
        shapes = {**head, **shapes}
    return shapes


def _bytes_in_codes(
    folder: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    quantisation: Quantisation | None,
    shards: Sequence[Shard],
    *,
    on_gpus: bool,
) -> Mapping[str, float]:
    """How many bytes a value takes, with its part of scales and minimums, of each weight that stays in codes once it is
    loaded."""
    if on_gpus:  # scales in float32, zero points in a byte
        forms = forms_on_gpus(folder, model, quantisation, len(shards))
        return {name: form.bits / 8 + (5 if form.bits == 4 else 4) / form.group_size for name, form in forms.items()}
    if dtype != torch.bfloat16:
        return {}
    kept: dict[str, CodeFormat] = {}
    if quantisation is not None:
        names = filter(is_projection, (*expected_shapes(model), _HEAD))
        kept = {name: _rounded_form(quantisation, name) for name in names}
    if (folder / GGUF_NAME).exists():
        kept |= _cut_forms(folder, model, None, shards)
    expanded = expanded_on_cpus(folder, model, quantisation, shards)
    return {
        name: form.bits / 8 + (4 if form.has_minimums else 2) / form.group_size  # both in 16 bits
        for name, form in kept.items()
        if name not in expanded
    }


def _on_all_ranks(
    sizes: Mapping[str, float], expected: Mapping[str, tuple[int, ...]], model: ModelConfig, shards: Sequence[Shard]
) -> Mapping[str, float]:
    """The bytes of each tensor on all ranks together: of many each has a part, of some several have the same."""

    def times(name: str) -> float:
        of_whole = (canonical_name(given, expected) for given in (name, f"{name.rpartition('.')[0]}.weight"))
        named = (part for whole in of_whole for part in fused_parts(whole, expected) if part in expected)
        if (part := next(named, None)) is None:  # such as a stack of experts: each rank has its own of it
            return 1.0
        shape = expected[part]
        cuts = [cut for shard in shards if (cut := shard.part(part, shape, model)) is not None]
        held = (
            prod(len(range(*rows.indices(size))) for rows, size in zip(cut, shape, strict=False))
            * prod(shape[len(cut) :])
            for cut in cuts
        )
        return sum(held) / prod(shape)

    return {name: size * times(name) for name, size in sizes.items()}


def _require_all(folder: Path, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor]) -> None:
    """Raises ValueError if a tensor lacks, or has another shape."""
    shapes = {
        part: shape if rows == slice(None) else (len(range(*rows.indices(shape[0]))), *shape[1:])
        for name, stored in tensors.items()
        for own, shape in unstacked_shapes(name, tuple(stored.shape))
        for part, rows in fused_parts(canonical_name(own, expected), expected).items()
    }
    for name, shape in expected.items():
        if name not in shapes:
            raise ValueError(f"{name} is in none of the *.safetensors of {folder}; fetch the model again")
        if shapes[name] != shape:
            raise ValueError(
                f"{name} in {folder} is {list(shapes[name])}, and by its config.json it is {list(shape)};"
                " fetch the model again"
            )


def num_values(folder: Path) -> int:
    """Of all tensors of a folder as they are stored, such as heads, which nothing quantises. Raises ValueError if files
    are damaged."""
    return sum(prod(stored.shape) for stored in _stored_tensors(folder).values())


def _stored_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """What all of a folder's files say of their tensors. Raises ValueError if some are damaged."""
    found: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            begin, num_bytes = read_header(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        found |= stored_tensors(path, begin, num_bytes)[1]
    return found
