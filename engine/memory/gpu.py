"""Memory of a GPU that several processes map, through the CUDA driver's virtual memory functions.

Not `cudaIpcGetMemHandle`: memory that was exported by it must not be freed before its last user has closed it, which a
user that was killed never does. An allocation here belongs to all its mappings and descriptors, as a memory file does,
and can be mapped read-only. Called through ctypes, as torch shows none of it (names and layouts: cuda.h, since 11.2).
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import Any, Final

import torch
from torch import Tensor

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ: Final = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
_READ_WRITE: Final = 3
_MINIMUM: Final = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class GpuMemoryError(RuntimeError):
    """The driver did not do what it was asked; a sentence says what."""


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("device", c_int),
        ("win32_metadata", c_void_p),
        ("compression", c_ubyte),
        ("gpu_direct", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", c_int), ("device", c_int), ("flags", c_int))


class _Mapping:
    """A range of addresses with memory behind it, unmapped with the last tensor of it."""

    def __init__(self, driver: Any, handle: c_ulonglong, num_bytes: int, device: int, flags: int) -> None:
        self._driver = driver
        self._num_bytes = num_bytes
        self._address = c_ulonglong()
        _call(driver.cuMemAddressReserve, byref(self._address), c_size_t(num_bytes), c_size_t(0), c_ulonglong(0))
        _call(driver.cuMemMap, self._address, c_size_t(num_bytes), c_size_t(0), handle)
        access = Access(_ON_DEVICE, device, flags)
        _call(driver.cuMemSetAccess, self._address, c_size_t(num_bytes), byref(access), c_size_t(1), flag=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """What torch makes a tensor of, which holds this object."""
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def __del__(self) -> None:
        self._driver.cuMemUnmap(self._address, c_size_t(self._num_bytes))
        self._driver.cuMemAddressFree(self._address, c_size_t(self._num_bytes))


class GpuMemory:
    """Memory of one GPU, for processes that use the same one. Every function may raise GpuMemoryError."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        torch.zeros(1, device=torch.device("cuda", self._index))  # the driver's functions need the process to use it
        self._driver = _driver()
        self._properties = Properties(_PINNED, _DESCRIPTOR, _ON_DEVICE, self._index)

    def allocate(self, num_bytes: int) -> tuple[Tensor, int]:
        """`[num_bytes]` uint8 of any content, and a file descriptor by which another process maps it."""
        size, handle, file = self._round_up(num_bytes), c_ulonglong(), c_int(-1)
        with torch.cuda.device(self._index):
            _call(self._driver.cuMemCreate, byref(handle), c_size_t(size), byref(self._properties))
            try:
                view = self._mapped(handle, size, _READ_WRITE)[:num_bytes]
                _call(self._driver.cuMemExportToShareableHandle, byref(file), handle, c_int(_DESCRIPTOR))
            finally:
                self._driver.cuMemRelease(handle)  # mapping and descriptor keep the memory
        return view, file.value

    def map(self, file: int, num_bytes: int, *, writable: bool = False) -> Tensor:
        """`[num_bytes]` uint8 that another process has allocated; unmapped with the last view of it."""
        size, handle = self._round_up(num_bytes), c_ulonglong()
        with torch.cuda.device(self._index):
            imports = self._driver.cuMemImportFromShareableHandle
            _call(imports, byref(handle), c_void_p(file), c_int(_DESCRIPTOR), flag=False)
            try:
                return self._mapped(handle, size, _READ_WRITE if writable else _READ)[:num_bytes]
            finally:
                self._driver.cuMemRelease(handle)

    def _mapped(self, handle: c_ulonglong, size: int, flags: int) -> Tensor:
        mapping = _Mapping(self._driver, handle, size, self._index, flags)
        return torch.as_tensor(mapping, device=torch.device("cuda", self._index))

    def _round_up(self, num_bytes: int) -> int:
        """Rounded up to what can be mapped."""
        step = c_size_t()
        _call(
            self._driver.cuMemGetAllocationGranularity,
            byref(step),
            byref(self._properties),
            c_int(_MINIMUM),
            flag=False,
        )
        return -(-num_bytes // step.value) * step.value


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: Any, *arguments: object, flag: bool = True) -> None:
    """`flag`: the function's last argument is reserved, and 0."""
    status = function(*arguments, c_ulonglong(0)) if flag else function(*arguments)
    if status:
        raise GpuMemoryError(f"{function.__name__} of the CUDA driver failed with CUresult {status}.")
