"""A rank dies in the middle of a request: that goes on with another worker, and the client sees nothing of it."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from decode_workers.worker import DecodeWorker
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig, mini_cluster
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import eventually

NUM_TOKENS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("model"))


async def test_another_worker_goes_on_when_a_decoding_rank_dies(model: SmallModel) -> None:
    config = MiniClusterConfig(
        model_ref=str(model.folder), num_prefill=1, num_decode=2, decode_engine={"tensor_parallel": 2}
    )
    [prompt] = random_prompts([50])
    async with mini_cluster(config) as cluster:
        tokens = []
        async with contextlib.aclosing(cluster.stream("r", prompt, greedy(NUM_TOKENS))) as events:
            async for event in events:
                tokens.append(event.token_id)
                if len(tokens) == 3:
                    broken = kill_a_rank(cluster)
        assert tokens == model.hugging_face(prompt, NUM_TOKENS, guess=tokens)
        await eventually(lambda: broken.snapshot().draining)
        assert [worker.is_healthy for worker in cluster.workers].count(False) == 1
        await cluster.idle()


def kill_a_rank(cluster: MiniCluster) -> DecodeWorker:
    """Of the worker that decodes."""
    [busy] = [worker for worker in cluster.decodes if worker.gateway_of]
    group = busy.model.runner.group
    assert group is not None
    os.kill(group.pids[0], signal.SIGKILL)
    return busy
