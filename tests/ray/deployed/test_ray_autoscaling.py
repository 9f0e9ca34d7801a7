"""A prefill pool that is sized by demand: a second worker comes with it, and goes when it is over.

The scheduler's advice goes to the worker, from there to Serve's controller, and becomes a process that loads a model.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.ray.deployed.serve_run import HANGS_S, PORT, ServeRun
from tests.ray.http_generation import Answer, complete, greedy_body, http_client
from tests.ray.served_cluster import MODEL, ServedCluster, config_file
from tests.support.exactness import LONGEST, exactness_prompts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

CONFIG: dict[str, Any] = {
    # Where a CPU has no bfloat16 a prompt in it takes nine times as long, and those that are left when a second worker
    # is wanted must still be computed.
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


def test_the_prefill_pool_follows_the_demand(newcomer: ServeRun, tmp_path: Path, smollm2_folder: Path) -> None:
    prompt = exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300)[LONGEST]
    with newcomer.cluster(CONFIG, tmp_path) as cluster:
        cluster.wait_for_workers(prefill=1, decode=1)
        answers = asyncio.run(_load_until_scaled(cluster, greedy_body(MODEL, prompt, 4)))
        cluster.wait_for_workers(prefill=1, decode=1)
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        cluster.wait_idle()


def test_a_changed_file_makes_no_pool_smaller_than_it_is(newcomer: ServeRun, tmp_path: Path, tiny_folder: Path) -> None:
    """Serve would begin anew with `replicas`, and stop all beyond that at once."""
    args: dict[str, Any] = {
        "model": {"ref": str(tiny_folder), "dtype": "float32"},
        "kv": {"decode": {"memory": "16MiB", "host_memory": 0}},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 2, "num_cpus": 0.2, "autoscaling": {"max_replicas": 2, "downscale_delay_s": 600.0}},
        "tuning": {"DecodeWorkerConfig": {"calibration_s": 0.0}},
        "gateway": {"num_cpus": 0.1},
    }
    with newcomer.cluster(args, tmp_path) as cluster:
        cluster.wait_for_workers(decode=2)
        scaling = {**args["decode"]["autoscaling"], "max_replicas": 3}
        changed = {**args, "decode": {**args["decode"], "replicas": 1, "autoscaling": scaling}}
        folder = tmp_path / "changed"
        folder.mkdir()
        newcomer.put(config_file(folder, changed, PORT))

        def told() -> dict[str, Any]:
            """Nothing as long as Serve builds the application."""
            pool = newcomer.pools().get("DecodeWorker", {})
            of_serve: dict[str, Any] = pool.get("deployment_config", {}).get("autoscaling_config", {})
            return of_serve

        wait_until(lambda: told().get("max_replicas") == 3, HANGS_S, "Serve has built it", every_s=0.2)
        assert told()["initial_replicas"] == 2


async def _load_until_scaled(cluster: ServedCluster, body: dict[str, Any]) -> list[Answer]:
    """Keep four prompts in the cluster until it wants two prefill workers, so that one is never idle. What is wanted
    comes: until it is there, one prompt after another and as much rest keep one of them half busy, which is more than
    it should be."""
    is_wanted, is_there = asyncio.Event(), asyncio.Event()
    answers: list[Answer] = []
    async with http_client(cluster.url) as client:

        async def send() -> None:
            while not is_wanted.is_set():
                answers.append(await complete(client, body))

        async def send_now_and_then() -> None:
            await send()
            while not is_there.is_set():
                began = time.monotonic()
                answers.append(await complete(client, body))
                await asyncio.sleep(time.monotonic() - began)

        def wants_two() -> bool:
            return cluster.metric("legato_pool_wanted_workers", pool="prefill") == 2

        senders = [asyncio.create_task(one()) for one in [send_now_and_then, *[send] * 3]]
        try:
            await asyncio.to_thread(cluster.wait_until, wants_two, "two prefill workers are wanted")
            is_wanted.set()
            await asyncio.to_thread(cluster.wait_for_workers, prefill=2, decode=1)
        finally:
            is_wanted.set()
            is_there.set()
            await asyncio.gather(*senders)
    return answers
