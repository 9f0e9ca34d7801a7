"""A layer's mixture of experts in one call of the C++ kernels: see `src/experts.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from kernels.interface import ExpertChoice, GatedMlp, InFloat32, Linear, held_experts
from kernels.native.library import TYPE_NAMES, Flag, Float, Pointer, Size, activation_number, declare
from kernels.native.linear import NativeLinear, ProjectionRecord, QuantisedLinear, projection_record


class _Experts(ctypes.Structure):
    """The struct of `src/calls.h`, field by field."""

    _fields_ = (
        ("router", ProjectionRecord),
        ("gate_up", ctypes.POINTER(ProjectionRecord)),
        ("down", ctypes.POINTER(ProjectionRecord)),
        ("count", Size),
        ("first", Size),
        ("held", Size),
        ("per_row", Size),
        ("groups", Size),
        ("groups_per_row", Size),
        ("activation", Size),
        ("correction", Pointer),
        ("scale", Float),
        ("normalised", Flag),
        ("wide_router", Flag),
    )


def pack_experts(
    library: ctypes.CDLL, router: Linear, experts: Sequence[GatedMlp | None], choice: ExpertChoice
) -> NativeExperts | None:
    """The experts packed for the C++ kernels. None where these have no form for a weight, or experts are not quantised
    alike."""
    _, held = held_experts(experts)
    gate_up, down = [expert.gate_up for expert in held], [expert.down for expert in held]
    by = router.linear if isinstance(router, InFloat32) else router
    if not (isinstance(by, NativeLinear) and _are_alike(gate_up) and _are_alike(down)):
        return None
    return NativeExperts(library, by, experts, choice)


def _are_alike(linears: Sequence[Linear]) -> bool:
    kinds = {
        (
            linear.dtype,
            (linear.form.group_size, linear.activation_bits) if isinstance(linear, QuantisedLinear) else None,
        )
        for linear in linears
        if isinstance(linear, NativeLinear)
    }
    return len(kinds) == 1 and all(isinstance(linear, NativeLinear) for linear in linears)


class NativeExperts:
    """A row's result is the same to the bit whatever the other rows are. Not for two threads at once."""

    def __init__(
        self, library: ctypes.CDLL, router: NativeLinear, experts: Sequence[GatedMlp | None], choice: ExpertChoice
    ) -> None:
        first, held = held_experts(experts)
        self.router, self.experts, self.choice = router, experts, choice  # what the record points to
        down = held[0].down
        assert isinstance(down, NativeLinear)
        self.dtype = down.dtype
        records = ProjectionRecord * len(held)
        self._record = _Experts(
            router=projection_record(router),
            gate_up=records(*(projection_record(expert.gate_up) for expert in held)),
            down=records(*(projection_record(expert.down) for expert in held)),
            count=len(experts),
            first=first,
            held=len(held),
            per_row=choice.per_row,
            activation=activation_number(held[0].activation),
            groups=choice.groups,
            groups_per_row=choice.groups_per_row,
            correction=None if choice.correction is None else choice.correction.data_ptr(),
            scale=choice.scale,
            normalised=choice.normalised,
            wide_router=router.dtype != self.dtype,
        )
        name = f"experts_{TYPE_NAMES[self.dtype]}"
        self._compute = declare(library, name, [Pointer, Pointer, Size, Pointer, Pointer])

    @property
    def address(self) -> int:
        """The address of the record that the C++ kernels read, while this lives."""
        return ctypes.addressof(self._record)

    def __call__(self, x: Tensor) -> Tensor:
        return self._sum(x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._sum(x, residual.contiguous())

    def _sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        assert x.dtype == self.dtype
        out = x.new_empty(x.shape)
        self._compute(
            self.address, x.data_ptr(), len(x), None if residual is None else residual.data_ptr(), out.data_ptr()
        )
        return out
