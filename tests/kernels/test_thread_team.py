"""Threads that compute for one thread are that thread's: others neither change their number nor wait for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.offload.staging import CopyThread
from kernels.cpu.thread_team import dissolve_team, set_team, work_alone
from kv_transfer.connections.event_loops import LoopThread
from kv_transfer.handoff.slab_copy import copying_threads
from tests.support.waiting import HANGS_S

TEAM = 3


@pytest.fixture(autouse=True)
def forking_torch() -> None:
    """What a worker with several threads has: each new thread would compute with all of them."""
    torch.set_num_threads(TEAM)


def in_thread(job: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(job).result(HANGS_S)


def threads_of_process() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def test_a_team_is_of_the_thread_that_sets_it() -> None:
    def of_two() -> int:
        set_team(2)
        return torch.get_num_threads()

    assert in_thread(of_two) == 2
    assert torch.get_num_threads() == TEAM
    assert in_thread(torch.get_num_threads) == TEAM


def test_a_thread_can_work_alone() -> None:
    def alone() -> int:
        work_alone()
        return torch.get_num_threads()

    assert in_thread(alone) == 1


def test_a_dissolved_team_ends_its_threads_and_can_be_called_again() -> None:
    def forked() -> int:
        before = threads_of_process()
        torch.randn(1 << 20).exp_()
        return len(threads_of_process() - before)  # others may end meanwhile

    def job() -> int:
        set_team(TEAM)
        first = forked()
        dissolve_team()
        assert forked() == first
        return first

    assert in_thread(job) == TEAM - 1


def test_copies_are_made_by_one_thread() -> None:
    seen: list[int] = []
    copies = CopyThread()
    copies.submit(0, lambda: seen.append(torch.get_num_threads())).result(HANGS_S)
    copies.close()
    transfers = copying_threads("copies")
    seen.append(transfers.submit(torch.get_num_threads).result(HANGS_S))
    transfers.shutdown(wait=False)
    assert seen == [1, 1]


def test_what_arrives_is_taken_in_by_one_thread() -> None:
    async def num_threads() -> int:
        return torch.get_num_threads()

    loop = LoopThread("arrivals")
    assert loop.submit(num_threads()).result(HANGS_S) == 1
    loop.stop()
