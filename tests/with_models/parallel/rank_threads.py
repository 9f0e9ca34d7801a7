"""The ranks of a tensor-parallel group as threads of one process: a real group without real processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from engine.model.shards import Shard
from engine.parallel.group import RankGroup

R = TypeVar("R")

GROUP_TIMEOUT_S = 60.0


def on_ranks(
    degree: int,
    work: Callable[[RankGroup], R],
    *,
    expert_parallel: bool = False,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> list[R]:
    """What `work` returns on each rank. The first rank's error is raised."""
    store = HashStore()

    def run(rank: int) -> R:
        group = RankGroup(Shard(rank, degree, expert_parallel), store, timeout_s=timeout_s)
        try:
            return work(group)
        finally:
            group.leave()

    with ThreadPoolExecutor(degree) as threads:
        runs = [threads.submit(run, rank) for rank in range(degree)]
        return [run.result() for run in runs]
