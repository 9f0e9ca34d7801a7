"""Picks the kernels of a device, once."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final

import torch

from kernels import reference
from kernels.cpu import kernels as cpu
from kernels.interface import Kernels, PackedBytes
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import TYPE_NAMES, NativeUnavailableError, native_library, processor_instructions
from kernels.native.linear import packed_bytes
from kernels.quantised_weight import ActivationBits

SUMS: Final = {"AMX": "eb92acf1", "AVX-512": "67587c22", "AVX2": "67587c22", "registers": "a3436b88"}
"""By what the C++ kernels make sums with: a digest of what a small forward pass brings, the same on every processor
that has it. Whoever changes sums or their order is told the new ones by `tests/processes/test_native_kernels.py`."""
TRITON_SOURCES: Final = Path(__file__).parent / "triton"


def kernels_for(device: torch.device, *, batch_invariant: bool = False, activation_bits: ActivationBits = 8) -> Kernels:
    """The fastest kernels that exist for `device`, a CPU or a GPU.

    `batch_invariant`: with them a sequence's logits are the same to the bit alone, in any batch, in any chunking.
    `activation_bits`: see `NativeCpuKernels`; others round no activations.
    Raises ValueError where there are no such kernels, or where Triton is not installed.
    """
    if device.type == "cuda":
        return _gpu_kernels(device, batch_invariant)
    kernels = _cpu_kernels(activation_bits)
    if batch_invariant and not isinstance(kernels, NativeCpuKernels):
        raise ValueError(
            f"batch_invariant asks for kernels that there are not for {device} here; on a CPU they take AVX2 and a"
            " C++ compiler (the log says what lacks): leave batch_invariant off, or give the worker a GPU (num_gpus: 1)"
        )
    return kernels


def arithmetic(device: torch.device, dtype: torch.dtype, *, beside_torch: bool = False) -> str:
    """By what the kernels of `device` make their sums, and in which order: workers that say other things may give
    other bits.
    `beside_torch`: torch makes some of a model's sums by operators of its own."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {_gpu_build(TRITON_SOURCES)}"
    by_torch = f"torch ({torch.backends.cpu.get_cpu_capability()})"
    if dtype not in TYPE_NAMES or native_library() is None:
        return by_torch
    # Of float32 all processors' sums are the same. Of bfloat16 tiles have another order, and AVX-512 takes numbers for
    # 0 that AVX2 does not.
    name = processor_instructions().name if dtype is torch.bfloat16 else "registers"
    own = f"{name} {SUMS[name]}"
    return f"{own} and {by_torch}" if beside_torch else own


@functools.cache
def _gpu_build(sources: Path) -> str:
    """What else a GPU's sums depend on. Whether two builds sum alike only the same GPU could tell."""
    import triton  # where there is a GPU it is there

    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources.rglob("*.py"))))
    return f"torch {torch.__version__}, Triton {triton.__version__}, kernels {digest.hexdigest()[:8]}"


def packed_bytes_on(device: torch.device) -> PackedBytes:
    """`Kernels.packed_bytes` on a device that need not be there, without compiling kernels: of those that it would have
    with a compiler."""
    if device.type == "cuda":
        return reference.packed_bytes
    try:
        processor_instructions()
    except NativeUnavailableError:
        return cpu.packed_bytes
    return packed_bytes


@functools.cache
def _cpu_kernels(activation_bits: ActivationBits) -> Kernels:
    library = native_library()
    return cpu if library is None else NativeCpuKernels(library, activation_bits)


def _gpu_kernels(device: torch.device, batch_invariant: bool) -> Kernels:
    try:
        from kernels.triton.kernels import GpuKernels  # an installation for CPUs only has no Triton
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ValueError(
            f"a model on {device} needs Triton, which is not installed: install Legato with its gpu extra"
            " (pip install -e '.[gpu]')"
        ) from error
    return GpuKernels(device, batch_invariant)
