"""Limits of control groups, from files laid out as the kernel does it, and on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from engine.memory.control_groups import usable_cores
from engine.memory.host import memory_bytes

MIB = 2**20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_lowest_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/worker\n")
    write(tmp_path / "sys/fs/cgroup/pod/worker/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.max", f"{300 * MIB}\n")
    assert memory_bytes(tmp_path) == 300 * MIB


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n")
    write(tmp_path / "sys/fs/cgroup/memory/x/memory.limit_in_bytes", f"{200 * MIB}\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_bytes(tmp_path) == 200 * MIB


def test_a_container_sees_its_group_at_the_top(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/not/mounted/here\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", f"{100 * MIB}\n")
    assert memory_bytes(tmp_path) == 100 * MIB


def test_without_limits_it_is_the_machine_s(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < memory_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/pod/worker\n", {"pod/worker/cpu.max": "max 100000\n", "pod/cpu.max": "150000 100000\n"}),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "150000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}),
        ("0::/\n", {"cpu.max": "1000 100000\n"}),
    ],
)
def test_a_quota_of_time_is_so_many_cores(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    """`docker run --cpus`, or a limit in Kubernetes: more threads than that would wait for each other."""
    write(tmp_path / "proc/self/cgroup", groups)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize("quota", ["max 100000", "100000000 100000"])
def test_without_a_quota_it_is_all_that_it_may_run_on(tmp_path: Path, quota: str) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", quota)
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
