"""`serve run FILE` as a newcomer types it: no Ray is running, no variable is set, the file is as it comes.

It answers and says where; so does each other CPU file that is deployed in its place, in the same Ray and Serve; what a
cluster can't hold is said in a sentence.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from cluster.config.load import load_config
from cluster.deployment.capacity import needs
from tests.cluster.deployment.test_capacity import CPU_FILES
from tests.ray.deployed.serve_run import HANGS_S, PORT, ROOT, SAYS_WHERE, URL, ServeRun
from tests.ray.served_cluster import MODEL, listening_sockets, post_job
from tests.support.thoroughness import THOROUGH
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

FILES = ROOT / "ray_configs"
QUICKSTART = FILES / "quickstart.yaml"


@pytest.fixture(scope="module")
def running(newcomer: ServeRun) -> Iterator[ServeRun]:
    """What it prints while these tests last leaves nothing to interpret."""
    # Ray's own word on its token stands before Serve starts.
    printed = newcomer.printed
    start = printed.index("Started a local Ray") if newcomer.deployed == QUICKSTART else len(printed)
    yield newcomer
    assert "Traceback" not in newcomer.printed[start:]
    assert newcomer.warnings(start) == []


def test_a_newcomer_s_file_answers_and_says_where(running: ServeRun) -> None:
    running.serve(QUICKSTART)
    _answers_where_it_says(running, QUICKSTART)
    running.wait_for(r"Ray listens on \S+ whoever has its token")
    _nobody_runs_jobs_here(running)


def test_a_client_that_leaves_before_its_first_token_ends_its_request(running: ServeRun) -> None:
    """Its prompt takes many seconds to compute. Its body comes after the head and fits one buffer of HAProxy's, of
    16 KiB: of such a one no gateway heard."""
    running.serve(QUICKSTART)
    body = json.dumps({"model": MODEL, "prompt": "a" + " a" * 6_500, "max_tokens": 4, "stream": True}).encode()
    about = f"{URL}/cluster/requests/leaves"

    def told(key: str) -> Any:
        answer = httpx.get(about, timeout=60)
        return answer.json()[key] if answer.status_code == 200 else None

    with socket.create_connection(("127.0.0.1", PORT)) as client:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: here\r\nx-request-id: leaves\r\ncontent-type: application/json\r\n"
        )
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.1)
        client.sendall(body)
        wait_until(lambda: told("outcome") == "running", HANGS_S, "it does not run", every_s=0.1)
    wait_until(lambda: told("outcome") == "cancelled", HANGS_S, "it goes on", every_s=0.1)
    assert told("ttft_s") is None


# Others than that one, than the one for nodes that fetch Legato from where it says, than those of which another one has
# all that they have (tests/cluster/deployment/test_cluster_files.py), than those whose pool without prefill workers
# `models.yaml` has too, than the one whose tiers `test_ray_tiers` has and the one whose classes `test_ray_cluster` has:
# these in `make test-long`.
@pytest.mark.parametrize(
    "path",
    [
        path
        for path in CPU_FILES
        if path.stem not in ("quickstart", "runtime_env", "cpu_2p2d", "auto")
        and (THOROUGH or path.stem not in ("colocated", "quantised", "kv_tiers", "slo"))
    ],
    ids=lambda path: str(path.stem),
)
def test_a_file_in_its_place_answers_and_says_where(running: ServeRun, path: Path) -> None:
    running.serve(path)
    _answers_where_it_says(running, path)


def test_what_the_cluster_cannot_hold_is_said_at_once(running: ServeRun, tmp_path: Path) -> None:
    document = yaml.safe_load(QUICKSTART.read_text())
    document["applications"][0]["args"]["decode"]["num_cpus"] = 4096
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(document))
    running.wait_for(SAYS_WHERE)
    running.deploy(path)
    (said,) = running.wait_for_number(r"Legato: the application cannot start: (.*)", 1)
    assert "1 decode worker x 4096" in said
    assert "Lower prefill.num_cpus or decode.num_cpus" in said


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

    wait_until(answers, HANGS_S, "it does not answer", every_s=0.2)
    wait_until(has_all, HANGS_S, "there are not as many workers", every_s=0.5)


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

    wait_until(is_refused, HANGS_S, "the job agent asks for a token", every_s=0.5)
