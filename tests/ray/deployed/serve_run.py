"""`serve run FILE` at work, as a newcomer types it: no Ray is running, no variable is set. Other applications are
deployed in the place of the file's, in the same Ray and Serve.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from cluster.deployment.ray_access import token_path
from tests.ray.served_cluster import ServedCluster, config_file, end_with_its_children, heed_interrupts, words_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
HANGS_S = 300.0  # it takes 15 to 25 s on two cores
PORT = 8000  # of all files in ray_configs/
_SERVE = str(Path(sys.executable).with_name("serve"))
URL = f"http://127.0.0.1:{PORT}"
SAYS_WHERE = r"Legato: serves .+ on (\S+)"
# What Serve says of processes that were kept from running for 10 s, and Legato of some that were for a second.
ABOUT_THE_MACHINE = (
    "control loop was slow|Didn't receive|check for proxy .* didn't complete|timed out after"
    "|Proxy .* failed the health check|Proxy actor reported not ready"
    "|the worker is silent|the worker's step does not end|a step has taken|has been silent too long"
)


class ServeRun:
    """The command at work, and what it has printed. `deployed`: the file whose application is served, if one is."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, file: Path) -> None:
        self.process = process
        self.deployed: Path | None = file
        self._log = log

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> None:
        self.wait_for_number(pattern, 1)

    def wait_for_number(self, pattern: str, number: int) -> list[str]:
        """Until it was printed so often; what the pattern's group, if it has one, was each time."""
        deadline = time.monotonic() + HANGS_S
        while len(found := re.findall(pattern, self.printed)) < number:
            assert self.process.poll() is None, f"it ended:\n{self.printed}"
            assert time.monotonic() < deadline, f"did not print {pattern!r} {number} times:\n{self.printed}"
            time.sleep(0.2)
        return found

    def warnings(self, start: int) -> list[str]:
        """Of the lines that it has printed from that character on, those that leave something to interpret."""
        lines = self.printed[start:].splitlines()
        return [line for line in lines if "WARNING" in line and not re.search(ABOUT_THE_MACHINE, line)]

    def deploy(self, file: Path) -> None:
        """The application of a Serve config file, in the place of what is served, as a user does it."""
        command = [_SERVE, "deploy", "--address", self._dashboard(), str(file)]
        environment = _environment() | {"RAY_AUTH_MODE": "token"}
        deployed = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S, check=False
        )
        assert deployed.returncode == 0, deployed.stderr
        self.deployed = file

    def serve(self, file: Path) -> None:
        """Like `deploy`, unless that file's is served; returns when it says so."""
        if self.deployed != file:
            said = re.findall(SAYS_WHERE, self.printed)
            self.deploy(file)
            self.wait_for_number(SAYS_WHERE, len(said) + 1)
        self.wait_for(SAYS_WHERE)

    def put(self, file: Path) -> None:
        """Like `deploy`, as the command does it, whose interpreter takes seconds."""
        self._applications("PUT", json=yaml.safe_load(file.read_text()))
        self.deployed = file

    def delete(self) -> None:
        """End what is served; returns when none of its processes is left."""
        self._applications("PUT", json={"applications": []})
        self.deployed = None
        wait_until(lambda: not self._replicas(), HANGS_S, "replicas are left", every_s=0.2)

    def pool(self, name: str) -> dict[str, Any]:
        """What Serve says of a deployment."""
        told: dict[str, Any] = self.pools()[name]
        return told

    def pools(self) -> dict[str, Any]:
        """What Serve says of the deployments that it knows by now."""
        told: dict[str, Any] = self._applications("GET").json()["applications"]["legato"]["deployments"]
        return told

    def _applications(self, method: str, **options: Any) -> httpx.Response:
        token = {"authorization": f"Bearer {token_path().read_text().strip()}"}
        url = f"{self._dashboard()}/api/serve/applications/"
        return httpx.request(method, url, headers=token, timeout=HANGS_S, **options).raise_for_status()

    @contextlib.contextmanager
    def cluster(self, args: dict[str, Any], folder: Path) -> Iterator[ServedCluster]:
        """Serve an application of these settings and nothing else; end it after the block."""
        if self.deployed:
            self.delete()
        said = re.findall(SAYS_WHERE, self.printed)
        self.put(config_file(folder, args, PORT))
        self.wait_for_number(SAYS_WHERE, len(said) + 1)
        yield ServedCluster(URL, self.process, self._log)
        self.delete()

    def _dashboard(self) -> str:
        """Where this Ray's is, whichever port it has got."""
        address = self.wait_for_number(r"dashboard at \S*?((?:http://)?[\d.]+:\d+)", 1)[0]
        return f"http://{address.removeprefix('http://')}"

    def _replicas(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if any("ServeReplica:" in word for word in words_of(child))]


@contextlib.contextmanager
def serve_run(file: Path, folder: Path) -> Iterator[ServeRun]:
    wait_until(_port_is_free, HANGS_S, "something else of this machine has the files' port")
    log = folder / "serve.log"
    environment = _environment()
    environment["RAY_SERVE_SLOW_STARTUP_WARNING_S"] = "600"  # which is about the machine, and no warning of ours
    with log.open("wb") as output:
        process = subprocess.Popen(
            [_SERVE, "run", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
    children: list[psutil.Process] = []
    try:
        running = ServeRun(process, log, file)
        running.wait_for("Submitted deploy config|Error")
        children = psutil.Process(process.pid).children(recursive=True)
        yield running
        printed = len(running.printed)
        process.send_signal(signal.SIGINT)
        process.wait(HANGS_S)
        assert "Traceback" not in running.printed[printed:]
        assert running.warnings(printed) == []
    finally:
        end_with_its_children(process, children)


def _port_is_free() -> bool:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", PORT))
        return True
    return False


def _environment() -> dict[str, str]:
    """Of somebody who has set nothing."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "LEGATO_SECRET", "LOG_NAME"))}
