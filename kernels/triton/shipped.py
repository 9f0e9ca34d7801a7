"""What a Triton kernel is launched with, said once: for its launcher and for the ahead-of-time compiler.

Every module of kernels has a `shipped() -> list[Shipped]` that names each configuration it may launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from kernels.cache_folder import note_compiling

# Triton's names of the element types that kernels are shipped for.
TYPE_NAMES: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _note_compiling(*, times: Any, cache_hit: bool, **_: object) -> None:
    if not cache_hit:  # else it was read from the folder of what was compiled before
        note_compiling(1e-6 * times.total)


triton.knobs.compilation.listener = _note_compiling


@cache
def architecture(device: torch.device) -> int:
    """The architecture, of those that kernels are shipped for, whose configurations suit a device. The interpreter
    passes for a Hopper."""
    if device.type != "cuda":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    # 12 is later than 10 and has less: the matrix instructions of 8.0, and 99 KiB of shared memory for a program, as
    # 8.6 and 8.9 have.
    return 90 if major == 9 else 100 if major in (10, 11) else 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One kernel in one configuration."""

    name: str  # unique among all: the key of what was recorded of it
    kernel: Any  # what `triton.jit` returned
    types: Mapping[str, str]  # Triton's, of the parameters that are no constants: "*bf16", "i32", "i64", "fp32"
    constants: Mapping[str, Any]  # the values of all others
    num_warps: int
    num_stages: int
    aligned: frozenset[str] = frozenset()  # integers that are multiples of 16 in every launch that matters
    architectures: tuple[int, ...] = (80, 90, 100)  # compute capabilities, times ten

    def __post_init__(self) -> None:
        if odd := set(self.kernel.arg_names) ^ self.types.keys() ^ self.constants.keys():
            raise ValueError(f"{self.name}: {', '.join(sorted(odd))} must be a parameter with a type or with a value")
        if unknown := self.aligned - self.types.keys():
            raise ValueError(f"{self.name}: {', '.join(sorted(unknown))} has no type, but is said to be aligned")

    @property
    def signature(self) -> dict[str, str]:
        """The type of every parameter, in the kernel's order; "constexpr" of constants."""
        return {name: self.types.get(name, "constexpr") for name in self.kernel.arg_names}

    def launch(self, grid: tuple[int, ...], **arguments: Any) -> None:
        """Run on `grid` with the `arguments` that are no constants; one that is may be given as what it is."""
        self.kernel[grid](**{**arguments, **self.constants}, num_warps=self.num_warps, num_stages=self.num_stages)
