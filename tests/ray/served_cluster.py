"""A real cluster for tests: `python -m cluster serve` in a process of its own, spoken to over HTTP only.

What a user would start, with Ray, Serve and worker processes; ended by a signal, and nothing may be left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.deployment.ray_environment import free_port

# A start takes 15 to 25 s on two cores, and several times as long beside other tests.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
# Because this machine is busy nobody's requests go elsewhere, nobody counts as gone and nothing is computed once more.
PATIENCE_S = 600.0
PATIENCE: Final = {
    "OrchestratorConfig": {"silence_s": PATIENCE_S},
    "SchedulerPolicy": {"stale_after_s": PATIENCE_S},
    "TransferConfig": {"silence_s": PATIENCE_S},
    "TiersConfig": {"load_timeout_s": PATIENCE_S},
    "PrefillWorkerConfig": {"overdue_s": PATIENCE_S},
    "DecodeWorkerConfig": {"overdue_s": PATIENCE_S, "lease_ttl_s": 60.0},
}
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class ServedCluster:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, timeout_s: float = 300.0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=timeout_s, max_retries=0)

    def workers(self) -> list[dict[str, Any]]:
        """What the gateway knows of the workers: role, pid, leases, ..."""
        response = httpx.get(f"{self.url}/cluster", timeout=60)
        response.raise_for_status()
        workers: list[dict[str, Any]] = response.json()["workers"]
        return workers

    def worker(self, role: str) -> dict[str, Any]:
        return next(worker for worker in self.workers() if worker["role"] == role)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels, as `/metrics` shows them now; 0 without any."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def kill(self, role: str) -> int:
        """SIGKILL one worker of that role, once there is one; its pid."""
        self.wait_until(lambda: bool(self.worker(role)), f"there is a {role} worker")
        pid: int = self.worker(role)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_gateway(self) -> int:
        """SIGKILL the only one; its pid."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("ServeReplica:legato:Gateway" in word for word in child.cmdline()):
                    child.kill()
                    return child.pid
        raise AssertionError("there is no gateway")

    def wait_until(
        self, holds: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S, every_s: float = 0.1
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError, StopIteration):
                if holds():
                    return
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}; workers: {self.workers()}"
            time.sleep(every_s)

    def wait_idle(self, timeout_s: float = 120.0) -> None:
        """Until no worker holds a lease: nothing leaked."""
        self.wait_until(
            lambda: all(w["num_leases"] == 0 and w["num_running"] == 0 for w in self.workers()),
            "no lease is held",
            timeout_s,
        )

    def wait_for_workers(self, timeout_s: float = START_TIMEOUT_S, **wanted: int) -> None:
        """Until as many workers of each role are there."""

        def there() -> bool:
            roles = [worker["role"] for worker in self.workers()]
            return all(roles.count(role) == number for role, number in wanted.items())

        self.wait_until(there, f"{wanted} workers are up", timeout_s, every_s=0.5)  # a start takes seconds


def listening_sockets(process: subprocess.Popen[bytes]) -> list[tuple[str, str, int]]:
    """Program, address and port of each socket on which the process or one of its children listens."""
    found = []
    for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in child.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.append((child.name(), connection.laddr.ip, connection.laddr.port))
    return found


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended between two looks
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


def post_job(host: str, port: int) -> httpx.Response:
    """What would run a command, if a Ray job agent listens there and lets anybody in."""
    return httpx.post(f"http://{host}:{port}/api/job_agent/jobs/", json={"entrypoint": "id"}, timeout=10)


def config_file(folder: Path, args: dict[str, Any], port: int = 8000) -> Path:
    """A Serve config file for `args`, of a patient cluster."""
    tuning = {name: {**patience, **args.get("tuning", {}).get(name, {})} for name, patience in PATIENCE.items()}
    args = {**args, "tuning": {**args.get("tuning", {}), **tuning}}
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"encoding": "JSON", "enable_access_log": False},
        "applications": [
            {"name": "legato", "route_prefix": "/", "import_path": "cluster.app:build", "args": args},
        ],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@contextlib.contextmanager
def served_cluster(
    args: dict[str, Any],
    folder: Path,
    *,
    env: dict[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "cluster", "serve", "--no-dashboard"),
) -> Iterator[ServedCluster]:
    """Start a cluster with these settings, wait until it serves, and stop it with SIGINT.

    `command` is what a user would type before the name of a Serve config file.
    """
    port = free_port()
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(config_file(folder, args, port))],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
    children: list[psutil.Process] = []
    try:
        cluster = ServedCluster(f"http://127.0.0.1:{port}", process, log)
        _wait_until_serving(cluster)
        children = psutil.Process(process.pid).children(recursive=True)
        yield cluster
    finally:
        end_with_its_children(process, children)


def _wait_until_serving(cluster: ServedCluster) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(cluster.url):
        told = cluster.log.read_text(errors="replace")[-3000:]
        assert cluster.process.poll() is None, f"the cluster ended at start:\n{told}"
        assert time.monotonic() < deadline, f"the cluster did not start within {START_TIMEOUT_S:g} s:\n{told}"
        time.sleep(0.2)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def heed_interrupts() -> None:
    """In a child, before its program starts: Ctrl-C is to end it, though a shell that runs the tests in the background
    has all that they start ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_its_children(process: subprocess.Popen[bytes], children: list[psutil.Process]) -> None:
    """Stop as a user would; kill what remains, by its id, so that no test leaves a process behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        children += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(30)
    for child in psutil.wait_procs(children, timeout=30)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
