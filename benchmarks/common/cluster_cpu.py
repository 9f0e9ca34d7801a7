"""Who spends a running cluster's processor time: seconds, by what its processes are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil

STEPS: Final = "steps"  # of a worker: the thread that computes
DASHBOARD: Final = "dashboard"  # and what it started
BESIDE: Final = "workers beside steps"
_REST: Final = "rest of Ray"  # raylet, GCS, log monitor, and who started it
# What a process is, by what stands in the first words of its command line.
_PROCESSES: Final = {
    "ServeReplica:legato:PrefillWorker": BESIDE,
    "ServeReplica:legato:DecodeWorker": BESIDE,
    "ServeReplica:legato:Gateway": "gateway",
    "ServeReplica:legato:GlobalScheduler": "scheduler",
    "ServeController": "Serve and HAProxy",
    "ProxyActor": "Serve and HAProxy",
    "HAProxyManager": "Serve and HAProxy",
    "bin/haproxy": "Serve and HAProxy",
    "DashboardAgent": "Ray's agent",  # takes in every process's metrics; also without a dashboard
    "dashboard/dashboard.py": DASHBOARD,
}
WHO: Final = (STEPS, *dict.fromkeys([*_PROCESSES.values(), _REST]))


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process has used since it began. `threads_s`: of a worker's threads, by number."""

    who: str
    cpu_s: float
    threads_s: Mapping[int, float]


def usage(port: int) -> dict[int, Usage]:
    """The usage of each process of the cluster at this port, which this process has started."""
    root = next(child for child in psutil.Process().children() if str(port) in child.cmdline())
    found: dict[int, Usage] = {}
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = found.get(process.ppid())
            who = DASHBOARD if parent is not None and parent.who == DASHBOARD else _who(process)
            times = process.cpu_times()
            threads = process.threads() if who == BESIDE else ()
            threads_s = {thread.id: thread.user_time + thread.system_time for thread in threads}
            found[process.pid] = Usage(who, times.user + times.system, threads_s)
    return found


def spent_s(before: Mapping[int, Usage], after: Mapping[int, Usage]) -> dict[str, float]:
    """What was spent between two looks, by who; what a process spent that has ended since is lost. A worker's busiest
    thread is taken for the one that computes: there is one, where `threads` is 1."""
    spent = dict.fromkeys(WHO, 0.0)
    for pid, now in after.items():
        then = before.get(pid, Usage(now.who, 0.0, {}))
        steps_s = max((s - then.threads_s.get(thread, 0.0) for thread, s in now.threads_s.items()), default=0.0)
        spent[STEPS] += steps_s
        spent[now.who] += now.cpu_s - then.cpu_s - steps_s
    return spent


def _who(process: psutil.Process) -> str:
    words = " ".join(process.cmdline()[:3])
    return next((who for part, who in _PROCESSES.items() if part in words), _REST)
