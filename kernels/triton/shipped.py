"""What a Triton kernel is launched with, said once: for its launcher and for the ahead-of-time compiler.

Every module of kernels has a `shipped() -> list[Shipped]` that names each configuration it may launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Triton's names of the element types that kernels are shipped for.
TYPE_NAMES: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One kernel in one configuration."""

    name: str  # unique among all: the key of what was recorded of it
    kernel: Any  # what `triton.jit` returned
    signature: Mapping[str, str]  # Triton's type of every parameter: "*bf16", "i32", "i64", "fp32", "constexpr"
    constants: Mapping[str, Any]  # the values of the "constexpr" ones
    num_warps: int
    num_stages: int
    aligned: frozenset[str] = frozenset()  # integers that are multiples of 16 in every launch that matters
    architectures: tuple[int, ...] = (80, 90, 100)  # compute capabilities, times ten

    def __post_init__(self) -> None:
        declared = {name for name, kind in self.signature.items() if kind == "constexpr"}
        if declared != set(self.constants):
            odd = sorted(declared ^ set(self.constants))
            raise ValueError(f"{self.name}: {', '.join(odd)} must be constexpr in the signature and have a value")
        if unknown := self.aligned - set(self.signature):
            raise ValueError(f"{self.name}: {', '.join(sorted(unknown))} is no parameter, but said to be aligned")

    def launch(self, grid: tuple[int, ...], **arguments: Any) -> None:
        """Run on `grid` with the `arguments` that are no constants."""
        self.kernel[grid](**arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
