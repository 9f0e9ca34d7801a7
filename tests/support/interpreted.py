"""Where Triton kernels run in a test: on the GPU, or, without one, in Triton's interpreter on tensors of the CPU.

Triton asks for TRITON_INTERPRET when a kernel is decorated, so this must be imported before any module with kernels in
it: `conftest.py` does that for every test. A process that is to compile kernels must be started without the variable
(`uninterpreted_environment`).

The interpreter gets bfloat16 wrong without saying so (it keeps the bits in uint16): use `DTYPES`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DTYPES = (torch.float32, torch.float16, torch.bfloat16) if torch.cuda.is_available() else (torch.float32, torch.float16)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait_for_device() -> None:
    """Before memory of the host is looked at that a device was told to write."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def uninterpreted_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


_FEW_PRODUCTS = 2**17  # which a core's cache holds


def _dot(builder: object, a: Any, b: Any, d: Any, *_: object) -> Any:
    """`tl.dot` with each row's products added in their order, as a tensor core does whatever the other rows are. The
    interpreter's own asks numpy's BLAS, which on many CPUs adds a row otherwise according to how many there are."""
    left, right = a.data.astype(d.data.dtype, copy=False), b.data.astype(d.data.dtype, copy=False)
    if left.size * right.shape[-1] <= _FEW_PRODUCTS:  # at once; in memory k after k, and so added
        products = np.multiply(np.moveaxis(left, -1, 0)[..., None], np.moveaxis(right, -2, 0)[..., None, :], order="C")
        total = np.add.reduce(products, axis=0)
    else:
        total = np.zeros(d.data.shape, d.data.dtype)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., None, k, :]
    return interpreter.TensorHandle(total + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot


_replaced: set[str] = set()  # modules with kernels in which the language is the interpreter's
_patch_lang = interpreter._patch_lang


def _replace_language(function: Any) -> Any:
    """The interpreter's own does so at each launch, and at each call of a function that a kernel calls, which makes
    Python look for each attribute of a tensor anew. Nothing in this process needs another language."""
    if function.__module__ not in _replaced:
        _replaced.add(function.__module__)
        _patch_lang(function)
    return interpreter._LangPatchScope()  # there is nothing to put back


_np_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


def _get_np_dtype(kind: Any) -> np.dtype[Any]:
    """The interpreter's own makes a table of all types for each look at it."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _np_dtype_of_scalar(scalar)


_block_types: dict[tuple[str, ...], dict[str, Any]] = {}  # by elements and shape, what Triton gives such a type
_scalars: dict[str, Any] = {}  # what it gives each tensor of one number
_init_block_type, _init_tensor = tl.block_type.__init__, tl.tensor.__init__


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Triton's own wraps each size of a shape twice, and checks it, for each result of an operation."""
    key = (element_ty.name, *map(repr, shape))
    if key in _block_types:
        vars(self).update(_block_types[key], element_ty=element_ty)
    else:
        _init_block_type(self, element_ty, shape)
        self.of_tensors = {}
        _block_types[key] = dict(vars(self))


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """The same: what tensors of one shape have in common is made once."""
    common = type.of_tensors if type.is_block() else _scalars
    if common:
        vars(self).update(common, handle=handle, type=type, dtype=type.scalar)
    else:
        _init_tensor(self, handle, type)
        common.update(shape=self.shape, numel=self.numel)


if not torch.cuda.is_available():  # two thirds of what the interpreter computes are the same each time, or for nothing
    interpreter._patch_lang = _replace_language
    interpreter._get_np_dtype = _get_np_dtype
    # It asks after each addition whether integers overflow, and does not look at the answer.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    tl.block_type.__init__ = _block_type
    tl.tensor.__init__ = _tensor
