"""Computing the same again without launching it anew: as a CUDA graph, or, on a CPU, by calling it again.

Knows nothing of models: what is recorded reads and writes tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

Replay = Callable[[], Tensor]
"""Computes what was recorded on what its inputs hold now. Gives the same tensor each time, good until the next one."""


class Recorder(Protocol):
    """Records for one device. What it recorded is replayed one after another, never at once."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """`compute` is called now, and must not wait for the device nor look at values that lie there."""
        ...


class CallRecorder:
    """Replays by calling again, with the result where a graph would have it."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        result = compute()
        return lambda: result.copy_(compute())


class CudaRecorder:
    """Records CUDA graphs, which share the memory for what they keep between their kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = cast(Any, torch.cuda).Stream(device)  # untyped there

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # kernels are compiled and libraries take their workspaces now: a capture allows neither
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads do not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def recorder_for(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else CallRecorder()
