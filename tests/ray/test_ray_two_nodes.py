"""Prefill on one Ray node, decode on another, with LayerKV: KV crosses by TCP, much of it lands in host memory, and
the tokens are Hugging Face's all the same. Nothing of that memory is left when the cluster has been stopped.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.ray.http_generation import complete_all, greedy_body
from tests.ray.served_cluster import MODEL, served_cluster
from tests.support.exactness import count_near_ties, exactness_prompts, hf_reference

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900)]

NUM_TOKENS = 64
LANDED = "legato_worker_host_landings_total"
HIT, MISSED = "legato_worker_prefix_hit_tokens_total", "legato_worker_prefix_missed_tokens_total"
CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "float32"},
    "kv": {
        "prefill": {"block_size": 32, "memory": "256 blocks", "host_memory": 0},
        # The device holds some 800 tokens of the 64 sequences; the ring computes the others from host memory.
        "decode": {"block_size": 16, "memory": "150 blocks", "host_memory": "256MiB", "staging": "96MiB"},
    },
    "prefill": {"num_cpus": 1, "threads": 1, "chunk_tokens": 128, "resources": {"prefill_node": 1}},
    "decode": {"num_cpus": 1, "threads": 1, "max_num_seqs": 64, "resources": {"decode_node": 1}},
    # Small slabs over several connections: every way in which messages can overtake each other is used.
    "transfer": {"transport": "auto"},
    "tuning": {"EngineConfig": {"layers_per_group": 10}, "TransferConfig": {"slab_bytes": 2**16, "num_connections": 3}},
}


@pytest.fixture
def host_folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_two_nodes_are_token_exact_over_tcp(tmp_path: Path, smollm2_folder: Path, host_folder: Path) -> None:
    prompts = exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300)
    references = hf_reference(smollm2_folder, prompts, NUM_TOKENS)
    command = [sys.executable, "-m", "tests.ray.two_nodes"]
    # Serve's own proxy here, HAProxy in the other cluster: both fronts are used by the suite.
    env = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    config = {**CONFIG, "tuning": {**CONFIG["tuning"], "TiersConfig": {"host_folder": str(host_folder)}}}
    with served_cluster(config, tmp_path, command=command, env=env) as cluster:
        # Ready means that a request could be served, and a decode worker alone can do that.
        cluster.wait_for_workers(prefill=1, decode=1)
        nodes = {worker["role"]: worker["endpoint"]["node_id"] for worker in cluster.workers()}
        assert nodes["prefill"] != nodes["decode"]
        bodies = [greedy_body(MODEL, prompt, NUM_TOKENS) for prompt in prompts]
        answers = asyncio.run(complete_all(cluster.url, bodies, concurrency=64))
        assert [answer.error for answer in answers] == [None] * len(answers)
        num_ties = count_near_ties(
            [answer.token_ids for answer in answers], references, [answer.logprobs for answer in answers]
        )
        assert num_ties <= 3
        cluster.wait_idle()
        cluster.wait_until(lambda: cluster.metric(LANDED, role="decode") > len(prompts) / 4, "many have landed there")
        num_tokens, num_cached = sum(map(len, prompts)), sum(answer.cached_tokens for answer in answers)
        cluster.wait_until(lambda: cluster.metric(MISSED) == num_tokens - num_cached, "what was computed is told")
        cluster.wait_until(lambda: cluster.metric(HIT) == num_cached, "what was not is told")
        assert num_cached > 0
        assert len(list(host_folder.iterdir())) == 1
    assert not list(host_folder.iterdir())
