"""A cluster whose KV fits no tier: conversations that come back, a worker that dies, a restart.

A tiny random model, so that a thousand requests take a minute, of which `make test` asks a quarter; real processes,
shared memory and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from decode_workers.local_engine import LocalEngine
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from tests.ray.deployed.serve_run import ServeRun
from tests.ray.http_generation import Answer, complete, complete_all, greedy_body, http_client
from tests.ray.served_cluster import ServedCluster
from tests.support.small_models import greedy
from tests.support.thoroughness import THOROUGH

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

NAME = "tiny"
NUM_CONVERSATIONS = 50 if THOROUGH else 16
NUM_TURNS, ROUND_TURNS = (20, 4) if THOROUGH else (12, 3)
USER_TOKENS = 12
ANSWER_TOKENS = 8
CONVERSATION_BYTES = NUM_CONVERSATIONS * NUM_TURNS * (USER_TOKENS + ANSWER_TOKENS) * 1024  # 1 KiB of KV a token
MEMORY = {"block_size": 16, "memory": "1MiB", "host_memory": "3MiB", "staging": "1MiB"}
DISK_BYTES = NUM_CONVERSATIONS * 2**23 // 50  # of each of two workers: together they hold less than all conversations


def settings(tiny_folder: Path, disk: Path) -> dict[str, Any]:
    return {
        "model": {"ref": str(tiny_folder), "served_name": NAME, "dtype": "float32"},
        "kv": {
            "prefill": MEMORY,
            "decode": MEMORY,
            "disk": {"path": str(disk), "budget": DISK_BYTES},
        },
        "prefill": {"threads": 1, "chunk_tokens": 96},
        "decode": {"threads": 1, "max_num_seqs": 16},
        "tuning": {
            "EngineConfig": {"layers_per_group": 1},
            "PrefillWorkerConfig": {"calibration_s": 0.0},
            "DecodeWorkerConfig": {"calibration_s": 0.0},
        },
    }


@dataclass
class Conversation:
    """What a user says in each turn, and what the answers must be."""

    says: list[list[int]]
    expected: list[list[int]] = field(default_factory=list)

    def prompt(self, turn: int) -> list[int]:
        history: list[int] = []
        for said, answer in zip(self.says[:turn], self.expected, strict=False):
            history += said + answer
        return history + self.says[turn]


def conversations(tiny_folder: Path) -> list[Conversation]:
    """Answered by an engine that has room for everything, computes every prompt anew and knows no tiers."""
    source = random.Random(7)
    talks = [
        Conversation([[source.randrange(1000, 40_000) for _ in range(USER_TOKENS)] for _ in range(NUM_TURNS)])
        for _ in range(NUM_CONVERSATIONS)
    ]
    config = EngineConfig(
        model_ref=str(tiny_folder),
        model_name=NAME,
        dtype="float32",
        kv_blocks=2048,
        num_threads=1,
        prefix_caching=False,
    )
    engine = LocalEngine(load_model(config))
    for turn in range(NUM_TURNS):
        seqs = [
            Sequence(request_id=str(n), attempt=0, params=greedy(ANSWER_TOKENS), prompt_token_ids=talk.prompt(turn))
            for n, talk in enumerate(talks)
        ]
        for _ in engine.run(seqs):
            pass
        for talk, seq in zip(talks, seqs, strict=True):
            talk.expected.append(seq.output_token_ids)
    return talks


async def talk_to(cluster: ServedCluster, talks: list[Conversation], turns: range, concurrency: int) -> list[Answer]:
    """These turns of all conversations: turn after turn, so that each comes back when others have taken its room."""
    answers: list[Answer] = []
    for turn in turns:
        bodies = [greedy_body(NAME, talk.prompt(turn), ANSWER_TOKENS) for talk in talks]
        found = await complete_all(cluster.url, bodies, concurrency)
        for talk, answer in zip(talks, found, strict=True):
            assert answer.error is None
            assert answer.token_ids == talk.expected[turn], f"turn {turn} of a conversation is wrong"
        answers += found
    return answers


def ask(cluster: ServedCluster, prompt: list[int], num_tokens: int = 4) -> Answer:
    async def one() -> Answer:
        async with http_client(cluster.url) as client:
            return await complete(client, greedy_body(NAME, prompt, num_tokens))

    return asyncio.run(one())


def files_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another one has taken its place
            total += path.stat().st_size if path.is_file() else 0
    return total


def stored(cluster: ServedCluster, role: str, tier: str) -> float:
    return cluster.metric("legato_worker_kv_stored_columns_total", role=role, tier=tier)


def has_what_it_gets(cluster: ServedCluster, tier: str) -> bool:
    """Whether nothing was stored there for some reports: what waits to be is lost with a worker, and is told late."""
    before = [stored(cluster, role, tier) for role in ("prefill", "decode")]
    time.sleep(3)
    return before == [stored(cluster, role, tier) for role in ("prefill", "decode")]


def worker_bytes(cluster: ServedCluster) -> list[int]:
    return [psutil.Process(worker["pid"]).memory_full_info().uss for worker in cluster.workers()]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "disk"


def test_conversations_that_fit_in_no_tier(newcomer: ServeRun, tmp_path: Path, disk: Path, tiny_folder: Path) -> None:
    """Hundreds of requests, every answer exact; budgets hold, nothing leaks; then a restart, and then a death."""
    talks = conversations(tiny_folder)
    with newcomer.cluster(settings(tiny_folder, disk), tmp_path) as cluster:
        cluster.wait_for_workers(prefill=1, decode=1)
        first = talk_to_all(cluster, talks[: NUM_CONVERSATIONS // 5], range(NUM_TURNS))
        answers, sizes = [], [worker_bytes(cluster)]
        for turn in range(0, NUM_TURNS, ROUND_TURNS):
            answers += talk_to_all(cluster, talks, range(turn, turn + ROUND_TURNS))
            sizes.append(worker_bytes(cluster))
        assert len(answers) == NUM_CONVERSATIONS * NUM_TURNS
        cluster.wait_idle()
        # A leak grows with every round; what an allocator keeps, now and then.
        grown = [[b - a for a, b in itertools.pairwise(rounds)] for rounds in zip(*sizes, strict=True)]
        print(f"growth of the workers' memory: {grown} bytes")
        assert all(statistics.median(rounds) < 10_000_000 + NUM_CONVERSATIONS * 400_000 for rounds in grown), grown
        assert sum(a.cached_tokens for a in first + answers) > 0
        assert CONVERSATION_BYTES > DISK_BYTES
        assert files_bytes(disk) <= 2 * DISK_BYTES, "two workers keep at most their budget each"
        last = talks[-1].prompt(NUM_TURNS - 1)
        assert ask(cluster, last).cached_tokens > 0
        cluster.wait_until(lambda: has_what_it_gets(cluster, "disk"), "all is written")

    with newcomer.cluster(settings(tiny_folder, disk), tmp_path) as cluster:
        cluster.wait_for_workers(prefill=1, decode=1)
        assert any(is_found(cluster, talk) for talk in reversed(talks[-5:])), "the restart lost what the disk tier held"

        for path in disk.rglob("*.kv"):  # so that only host memory can know what follows
            path.unlink(missing_ok=True)
        prompt = [1500 + n for n in range(200)]
        cluster.wait_until(lambda: has_what_it_gets(cluster, "host"), "what was asked before is stored, and told")
        before = stored(cluster, "prefill", "host")
        alone = ask(cluster, prompt, ANSWER_TOKENS)
        cluster.wait_until(
            lambda: (
                stored(cluster, "prefill", "host") >= before + len(prompt) // 16 and has_what_it_gets(cluster, "host")
            ),
            "host memory has it, and nothing of earlier prompts is still on its way there",
        )
        for path in disk.rglob("*.kv"):
            path.unlink(missing_ok=True)
        killed = cluster.kill("prefill")
        cluster.wait_until(
            lambda: [w["pid"] != killed for w in cluster.workers() if w["role"] == "prefill"] == [True],
            "the prefill worker is back",
        )
        adopted = ask(cluster, prompt, ANSWER_TOKENS)
        assert adopted.token_ids == alone.token_ids
        assert adopted.cached_tokens >= 192, "the dead worker's host memory was lost"
        cluster.wait_idle()


def is_found(cluster: ServedCluster, talk: Conversation) -> bool:
    """Whether most of its last prompt was."""
    prompt = talk.prompt(NUM_TURNS - 1)
    answer = ask(cluster, prompt, ANSWER_TOKENS)
    assert answer.token_ids == talk.expected[-1]
    return answer.cached_tokens > len(prompt) // 2


def talk_to_all(cluster: ServedCluster, talks: list[Conversation], turns: range) -> list[Answer]:
    return asyncio.run(talk_to(cluster, talks, turns, concurrency=16))
