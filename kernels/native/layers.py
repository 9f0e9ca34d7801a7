"""The layers of a model in one call of the C++ kernels: see `src/layers.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.adapters import RowAdapters
from kernels.interface import GatedMlp, Layer, LayersForm, Linear, PagedAttention
from kernels.native.adapters import AdaptersRecord, adapters_record
from kernels.native.attention import NativeAttention, sinks_address
from kernels.native.experts import NativeExperts
from kernels.native.library import Float, Pointer, Size, activation_number, declare
from kernels.native.linear import NativeLinear, ProjectionRecord, projection_record

_NAMES = {
    (torch.bfloat16, torch.bfloat16): "bf16_by_bf16",
    (torch.bfloat16, torch.float32): "bf16_by_f32",
    (torch.float32, torch.float32): "f32_by_f32",
}
_NORMS = ("attention_norm", "qk_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")


class _Layer(ctypes.Structure):
    """This struct and the following are those of `src/layers.cpp`, field by field."""

    _fields_ = (
        *((name, Pointer) for name in _NORMS),
        *((name, ProjectionRecord) for name in ("qkv", "output", "gate_up", "down")),
        ("sinks", Pointer),
        ("experts", Pointer),
        ("rotation", Size),
        ("attention", Size),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("num_heads", Size),
        ("num_kv_heads", Size),
        ("head_dim", Size),
        ("joint_qk_norm", Size),
        ("layers_per_group", Size),
        ("layer_numbers", Size),
        ("eps", Float),
        ("scale", Float),
        ("softcap", Float),
        ("activation", Size),
    )


class _Rotary(ctypes.Structure):
    _fields_ = (("cos", Pointer), ("signed_sin", Pointer))


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", Size),
        ("rotations", ctypes.POINTER(_Rotary)),
        ("attention_plans", ctypes.POINTER(Pointer)),
        ("slots", Pointer),
        ("cache", Pointer),
        ("x", Pointer),
        ("normed", Pointer),
        ("scratch", Pointer),
        ("adapters", ctypes.POINTER(AdaptersRecord)),
    )


def fuse_layers(
    library: ctypes.CDLL, layers: Sequence[Layer], final_norm: Tensor, form: LayersForm
) -> NativeLayers | None:
    """The layers fused into one call of the C++ kernels. None where these have no form for a weight, or a mixture of
    experts has a norm after it."""
    linears = [linear for layer in layers for linear in _linears(layer)]
    native = [linear for linear in linears if isinstance(linear, NativeLinear | NativeExperts)]
    if len(native) < len(linears):
        return None
    if any(isinstance(layer.mlp, NativeExperts) and layer.mlp_output_norm is not None for layer in layers):
        return None
    norms = [final_norm, *(norm for layer in layers for name in _NORMS if (norm := getattr(layer, name)) is not None)]
    types = {(linear.dtype, norm.dtype) for norm in norms for linear in native}
    if len(types) > 1 or not types <= _NAMES.keys() or form.head_dim % 2:
        return None
    assert all(norm.is_contiguous() for norm in norms)
    return NativeLayers(library, _NAMES[types.pop()], layers, final_norm, form)


def _linears(layer: Layer) -> list[Linear]:
    mlp = layer.mlp
    return [layer.qkv, layer.output, *((mlp.gate_up, mlp.down) if isinstance(mlp, GatedMlp) else (mlp,))]


class NativeLayers:
    """The layers of one model. Not for two threads at once."""

    def __init__(
        self, library: ctypes.CDLL, types: str, layers: Sequence[Layer], final_norm: Tensor, form: LayersForm
    ) -> None:
        self._weights = layers, final_norm  # what the records point to
        records = list(map(_layer, layers, form.rotations, form.attentions))
        end = _Layer(attention_norm=final_norm.data_ptr())
        self._layers = (_Layer * (len(layers) + 1))(*records, end)
        self._shape = _Shape(
            num_heads=form.num_heads,
            num_kv_heads=form.num_kv_heads,
            head_dim=form.head_dim,
            joint_qk_norm=form.joint_qk_norm,
            eps=form.eps,
            scale=form.scale,
            softcap=form.softcap or 0.0,
            activation=activation_number(form.activation),
        )
        self._run = declare(library, f"layers_run_{types}", [Pointer, Pointer, Pointer, Size, Size])
        scratch = declare(library, "layers_scratch", [Pointer, Pointer, Size], Size)
        self._row_numbers = int(scratch(ctypes.byref(self._shape), self._layers, len(layers)))
        self._scratch = torch.empty(0)  # for the largest step so far

    def takes(self, attentions: Sequence[PagedAttention], adapters: RowAdapters | None = None) -> bool:
        """Whether steps with such attention, and such adapters, can be run."""
        is_native = adapters is None or all(adapter.native is not None for adapter in adapters.adapters)
        return is_native and all(isinstance(attention, NativeAttention) for attention in attentions)

    def run(
        self,
        x: Tensor,
        normed: Tensor,
        *,
        cache: Tensor,
        slots: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attentions: Sequence[PagedAttention],
        num_layers: int,
        adapters: RowAdapters | None = None,
    ) -> None:
        """The first `num_layers`, with results that are the same to the bit as those of separate calls.

        `x [T, E]`, the residual stream, and `normed [T, E]`, its norm by the first layer's weight, become those after
        these layers, the norm being by the weight of what follows them. `cache` is `[blocks, layers per group, 2,
        block_size, H, D]`, `slots [G, T]` int64 as in `KVSlots`, `rotations` the step's cosines and signed sines,
        `[T, 1, D]` each: `LayersForm` says which of them, and of the `attentions`, is each layer's.
        """
        assert x.is_contiguous() and normed.is_contiguous() and cache.is_contiguous()
        assert slots.is_contiguous() and all(turns.is_contiguous() for pair in rotations for turns in pair)
        _, layers_per_group, *rest = cache.shape
        self._shape.layers_per_group = layers_per_group
        self._shape.layer_numbers = torch.Size(rest).numel()
        turns = [_Rotary(cos.data_ptr(), sin.data_ptr()) for cos, sin in rotations]
        plans = [_plan_address(attention) for attention in attentions]
        record = _Step(
            rows=len(x),
            rotations=(_Rotary * len(turns))(*turns),
            attention_plans=(Pointer * len(plans))(*plans),
            slots=slots.data_ptr(),
            cache=cache.data_ptr(),
            x=x.data_ptr(),
            normed=normed.data_ptr(),
            scratch=self._reserve(len(x), x.dtype),
            adapters=None if adapters is None else ctypes.pointer(adapters_record(adapters)),
        )
        self._run(ctypes.byref(self._shape), ctypes.byref(record), self._layers, 0, num_layers)

    def _reserve(self, num_rows: int, dtype: torch.dtype) -> int:
        """The address of as much memory as a step of so many rows takes."""
        if self._scratch.dtype != dtype or len(self._scratch) < num_rows * self._row_numbers:
            self._scratch = torch.empty(num_rows * self._row_numbers, dtype=dtype)
        return self._scratch.data_ptr()


def _layer(layer: Layer, rotation: int, attention: int) -> _Layer:
    record = _Layer(
        **{name: _address(getattr(layer, name)) for name in _NORMS},
        qkv=projection_record(layer.qkv),
        output=projection_record(layer.output),
        sinks=sinks_address(layer.sinks),
        rotation=rotation,
        attention=attention,
    )
    if isinstance(layer.mlp, GatedMlp):
        record.gate_up, record.down = projection_record(layer.mlp.gate_up), projection_record(layer.mlp.down)
    else:
        assert isinstance(layer.mlp, NativeExperts)
        record.experts = layer.mlp.address
    return record


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _plan_address(attention: PagedAttention) -> int:
    assert isinstance(attention, NativeAttention)
    return ctypes.addressof(attention.plan)
