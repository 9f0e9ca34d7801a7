"""`serve run` with a prefill pool that is sized by demand: a second worker comes with it, and goes when it is over.

The scheduler's advice goes to the worker, from there to Serve's controller, and becomes a process that loads a model.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.ray.http_generation import Answer, complete, greedy_body, http_client
from tests.ray.served_cluster import MODEL, ServedCluster, served_cluster
from tests.support.exactness import LONGEST, exactness_prompts

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

CONFIG: dict[str, Any] = {
    # Without AVX-512 a prompt in bfloat16 takes nine times as long, and those that are left when two workers are there
    # must still be computed.
    "model": {"ref": MODEL, "dtype": "float32"},
    "kv": {
        "prefill": {"memory": "256MiB", "host_memory": "64MiB"},
        "decode": {"memory": "256MiB", "host_memory": "64MiB"},
        "prefix_cache": False,
    },
    "prefill": {
        "num_cpus": 0.2,
        "chunk_tokens": 256,
        "autoscaling": {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_utilisation": 0.3,
            "start_s": 2.0,
            "downscale_delay_s": 4.0,
        },
    },
    "tuning": {"PrefillWorkerConfig": {"calibration_s": 0.0}, "DecodeWorkerConfig": {"calibration_s": 0.0}},
    "decode": {"num_cpus": 0.2},
    "gateway": {"num_cpus": 0.1},
}
ENVIRONMENT = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def test_the_prefill_pool_follows_the_demand(tmp_path: Path, smollm2_folder: Path) -> None:
    prompt = exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300)[LONGEST]
    serve = str(Path(sys.executable).with_name("serve"))
    with served_cluster(CONFIG, tmp_path, command=(serve, "run"), env=ENVIRONMENT) as cluster:
        cluster.wait_for_workers(prefill=1, decode=1)
        answers = asyncio.run(_load_until_scaled(cluster, greedy_body(MODEL, prompt, 4)))
        cluster.wait_for_workers(prefill=1, decode=1)
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        cluster.wait_idle()


async def _load_until_scaled(cluster: ServedCluster, body: dict[str, Any]) -> list[Answer]:
    """Keep eight prompts in the cluster until it has two prefill workers: one is never idle meanwhile."""
    scaled = asyncio.Event()
    answers: list[Answer] = []
    async with http_client(cluster.url) as client:

        async def send() -> None:
            while not scaled.is_set():
                answers.append(await complete(client, body))

        senders = [asyncio.create_task(send()) for _ in range(8)]
        try:
            await asyncio.to_thread(cluster.wait_for_workers, prefill=2, decode=1)
        finally:
            scaled.set()
            await asyncio.gather(*senders)
    return answers
