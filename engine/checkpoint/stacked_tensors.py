"""Tensors of a checkpoint that hold several of the model's, taken apart one by one: experts of a layer, as gpt-oss has
them, and projections of one input, as Phi-3 and GLM do.

Of projections the outputs lie side by side, `self_attn.qkv_proj [(Q + 2H) * D, E]`, `mlp.gate_up_proj [2 * width, E]`.
Stacks of experts are `mlp.experts.gate_up_proj [X, E, 2 * width]`, gates and ups by turns, and `down_proj [X, width,
E]`, with `_bias [X, outputs]`; or in MXFP4 `_blocks [X, outputs, inputs / 32, 16]` and `_scales [X, outputs, inputs /
32]`.

Shape legend: X experts, E hidden size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from torch import Tensor

from engine.checkpoint.packing import MXFP4_GROUP, mxfp4_weight
from kernels.quantised_weight import QuantisedWeight

_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales|)")
_BLOCKS, _SCALES = "_blocks", "_scales"
_PARTS = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused_parts(name: str, expected: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
    """Which outputs of a projection are whose, by the names that the model has for them, whose shapes are `expected`.
    Of any other tensor all are its own; the last of several has what is left."""
    module, _, kind = name.rpartition(".")
    prefix, _, projection = module.rpartition(".")
    parts = [f"{prefix}.{part}.{kind}" for part in _FUSED.get(projection, ())]
    if not parts or not expected.keys() >= set(parts):
        return {name: slice(None)}
    stops = list(accumulate(expected[part][0] for part in parts))
    return dict(zip(parts, map(slice, [0, *stops], [*stops[:-1], None]), strict=False))


class Stack(Protocol):
    """A tensor of an open file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def stored(self, part: tuple[slice, ...]) -> Tensor:
        """Read that part of it, of whatever type it is."""
        ...


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the model that is part of one of a file, of which nothing has been read yet."""

    shape: tuple[int, ...]
    load: Callable[[], Tensor | QuantisedWeight]


_Given = TypeVar("_Given", bound=Stack)


def unstacked(tensors: Mapping[str, _Given]) -> Iterator[tuple[str, _Given | TensorPart]]:
    """Yield every tensor by its name, but for a stack its experts, named as where each is stored by itself."""
    for name, tensor in tensors.items():
        stack = _STACK.fullmatch(name)
        pair = [f"{stack[1]}.{stack[2]}{kind}" for kind in (_BLOCKS, _SCALES)] if stack else []
        if stack is None or (stack[3] in (_BLOCKS, _SCALES) and not tensors.keys() >= set(pair)):
            yield name, tensor  # and is complained of
        else:
            scales = tensors.get(pair[1])
            for own, shape, number, outputs in _experts(name, tensor.shape):
                yield own, TensorPart(shape, _loader(stack[3], tensor, scales, number, outputs))


def unstacked_shapes(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor that `unstacked` makes of this one."""
    if _STACK.fullmatch(name):
        yield from ((own, own_shape) for own, own_shape, *_ in _experts(name, shape))
    else:
        yield name, shape


def _experts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], int, slice]]:
    """Yield each expert's tensors: name, shape, the expert's number, and which of the stack's outputs are its."""
    stack = _STACK.fullmatch(name)
    assert stack is not None
    prefix, projection, kind = stack.groups()
    if kind == _SCALES:  # go with the blocks
        return
    for number in range(shape[0]):
        for part, outputs in _PARTS[projection]:
            num_outputs = len(range(*outputs.indices(shape[-1] if kind in ("", "_bias") else shape[1])))
            own = f"{prefix}.{number}.{part}"
            if kind == "_bias":
                yield f"{own}.bias", (num_outputs,), number, outputs
            else:
                num_inputs = shape[2] * MXFP4_GROUP if kind == _BLOCKS else shape[1]
                yield f"{own}.weight", (num_outputs, num_inputs), number, outputs


def _loader(
    kind: str, stack: Stack, scales: Stack | None, number: int, outputs: slice
) -> Callable[[], Tensor | QuantisedWeight]:
    expert = (slice(number, number + 1),)

    def load() -> Tensor | QuantisedWeight:
        whole = stack.stored(expert)[0]
        if kind == "_bias":
            return whole[outputs]
        if kind == "":
            return whole[:, outputs].T
        assert scales is not None
        return mxfp4_weight(whole[outputs], scales.stored(expert)[0][outputs])

    return load
