"""Where packed weights lie: in this process's own memory, unless whoever loads a model has something better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.cpu import huge_pages
from kernels.interface import Kernels


class PackingMemory(Protocol):
    def lay_out(self, num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """`[num_elements]`, only to be read: what `fill` makes of zeros, or made of them before. Starts a cache line.

        For one model, always asked in the same order.
        """
        ...


class PrivateMemory:
    """In large pages of the process."""

    def lay_out(self, num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        packed = huge_pages.zeros([num_elements], dtype)
        fill(packed)
        return packed


PRIVATE = PrivateMemory()


@runtime_checkable
class PackingKernels(Kernels, Protocol):
    """The operators of a device whose packed weights can lie anywhere in the host's memory."""

    @property
    def packing(self) -> str:
        """Equal where equal weights are packed into equal bytes by the same code."""
        ...

    def packing_into(self, memory: PackingMemory) -> Kernels:
        """The same operators, whose weights lie there."""
        ...
