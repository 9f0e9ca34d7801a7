"""`serve run FILE` as a newcomer types it: no Ray is running, no variable is set, the file is as it comes.

Each CPU file answers and says where; what a cluster can't hold is said in a sentence; Ctrl-C ends it in order.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml

from tests.cluster.deployment.test_capacity import CPU_FILES
from tests.ray.served_cluster import MODEL, end_with_its_children, heed_interrupts, listening_sockets, post_job

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
HANGS_S = 300.0  # it takes 15 to 25 s on two cores
URL = "http://127.0.0.1:8000"


class ServeRun:
    """The command at work, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        return self._wait(lambda: re.search(pattern, self.printed), pattern)

    def _wait(self, look: Callable[[], re.Match[str] | None], what: str) -> re.Match[str]:
        deadline = time.monotonic() + HANGS_S
        while (found := look()) is None:
            assert self.process.poll() is None, f"it ended:\n{self.printed}"
            assert time.monotonic() < deadline, f"never printed {what!r}:\n{self.printed}"
            time.sleep(0.2)
        return found


@contextlib.contextmanager
def serve_run(path: Path, folder: Path) -> Iterator[ServeRun]:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 8000))  # the files' port: if something else of this machine has it, that must end first
    log = folder / "serve.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "LEGATO_SECRET", "LOG_NAME"))}
    environment["RAY_SERVE_SLOW_STARTUP_WARNING_S"] = "600"  # which is about the machine, and no warning of ours
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", path],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
    children: list[psutil.Process] = []
    try:
        running = ServeRun(process, log)
        running.wait_for("Submitted deploy config|Error")
        children = psutil.Process(process.pid).children(recursive=True)
        yield running
    finally:
        end_with_its_children(process, children)


# One more is for nodes that fetch Legato from where that file says.
@pytest.mark.parametrize(
    "path", [path for path in CPU_FILES if path.stem != "runtime_env"], ids=lambda path: str(path.stem)
)
def test_a_file_answers_and_says_where(path: Path, tmp_path: Path, smollm2_folder: Path) -> None:
    with serve_run(path, tmp_path) as running:
        url = running.wait_for(r"Legato: serves \S+ on (\S+)").group(1)
        assert url == f"{URL}/v1"
        client = openai.OpenAI(base_url=url, api_key="unused", timeout=HANGS_S, max_retries=0)
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        if path.stem == "quickstart":
            _nobody_runs_jobs_here(running)
        running.process.send_signal(signal.SIGINT)
        running.process.wait(HANGS_S)
    assert "Traceback" not in running.printed
    # Ray's own word on its token stands before Serve starts; after that nothing is left to interpret.
    assert "WARNING" not in running.printed.partition("Started a local Ray")[2]


def _nobody_runs_jobs_here(running: ServeRun) -> None:
    """This Ray is open to other machines, so it asks for its token; and that is said."""
    running.wait_for(r"Ray listens on \S+ whoever has its token")
    refused = 0
    for _, address, port in listening_sockets(running.process):
        with contextlib.suppress(httpx.HTTPError):
            answer = post_job("127.0.0.1" if address in ("::", "0.0.0.0") else address, port)
            assert answer.status_code >= 400, f"{address}:{port} took the job: {answer.text}"
            refused += answer.status_code == 401
    assert refused >= 1


def test_what_the_cluster_cannot_hold_is_said_at_once(tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "ray_configs" / "quickstart.yaml").read_text())
    document["applications"][0]["args"]["decode"]["num_cpus"] = 4096
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(document))
    with serve_run(path, tmp_path) as running:
        said = running.wait_for(r"Legato: the application cannot start: (.*)").group(1)
        assert "1 decode worker x 4096" in said
        assert "Lower prefill.num_cpus or decode.num_cpus" in said
