"""How many threads compute for the one that calls: OpenMP's team of that thread, where torch sets all at once.

As soon as two threads of a process have teams of all cores, GNU's OpenMP lets their members sleep between any two
products instead of waiting for the next one, and a decode step has a hundred of those.
"""

from __future__ import annotations

import ctypes
import functools

import torch

_SOFT = 1  # omp_pause_soft of OpenMP 5.0


def set_team(num_threads: int) -> None:
    """Have this thread and `num_threads` - 1 others compute for it from now on."""
    torch.get_num_threads()  # at a thread's first use torch sets what is set for all, and would undo this
    openmp = _openmp()
    if openmp is None:
        torch.set_num_threads(num_threads)
    else:
        openmp.omp_set_num_threads(num_threads)


def work_alone() -> None:
    """Have this thread compute alone. For threads that copy and digest beside the one that computes: a team would only
    take its cores."""
    if _openmp() is not None:
        set_team(1)


def dissolve_team() -> None:
    """End the threads that computed for this one, which will not need them soon. Another product calls new ones."""
    openmp = _openmp()
    if openmp is not None and hasattr(openmp, "omp_pause_resource_all"):
        openmp.omp_pause_resource_all(_SOFT)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch and the native kernels use, which is in the process already; None: torch has
    none."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, "omp_set_num_threads") else None
