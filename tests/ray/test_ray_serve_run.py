"""`serve run FILE` as a newcomer types it: no Ray is running, no variable is set, the file is as it comes.

It answers and says where; so does each other CPU file that is deployed in its place, in the same Ray and Serve; what a
cluster can't hold is said in a sentence; Ctrl-C ends it in order.
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

import httpx
import openai
import psutil
import pytest
import yaml

from cluster.config.load import load_config
from cluster.deployment.capacity import needs
from tests.cluster.deployment.test_capacity import CPU_FILES
from tests.ray.served_cluster import MODEL, end_with_its_children, heed_interrupts, listening_sockets, post_job
from tests.support.thoroughness import THOROUGH
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
HANGS_S = 300.0  # it takes 15 to 25 s on two cores
FILES = ROOT / "ray_configs"
URL = "http://127.0.0.1:8000"
SAYS_WHERE = r"Legato: serves .+ on (\S+)"
# What Serve says of processes that were kept from running for 10 s, and Legato of some that were for a second.
ABOUT_THE_MACHINE = (
    "control loop was slow|Didn't receive|check for proxy .* didn't complete|timed out after"
    "|Proxy .* failed the health check|Proxy actor reported not ready"
    "|the worker is silent|the worker's step does not end|a step has taken|has been silent too long"
)


class ServeRun:
    """The command at work, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
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


@contextlib.contextmanager
def serve_run(path: Path, folder: Path) -> Iterator[ServeRun]:
    wait_until(_port_is_free, HANGS_S, "something else of this machine has the files' port")
    log = folder / "serve.log"
    environment = _environment()
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


def _port_is_free() -> bool:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 8000))
        return True
    return False


def _environment() -> dict[str, str]:
    """Of somebody who has set nothing."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "LEGATO_SECRET", "LOG_NAME"))}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Iterator[ServeRun]:
    """Ends in order, whatever was deployed meanwhile."""
    with serve_run(FILES / "quickstart.yaml", tmp_path_factory.mktemp("quickstart")) as running:
        yield running
        running.process.send_signal(signal.SIGINT)
        running.process.wait(HANGS_S)
    assert "Traceback" not in running.printed
    # Ray's own word on its token stands before Serve starts; after that nothing is left to interpret.
    lines = running.printed.partition("Started a local Ray")[2].splitlines()
    assert [line for line in lines if "WARNING" in line and not re.search(ABOUT_THE_MACHINE, line)] == []


def test_a_newcomer_s_file_answers_and_says_where(quickstart: ServeRun) -> None:
    _answers_where_it_says(quickstart, FILES / "quickstart.yaml")
    quickstart.wait_for(r"Ray listens on \S+ whoever has its token")
    _nobody_runs_jobs_here(quickstart)


# Others than that one, than the one for nodes that fetch Legato from where it says, than those of which another one has
# all that they have (tests/cluster/deployment/test_cluster_files.py), than those whose pool without prefill workers
# `models.yaml` has too, and than the one whose tiers `test_ray_tiers` has: these in `make test-long`.
@pytest.mark.parametrize(
    "path",
    [
        path
        for path in CPU_FILES
        if path.stem not in ("quickstart", "runtime_env", "cpu_2p2d", "auto")
        and (THOROUGH or path.stem not in ("colocated", "quantised", "kv_tiers"))
    ],
    ids=lambda path: str(path.stem),
)
def test_a_file_in_its_place_answers_and_says_where(quickstart: ServeRun, path: Path) -> None:
    said = quickstart.wait_for_number(SAYS_WHERE, 1)
    _deploy(quickstart, path)
    quickstart.wait_for_number(SAYS_WHERE, len(said) + 1)
    _answers_where_it_says(quickstart, path)


def test_what_the_cluster_cannot_hold_is_said_at_once(quickstart: ServeRun, tmp_path: Path) -> None:
    document = yaml.safe_load((FILES / "quickstart.yaml").read_text())
    document["applications"][0]["args"]["decode"]["num_cpus"] = 4096
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(document))
    quickstart.wait_for_number(SAYS_WHERE, 1)
    _deploy(quickstart, path)
    (said,) = quickstart.wait_for_number(r"Legato: the application cannot start: (.*)", 1)
    assert "1 decode worker x 4096" in said
    assert "Lower prefill.num_cpus or decode.num_cpus" in said


def _deploy(running: ServeRun, path: Path) -> None:
    """In the place of what is served. By this Ray's dashboard, whichever port that has got."""
    address = running.wait_for_number(r"dashboard at \S*?((?:http://)?[\d.]+:\d+)", 1)[0]
    deployed = subprocess.run(
        [
            Path(sys.executable).with_name("serve"),
            "deploy",
            "--address",
            f"http://{address.removeprefix('http://')}",
            path,
        ],
        env=_environment() | {"RAY_AUTH_MODE": "token"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert deployed.returncode == 0, deployed.stderr


def _answers_where_it_says(running: ServeRun, path: Path) -> None:
    """With all of the workers that the file asks for, and no other. Serve's proxy may hear of a new gateway a little
    after that has said where it serves."""
    url = running.wait_for_number(SAYS_WHERE, 1)[-1]
    assert url == f"{URL}/v1"
    client = openai.OpenAI(base_url=url, api_key="unused", timeout=HANGS_S, max_retries=0)
    args = yaml.safe_load(path.read_text())["applications"][0]["args"]
    wanted = sum(need.replicas for need in needs(load_config(args)) if need.what.endswith(" worker"))

    def answers() -> bool:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
            )
            assert "Paris" in (answer.choices[0].message.content or "")
            return True
        return False

    def has_all() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            cluster = httpx.get(f"{URL}/cluster", timeout=60).raise_for_status().json()
            return len(cluster["workers"]) == wanted
        return False

    wait_until(answers, HANGS_S, "it does not answer")
    wait_until(has_all, HANGS_S, "there are not as many workers")


def _nobody_runs_jobs_here(running: ServeRun) -> None:
    """This Ray is open to other machines, so it asks for its token."""

    def is_refused() -> bool:
        refused = 0
        for _, address, port in listening_sockets(running.process):
            with contextlib.suppress(httpx.HTTPError):
                answer = post_job("127.0.0.1" if address in ("::", "0.0.0.0") else address, port)
                assert answer.status_code >= 400, f"{address}:{port} took the job: {answer.text}"
                refused += answer.status_code == 401
        return refused >= 1

    wait_until(is_refused, HANGS_S, "the job agent asks for a token")
