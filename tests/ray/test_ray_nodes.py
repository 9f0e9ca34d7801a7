"""`make cluster NODES=3`, with LayerKV: prefill on one Ray node, decode on another, KV crosses by TCP, much of it lands
in host memory, and the tokens are Hugging Face's all the same. Nothing of that memory, and no process, is left when the
cluster has been stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from engine.text.tokenizer import Tokenizer
from tests.ray.http_generation import complete_all, greedy_body
from tests.ray.served_cluster import MODEL, STOP_TIMEOUT_S, is_alive, served_cluster, words_of
from tests.support.exactness import asked_of_all, count_near_ties, exactness_prompts, hf_reference
from tests.support.thoroughness import THOROUGH

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

NUM_TOKENS = 64 if THOROUGH else 32
LANDED = "legato_worker_host_landings_total"
HIT, MISSED = "legato_worker_prefix_hit_tokens_total", "legato_worker_prefix_missed_tokens_total"
CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "float32"},
    "kv": {
        "prefill": {"block_size": 32, "memory": "256 blocks", "host_memory": 0},
        # The device holds some 800 tokens of all sequences; the ring computes the others from host memory.
        "decode": {"block_size": 16, "memory": "150 blocks", "host_memory": "256MiB", "staging": "96MiB"},
    },
    "prefill": {"threads": 1, "chunk_tokens": 128},
    "decode": {"threads": 1, "max_num_seqs": 64},
    # Small slabs over several connections: every way in which messages can overtake each other is used.
    "transfer": {"transport": "auto"},
    "tuning": {
        "EngineConfig": {"layers_per_group": 10},
        "TransferConfig": {"slab_bytes": 2**16, "num_connections": 3},
    },
}


@pytest.fixture
def host_folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@contextlib.contextmanager
def another_dashboard() -> Iterator[None]:
    """Somebody has the port of Ray's dashboard, as another Ray on the machine would: this one, or whoever had it."""
    with socket.socket() as sock:
        with contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", 8265))
            sock.listen()
        yield


def test_nodes_are_token_exact_over_tcp(tmp_path: Path, smollm2_folder: Path, host_folder: Path) -> None:
    prompts = asked_of_all(exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300))
    command = [sys.executable, "-m", "cluster.deployment.local_nodes", "--nodes", "3"]
    # Serve's own proxy here, HAProxy in the other cluster: both fronts are used by the suite.
    env = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    config = {**CONFIG, "tuning": {**CONFIG["tuning"], "TiersConfig": {"host_folder": str(host_folder)}}}
    with another_dashboard(), served_cluster(config, tmp_path, command=command, env=env) as cluster:
        # It asks a question of its own first, and tells which way that went.
        cluster.wait_until(lambda: "Serving on" in cluster.log.read_text(), "it has shown an answer")
        cluster.wait_idle()
        told = cluster.log.read_text()
        assert "The capital of France is Paris." in told
        assert "The prompt was computed on prefill-1, its KV went to decode-1 by TCP" in told
        cluster.wait_until(lambda: cluster.metric(MISSED) > 0, "what that computed is told")
        before = cluster.metric(MISSED)
        family = psutil.Process(cluster.process.pid).children(recursive=True)
        starts = [child for child in family if {"start", "--block"} <= set(words_of(child))]
        assert len(starts) == 3, "each node is a `ray start`"
        proxies = [child for child in family if any("::ProxyActor" in word for word in words_of(child))]
        assert len(proxies) == 1, "they would have one port"
        runs = ("head .* gateways, global scheduler$", "prefill-1 .* prefill worker", "decode-1 .* decode worker")
        assert all(re.search(f"^  {line}", told, re.MULTILINE) for line in runs), told
        nodes = {worker["role"]: worker["endpoint"]["node_id"] for worker in cluster.workers()}
        assert nodes["prefill"] != nodes["decode"]
        bodies = [greedy_body(MODEL, prompt, NUM_TOKENS) for prompt in prompts]
        answers = asyncio.run(complete_all(cluster.url, bodies, concurrency=64))
        assert [answer.error for answer in answers] == [None] * len(answers)
        ours = [answer.token_ids for answer in answers]
        references = hf_reference(smollm2_folder, prompts, NUM_TOKENS, guesses=() if THOROUGH else ours)
        num_ties = count_near_ties(ours, references, [answer.logprobs for answer in answers])
        assert num_ties <= 3
        cluster.wait_idle()
        cluster.wait_until(lambda: cluster.metric(LANDED, role="decode") > len(prompts) / 4, "many have landed there")
        num_tokens, num_cached = sum(map(len, prompts)), sum(answer.cached_tokens for answer in answers)
        num_missed = before + num_tokens - num_cached
        cluster.wait_until(lambda: cluster.metric(MISSED) == num_missed, "what was computed is told")
        cluster.wait_until(lambda: cluster.metric(HIT) == num_cached, "what was not is told")
        assert num_cached > 0
        assert len(list(host_folder.iterdir())) == 1
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(STOP_TIMEOUT_S) == 0, cluster.log.read_text()[-3000:]
        assert cluster.log.read_text().endswith("(Ctrl-C to stop).\nStopping.\n"), "Ray tells where its threads stood"
        assert [child for child in family if is_alive(child)] == []
    assert not list(host_folder.iterdir())
