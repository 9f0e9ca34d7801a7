"""What becomes of a group of processes when one of them fails: one end for all of them, and a reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.parallel.processes import GroupError, GroupWatch, RankProcess
from tests.processes.rank_groups import one_step, other_ranks, start, whole_prompt
from tests.support.forked_child import fork_ranks
from tests.support.model_families import build_oracle
from tests.support.waiting import HANGS_S, wait_until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_oracle("gemma3", folder)
    return folder


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked where it is not the process that a test is about."""
    fork_ranks(monkeypatch)


def test_a_rank_that_dies_ends_the_group(checkpoint: Path) -> None:
    runner = start(checkpoint)
    one_step(runner)
    [rank] = other_ranks(runner)
    rank.send_signal(signal.SIGKILL)
    wait_until(lambda: not runner.is_healthy)
    for _ in range(2):
        with pytest.raises(GroupError, match="of no use any more: rank 1 has ended by signal 9"):
            one_step(runner)
    runner.close()


def test_a_rank_that_is_killed_amid_a_step_fails_it_by_name(
    checkpoint: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others end by themselves, in order: not by an abort, which would look like the reason."""
    dismiss = RankProcess.dismiss

    def dismissed_late(process: RankProcess) -> None:
        wait_until(lambda: not process.is_alive)
        dismiss(process)

    monkeypatch.setattr(RankProcess, "dismiss", dismissed_late)
    runner = start(checkpoint, degree=4)
    ranks = other_ranks(runner)
    _, _, plan = whole_prompt(runner, [5, 6, 7], 3)

    def kill_one(layer: int) -> None:
        if layer == 1:
            ranks[1].kill()

    with pytest.raises(GroupError, match="has failed: rank 2 has ended by signal 9"):
        runner.execute(plan, kill_one)
    wait_until(lambda: not any(rank.is_running() for rank in ranks))
    said = capfd.readouterr().err
    assert "is without the others" in said and "Fatal Python error" not in said


@pytest.mark.usefixtures("forked")
def test_a_rank_that_hangs_fails_the_step_at_the_deadline(checkpoint: Path, monkeypatch: Any) -> None:
    runner = start(checkpoint)
    assert runner.group is not None
    monkeypatch.setattr(runner.group.ranks, "_timeout", timedelta(seconds=1))  # only now: the start may take longer
    [rank] = other_ranks(runner)
    rank.suspend()
    began = time.monotonic()
    with pytest.raises(GroupError):
        one_step(runner)
    assert time.monotonic() - began < HANGS_S
    assert not runner.is_healthy
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


class ImpatientWatch(GroupWatch):
    def __init__(self, processes: Sequence[RankProcess], on_lost: Callable[[str], None], *, within_s: float) -> None:
        super().__init__(processes, on_lost, within_s=0.2)


@pytest.mark.usefixtures("forked")
def test_a_device_that_does_not_come_to_a_steps_end_ends_the_group(checkpoint: Path, monkeypatch: Any) -> None:
    """As a GPU's ranks would that wait for one another: the step was queued, and nobody's process has ended."""
    monkeypatch.setattr("engine.parallel.leader.mark_on", lambda device: lambda: False)
    monkeypatch.setattr("engine.parallel.leader.GroupWatch", ImpatientWatch)
    runner = start(checkpoint)
    _, _, plan = whole_prompt(runner, [5, 6, 7], 2)  # of which nothing is sampled: told of once
    pending = runner.run(runner.prepare(plan))
    wait_until(lambda: not runner.is_healthy)
    with pytest.raises(GroupError, match="devices did not come to the end of a step"):
        pending.output()
    runner.close()


@pytest.mark.usefixtures("forked")
def test_a_group_is_closed_once_whoever_closes_it(checkpoint: Path, monkeypatch: Any) -> None:
    """As its watch and its worker do at once: a descriptor closed twice may be somebody else's by then."""
    dismissed: list[int] = []
    dismiss = RankProcess.dismiss

    def counted(process: RankProcess) -> None:
        dismissed.append(process.rank)
        dismiss(process)

    monkeypatch.setattr(RankProcess, "dismiss", counted)
    runner = start(checkpoint)
    [rank] = other_ranks(runner)
    closers = [threading.Thread(target=runner.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(HANGS_S)
    assert dismissed == [1]
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("forked")
def test_an_error_on_the_way_ends_the_group_too(checkpoint: Path) -> None:
    runner = start(checkpoint)
    ranks = other_ranks(runner)
    _, _, plan = whole_prompt(runner, [5, 6, 7], 3)

    def fails(layer: int) -> None:
        raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody listens"):
        runner.execute(plan, fails)
    assert not runner.is_healthy
    wait_until(lambda: not any(rank.is_running() for rank in ranks))


LEADER = """
import sys
import psutil
from pathlib import Path
from engine.steps.loading import EngineConfig, load_runner
folder = sys.argv[1]
config = EngineConfig(model_ref=folder, model_name="small", kv_blocks=40, num_threads=1, tensor_parallel=2)
runner = load_runner(Path(folder), config)
print(*(process.pid for process in psutil.Process().children()), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_their_leader_however_that_dies(checkpoint: Path) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(checkpoint)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert leader.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in leader.stdout.readline().split()]
    assert len(ranks) == 1
    leader.kill()
    leader.communicate()
    wait_until(lambda: not any(rank.is_running() for rank in ranks))
