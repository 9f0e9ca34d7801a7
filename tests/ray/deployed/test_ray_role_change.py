"""Workers of a real cluster that do not stay what they are: one changes its role, in its process and in mid-stream, and
back again; another, a group of three processes, is replaced as a whole when one of them dies, and gone as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.text.tokenizer import Tokenizer
from tests.ray.deployed.serve_run import ServeRun
from tests.ray.http_generation import Answer, complete, greedy_body, http_client, stream_events
from tests.ray.served_cluster import MODEL, ServedCluster, is_alive, words_of
from tests.support.exactness import exactness_prompts, hf_reference
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

NUM_TOKENS = 12
MEMORY = {"memory": "256 blocks", "host_memory": "16MiB"}
CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "float32"},
    "kv": {"prefill": MEMORY, "decode": MEMORY},
    "prefill": {"num_cpus": 0.3, "tensor_parallel": 3},
    "decode": {"num_cpus": 0.3, "replicas": 2},
    "tuning": {"PrefillWorkerConfig": {"calibration_s": 0.2}, "DecodeWorkerConfig": {"calibration_s": 0.2}},
    "gateway": {"num_cpus": 0.1},
}


@pytest.fixture(scope="module")
def cluster(newcomer: ServeRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """Ends in order, with all processes of the group, whatever the tests did to its workers."""
    with newcomer.cluster(CONFIG, tmp_path_factory.mktemp("cluster")) as running:
        running.wait_for_workers(prefill=1, decode=2)
        yield running
        last, printed = ranks(running), len(newcomer.printed)
        assert last
    wait_until(lambda: not any(map(is_alive, last)), what="processes of the group are left")
    assert newcomer.warnings(printed) == []


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> list[list[int]]:
    return exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300)


def test_a_worker_changes_its_role_and_back(cluster: ServedCluster, prompts: list[list[int]]) -> None:
    pids = {worker["pid"] for worker in cluster.workers()}
    before, during = asyncio.run(_streams(cluster, greedy_body(MODEL, prompts[4], 100)))
    assert during.error is None
    assert during.token_ids == before.token_ids
    cluster.wait_for_workers(prefill=2, decode=1)
    (changed,) = (worker for worker in cluster.workers() if worker["home"] != worker["role"])
    assert (changed["home"], changed["role"]) == ("decode", "prefill")

    refused = _change(cluster, cluster.worker("decode")["worker_id"], "prefill")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "role_change_refused")
    assert _change(cluster, "nobody", "prefill").status_code == 404

    assert _change(cluster, changed["worker_id"], "decode").status_code == 202
    cluster.wait_for_workers(prefill=1, decode=2)
    assert {worker["pid"] for worker in cluster.workers()} == pids
    cluster.wait_idle()


def test_a_group_of_three_prefills_for_a_single_process(
    cluster: ServedCluster, prompts: list[list[int]], smollm2_folder: Path
) -> None:
    chosen = [prompts[index] for index in (4, 47)]
    expected = [reference.token_ids for reference in hf_reference(smollm2_folder, chosen, NUM_TOKENS)]
    assert asyncio.run(_answers(cluster, chosen)) == expected
    first = ranks(cluster)
    assert len(first) == 2

    first[0].kill()
    cluster.wait_until(lambda: is_replaced(cluster, first), "the group is replaced")
    assert asyncio.run(_answers(cluster, chosen)) == expected
    cluster.wait_idle()


async def _streams(cluster: ServedCluster, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """The same request twice; the second time its decode worker has to leave at once, in mid-stream."""
    async with http_client(cluster.url) as client:
        before = await complete(client, body)
        await asyncio.to_thread(cluster.wait_idle)  # so that whoever is busy from here on is busy with the next one
        for _ in range(5):  # an answer may be over before the gateway has heard who decodes it
            during, told = Answer(), False
            async for _ in stream_events(client, body, during):
                if not told and len(during.token_ids) >= 5:
                    told = await asyncio.to_thread(_tell_who_decodes, cluster)
            if told:
                break
    assert told
    return before, during


def _tell_who_decodes(cluster: ServedCluster) -> bool:
    """False as long as the gateway has not heard who that is."""
    for worker in cluster.workers():
        if worker["role"] == "decode" and worker["num_running"]:
            return _change(cluster, worker["worker_id"], "prefill").status_code == 202
    return False


def _change(cluster: ServedCluster, worker_id: str, role: str) -> httpx.Response:
    return httpx.post(
        f"{cluster.url}/cluster/workers/{worker_id}/role", json={"role": role, "drain_s": 0.0}, timeout=60
    )


def ranks(cluster: ServedCluster) -> list[psutil.Process]:
    """The other processes of the prefill worker's group."""
    children = psutil.Process(cluster.worker("prefill")["pid"]).children()
    return [child for child in children if is_alive(child) and "engine.parallel.follower" in words_of(child)]


def is_replaced(cluster: ServedCluster, before: list[psutil.Process]) -> bool:
    """Also false while a process is just ending."""
    with contextlib.suppress(psutil.Error):
        return len(ranks(cluster)) == len(before) and not any(map(is_alive, before))
    return False


async def _answers(cluster: ServedCluster, prompts: list[list[int]]) -> list[list[int]]:
    async with http_client(cluster.url) as client:
        return [(await complete(client, greedy_body(MODEL, prompt, NUM_TOKENS))).token_ids for prompt in prompts]
