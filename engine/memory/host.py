"""How this process's C allocator treats memory that tensors give back. Knows no tensors."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
_LARGEST_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, for the whole process; does nothing without glibc.

    Activations of a prefill chunk are larger than glibc's threshold for mapping memory anew, and the page faults of
    each new mapping cost more than the operator that fills it: normalising 512 rows of 576 takes 1.4 ms, not 0.17.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
