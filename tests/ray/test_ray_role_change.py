"""A worker of a real cluster changes its role, in its process and in mid-stream, and back again."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.text.tokenizer import Tokenizer
from tests.ray.http_generation import Answer, complete, greedy_body, http_client, stream_events
from tests.ray.served_cluster import MODEL, ServedCluster, served_cluster
from tests.support.exactness import exactness_prompts

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

MEMORY = {"memory": "256 blocks", "host_memory": "16MiB"}
CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "float32"},
    "kv": {"prefill": MEMORY, "decode": MEMORY},
    "prefill": {"num_cpus": 0.3},
    "decode": {"num_cpus": 0.3, "replicas": 2},
    "tuning": {"PrefillWorkerConfig": {"calibration_s": 0.2}, "DecodeWorkerConfig": {"calibration_s": 0.2}},
    "gateway": {"num_cpus": 0.1},
}


def test_a_worker_changes_its_role_and_back(tmp_path: Path, smollm2_folder: Path) -> None:
    prompt = exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300)[4]
    with served_cluster(CONFIG, tmp_path) as cluster:
        cluster.wait_for_workers(prefill=1, decode=2)
        pids = {worker["pid"] for worker in cluster.workers()}
        before, during = asyncio.run(_streams(cluster, greedy_body(MODEL, prompt, 200)))
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
    assert cluster.process.returncode == 0
    last_words = cluster.log.read_text().split("Stopping.")[1]
    assert not re.search("fail|error|retried|not end", last_words, re.IGNORECASE), last_words


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
