"""A worker of a real cluster that is a group of processes: exact, replaced as a whole, and gone as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.text.tokenizer import Tokenizer
from tests.ray.http_generation import complete, greedy_body, http_client
from tests.ray.served_cluster import MODEL, ServedCluster, served_cluster
from tests.support.exactness import exactness_prompts, hf_reference

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

NUM_TOKENS = 12
MEMORY = {"memory": "256 blocks", "host_memory": "16MiB"}
CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "float32"},
    "kv": {"prefill": MEMORY, "decode": MEMORY},
    "prefill": {"num_cpus": 0.3, "tensor_parallel": 3},
    "decode": {"num_cpus": 0.3},
    "tuning": {"PrefillWorkerConfig": {"calibration_s": 0.2}, "DecodeWorkerConfig": {"calibration_s": 0.2}},
    "gateway": {"num_cpus": 0.1},
}


def test_a_group_of_three_prefills_for_a_single_process(tmp_path: Path, smollm2_folder: Path) -> None:
    prompts = [exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300)[index] for index in (4, 47)]
    expected = [reference.token_ids for reference in hf_reference(smollm2_folder, prompts, NUM_TOKENS)]
    with served_cluster(CONFIG, tmp_path) as cluster:
        cluster.wait_for_workers(prefill=1, decode=1)
        assert asyncio.run(_answers(cluster, prompts)) == expected
        first = ranks(cluster)
        assert len(first) == 2

        first[0].kill()
        cluster.wait_until(lambda: is_replaced(cluster, first), "the group is replaced")
        assert asyncio.run(_answers(cluster, prompts)) == expected
        cluster.wait_idle()
        last = ranks(cluster)
    assert not any(map(is_alive, last))


def ranks(cluster: ServedCluster) -> list[psutil.Process]:
    """The other processes of the prefill worker's group."""
    children = psutil.Process(cluster.worker("prefill")["pid"]).children()
    return [child for child in children if is_alive(child) and "engine.parallel.follower" in child.cmdline()]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def is_replaced(cluster: ServedCluster, before: list[psutil.Process]) -> bool:
    """Also false while a process is just ending."""
    with contextlib.suppress(psutil.Error):
        return len(ranks(cluster)) == len(before) and not any(map(is_alive, before))
    return False


async def _answers(cluster: ServedCluster, prompts: list[list[int]]) -> list[list[int]]:
    async with http_client(cluster.url) as client:
        return [(await complete(client, greedy_body(MODEL, prompt, NUM_TOKENS))).token_ids for prompt in prompts]
