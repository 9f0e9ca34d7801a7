"""On our own CPU kernels a sequence's logits are the same to the bit: alone, in company, in chunks, on any worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_workers.worker import DecodeWorkerConfig
from engine.sampling.params import SamplingParams
from kernels.native.library import native_library
from kernels.ops import kernels_for
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import MiniCluster, cluster_of
from tests.support.model_families import FAMILIES, build_oracle
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.stepping import Stepper, recording_runner
from tests.support.thoroughness import THOROUGH, combined
from tests.support.waiting import HANGS_S

NUM_NEW_TOKENS = 4
DTYPES = (torch.float32, torch.bfloat16)
PROMPT, COMPANY = random_prompts([83, 40])
BFLOAT16 = {"dtype": "bfloat16", "kv_blocks": 400, "block_size": 4}

pytestmark = pytest.mark.skipif(native_library() is None, reason="torch's kernels promise no such thing")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_oracle(request.param, folder)
    return folder


def generated(
    folder: Path, dtype: torch.dtype, prompt: list[int], chunk: int | None = None
) -> tuple[list[int], Tensor]:
    """The tokens that are sampled, and the logits of each, `[n, V]`."""
    runner, sampler = recording_runner(folder, dtype=dtype)
    stepper = Stepper(runner)
    tokens = stepper.generate(stepper.add(prompt, "r"), NUM_NEW_TOKENS, chunk)
    return tokens, torch.stack(sampler.sampled["r"])


@pytest.fixture(scope="module", params=DTYPES)
def whole(request: pytest.FixtureRequest, folder: Path) -> tuple[torch.dtype, list[int], Tensor]:
    """A type, and what the prompt is answered in it, in one step and alone."""
    return request.param, *generated(folder, request.param, PROMPT)


def test_logits_are_the_same_in_any_chunks_and_any_company(
    whole: tuple[torch.dtype, list[int], Tensor], folder: Path
) -> None:
    dtype, _, expected = whole
    assert torch.equal(generated(folder, dtype, PROMPT, chunk=9)[1], expected)
    runner, sampler = recording_runner(folder, dtype=dtype, block_size=5, layers_per_group=2)
    stepper = Stepper(runner)
    seq, company = stepper.add(PROMPT, "r"), stepper.add(COMPANY, "company")
    stepper.step([(company, 5), (seq, 13)])
    stepper.step([(seq, seq.num_uncomputed), (company, company.num_uncomputed)])
    while len(seq.output_token_ids) < NUM_NEW_TOKENS:
        stepper.step([(company, 1), (seq, 1)])
    assert torch.equal(torch.stack(sampler.sampled["r"]), expected)


def test_logits_are_the_same_after_a_recovery(whole: tuple[torch.dtype, list[int], Tensor], folder: Path) -> None:
    """Another worker computes prompt and emitted tokens as one prompt, and goes on."""
    dtype, tokens, expected = whole
    _, again = generated(folder, dtype, PROMPT + tokens[:2])
    assert torch.equal(again[: NUM_NEW_TOKENS - 2], expected[2:])


# --- bfloat16 through workers ---


IN_BFLOAT16 = ("llama", "qwen3-moe", "deepseek-v3")


@pytest.fixture(scope="module", params=IN_BFLOAT16)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(request.param, tmp_path_factory.mktemp(request.param), dtype="bfloat16")


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Three in four greedy, the others seeded, and two in three begin alike."""
    number = 48 if THOROUGH else 24
    prompts = random_prompts([1 + 5 * n % 71 for n in range(number)], seed=2)
    prompts = [prompt if n % 3 == 0 else PROMPT[:30] + prompt for n, prompt in enumerate(prompts)]
    drawn = SamplingParams(max_tokens=16, seed=0, temperature=0.9, top_p=0.95, ignore_eos=True)
    wishes = [replace(drawn, seed=n) if n % 4 == 3 else greedy(16) for n in range(number)]
    return list(zip(prompts, wishes, strict=True))


async def answer(cluster: MiniCluster, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
    return [event.token_id for event in await cluster.generate(name, prompt, params)]


@combined(num_prefill=[0, 2], model=IN_BFLOAT16, indirect=["model"])
async def test_answers_in_bfloat16_do_not_change_with_the_company_they_are_in(
    model: SmallModel, num_prefill: int
) -> None:
    """Prefix hits, hand-offs in small chunks, and too little memory to keep all of them."""
    alone = [model.local(prompt, params).tokens for prompt, params in requests()]
    async with cluster_of(
        model,
        num_prefill=num_prefill,
        num_decode=1,
        prefill=PrefillWorkerConfig(chunk_tokens=24),
        decode=DecodeWorkerConfig(reserve_wait_s=HANGS_S),
        prefill_engine=BFLOAT16,
        decode_engine=BFLOAT16 | {"kv_blocks": 70},
    ) as cluster:
        for wave in range(10):  # who has to make way depends on how long steps take
            together = [answer(cluster, f"r{wave}-{n}", *request) for n, request in enumerate(requests())]
            assert await asyncio.gather(*together) == alone
            if cluster.decodes[0].snapshot().tiers.num_preemptions:
                break
        assert cluster.decodes[0].snapshot().tiers.num_preemptions > 0


async def test_a_stream_in_bfloat16_goes_on_to_the_token_when_its_worker_is_gone(model: SmallModel) -> None:
    expected = model.local(PROMPT, greedy(60)).tokens
    async with cluster_of(model, num_decode=2, prefill_engine=BFLOAT16, decode_engine=BFLOAT16) as cluster:
        stream = cluster.stream("r", PROMPT, greedy(60))
        found = [(await anext(stream)).token_id for _ in range(8)]
        await cluster.remove(next(worker for worker in cluster.decodes if worker.snapshot().num_running))
        async for event in stream:
            found.append(event.token_id)
    assert found == expected


def test_the_setting_is_met_by_a_cpus_own_kernels() -> None:
    cpu = torch.device("cpu")
    assert kernels_for(cpu, batch_invariant=True) is kernels_for(cpu)
