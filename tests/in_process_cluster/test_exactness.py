"""Whole clusters in one process, whatever lies between prompt and token: their tokens are Hugging Face's.

Small random models in float32. `test_tier_exactness_in_clusters` has the ways for KV to lie in the tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, DeepseekV2Config, DeepseekV3Config

from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorkerConfig
from engine.drafting.speculation import SpeculationConfig
from engine.memory.devices import CPU
from engine.steps.loading import EngineConfig, layout_of, served_config
from kv_transfer.handoff import receiver
from kv_transfer.handoff.sender import KvSender
from kv_transfer.handoff.slab_copy import write_slab
from kv_transfer.transports.base import Identity, Transport
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.transports.process_group import DistributedCarrier, DistributedConfig
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import SocketTransport
from prefill_workers.worker import PrefillWorkerConfig
from tests.in_process_cluster.test_overlapped_cluster import count_ahead
from tests.support.clusters.mini_cluster import cluster_of
from tests.support.clusters.mini_requests import tokens, tokens_of
from tests.support.clusters.one_pool import computed_elsewhere, split
from tests.support.forked_child import fork_ranks
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.thoroughness import in_test_long
from tests.support.tier_shapes import watching
from tests.support.waiting import HANGS_S

# Two answers that end by themselves and one that is cut: what comes first, a random model would not say.
GRAMMARS = (
    'start: "[" /[a-z]{2,4}/ ("," /[a-z]{2,4}/){1,2} "]"',
    '%llguidance {}\nstart: %json {"type": "object", "properties": {"n": {"type": "integer", "maximum": 900}}, '
    '"required": ["n"], "additionalProperties": false}',
    "start: /([a-z]{1,3}[0-9])+[A-Z]{200}/",
)
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 129, 200)
FEW: dict[str, Any] = {"lengths": (3, 40, 70, 150), "num_tokens": 10}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
TRANSFORMERS: dict[str, Any] = {"backend": "transformers"}
ON_HOST = {"layers_per_group": 1, "host_bytes": 8 << 20}


class ByGroups(TransferConfig):
    """What NCCL does between GPUs, by gloo between CPUs."""

    def open(self, identity: Identity, host: str, device: torch.device = CPU) -> Transport:
        config = DistributedConfig(slabs=SlabConfig(slab_bytes=self.slab_bytes))
        return SocketTransport(identity, [DistributedCarrier(identity, config)], host=host)


SHM, TCP, AUTO = (TransferConfig(transport="shm"), TransferConfig(transport="tcp"), TransferConfig())


@dataclass(frozen=True, kw_only=True)
class Case:
    """`prefill` and `decode` change the ends' engines. A token of the llama has 256 bytes in each layer."""

    family: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)  # of the model
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    transfer: TransferConfig = SHM
    chunk_tokens: int = 512
    slab_bytes: int = 4 << 20
    waits: bool = False  # prompts are computed before decode has room
    overlap: bool = False  # decode plans steps ahead
    one_pool: bool = False  # of decode workers alone, each of which computes prompts for the other
    parts: tuple[float, ...] = ()  # of prompts, that one worker computes and another one goes on from
    lengths: tuple[int, ...] = LENGTHS
    num_tokens: int = 16
    grammars: tuple[str, ...] = ()  # of one more request each, of the longest prompt
    drafts: int = 3  # looked up for each step; 0: nothing is guessed


def blocks(size: int, layers: int) -> dict[str, Any]:
    return {"block_size": size, "layers_per_group": layers, "kv_blocks": 2000}


def ranks(number: int, **changes: Any) -> dict[str, Any]:
    return {"tensor_parallel": number, **changes}


CASES = {
    "whole prompts": Case(prefill={"kv_blocks": 2000}, decode={"kv_blocks": 2000}, grammars=GRAMMARS),
    "chunks over TCP": Case(transfer=TCP, chunk_tokens=64),
    "to larger blocks, overlapped": Case(
        prefill=blocks(8, 1),
        decode=blocks(32, 2),
        chunk_tokens=64,
        slab_bytes=7 * 256,
        overlap=True,
        grammars=GRAMMARS,
    ),
    "odd blocks, nothing drafted": Case(
        drafts=0,
        prefill=blocks(5, 2),
        decode=blocks(3, 3),
        transfer=TCP,
        chunk_tokens=33,
        slab_bytes=10 * 256,
    ),
    "with room for few": Case(
        prefill=blocks(8, 1),
        decode={"block_size": 5, "kv_blocks": 50},
        chunk_tokens=40,
        slab_bytes=9 * 256,
        waits=True,
        grammars=GRAMMARS[:1],
    ),
    "over gloo": Case(
        prefill=blocks(16, 1), decode=blocks(8, 3), transfer=ByGroups(), chunk_tokens=40, slab_bytes=9 * 256
    ),
    "a slab for each token": Case(
        prefill=blocks(32, 4),
        decode=blocks(8, 1),
        transfer=AUTO,
        chunk_tokens=50,
        slab_bytes=1,
    ),
    "windows": Case(family="mistral", decode={"block_size": 4}, chunk_tokens=20),
    "windows in some layers": Case(family="qwen2-windowed", decode={"block_size": 4}, chunk_tokens=20),
    "windows in turns, overlapped": Case(family="gemma3", decode={"block_size": 4}, chunk_tokens=20, overlap=True),
    "normed heads, overlapped": Case(family="qwen3", decode={"block_size": 4}, chunk_tokens=40, overlap=True),
    # By transformers' code, asked for where the family has a native model.
    "transformers, of a native family": Case(
        prefill=blocks(8, 1) | TRANSFORMERS, decode=blocks(5, 2) | TRANSFORMERS, chunk_tokens=33, grammars=GRAMMARS[:1]
    ),
    "transformers, from the native model": Case(prefill=blocks(8, 1), decode=TRANSFORMERS, overlap=True, **FEW),
    "transformers, windows and soft caps, overlapped": Case(
        family="gemma2",
        prefill=blocks(8, 1) | TRANSFORMERS,
        decode=blocks(5, 3) | TRANSFORMERS,
        chunk_tokens=20,
        overlap=True,
        **FEW,
    ),
    "transformers, latent attention": Case(family="youtu", prefill=blocks(8, 1), chunk_tokens=40, **FEW),
    "transformers, two calls of attention a layer": Case(
        family="diffllama", prefill=blocks(8, 3), decode=blocks(4, 2), chunk_tokens=40, **FEW
    ),
    "transformers, experts": Case(
        family="qwen2_moe", prefill=TRANSFORMERS, decode=TRANSFORMERS, transfer=TCP, chunk_tokens=40, **FEW
    ),
    "transformers, decoding on the host": Case(
        family="stablelm",
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
    ),
    "transformers, split in one pool": Case(
        one_pool=True, family="stablelm", decode=blocks(5, 2), chunk_tokens=33, parts=(0.4, 0.7), **FEW
    ),
    "experts in groups beside one of all, overlapped": Case(
        family="glm-4-moe", prefill=blocks(8, 1), decode=blocks(5, 2), chunk_tokens=40, overlap=True, grammars=GRAMMARS
    ),
    "experts beside one that is gated, two ranks to one": Case(
        family="qwen2-moe", prefill=ranks(2, block_size=8), decode=ranks(1, layers_per_group=2), chunk_tokens=40, **FEW
    ),
    "turning in part, two ranks to one": Case(
        family="phi-3-long", prefill=ranks(2, block_size=8), decode=ranks(1, layers_per_group=2), overlap=True, **FEW
    ),
    "turning in pairs side by side, overlapped": Case(
        family="glm", prefill=blocks(8, 1), decode=blocks(5, 2), chunk_tokens=40, overlap=True, **FEW
    ),
    "norms behind attention": Case(family="glm-4", prefill=blocks(8, 1), decode=blocks(5, 2), chunk_tokens=40, **FEW),
    "norms of all heads, windows in some layers, one rank to two": Case(
        family="olmo-3",
        prefill=ranks(1, block_size=8),
        decode=ranks(2, layers_per_group=2),
        chunk_tokens=20,
        overlap=True,
        **FEW,
    ),
    "norms of all heads, decoding on the host": Case(
        family="olmo-2",
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
    ),
    "sinks, two ranks to one": Case(
        family="gpt-oss", prefill=ranks(2, block_size=8), decode=ranks(1, layers_per_group=2), chunk_tokens=40, **FEW
    ),
    "sinks, decoding on the host": Case(
        family="gpt-oss",
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
    ),
    "latent, overlapped": Case(
        family="deepseek-v3",
        prefill=blocks(8, 1),
        decode=blocks(5, 2),
        chunk_tokens=40,
        slab_bytes=9 * 160,
        overlap=True,
        grammars=GRAMMARS[:1],
    ),
    "latent in groups, odd blocks over TCP": Case(
        family="deepseek-v2-grouped", decode=blocks(3, 3), transfer=TCP, chunk_tokens=33, **FEW
    ),
    "latent, split in one pool": Case(
        one_pool=True, family="deepseek-v3-dense", decode=blocks(5, 2), chunk_tokens=33, parts=(0.4, 0.7), **FEW
    ),
    "latent, decoding on the host": Case(
        family="deepseek-v2",
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
    ),
    "latent, whole experts on two ranks, to parts of them on two": Case(
        family="deepseek-v3",
        prefill=ranks(2, expert_parallel=True, block_size=8),
        decode=ranks(2, layers_per_group=2),
        overlap=True,
        **FEW,
    ),
    "latent, two ranks of one pool": Case(
        one_pool=True, family="deepseek-v2-grouped", decode=ranks(2, block_size=5), chunk_tokens=33, **FEW
    ),
    "latent, one rank to two that decode on the host": Case(
        family="deepseek-v2",
        prefill=ranks(1, block_size=16),
        decode=ranks(2, block_size=8, kv_blocks=120, staging_bytes=1 << 20, **ON_HOST),
        transfer=TCP,
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=20,
    ),
    "latent, two ranks that prefill on the host to one": Case(
        family="deepseek-v3-dense",
        prefill=ranks(2, block_size=16, kv_blocks=4 * 4, staging_bytes=4 << 20, **ON_HOST),
        **FEW,
    ),
    "one rank to two": Case(
        family="qwen3", prefill=ranks(1, block_size=8), decode=ranks(2, layers_per_group=2), overlap=True, **FEW
    ),
    "four ranks, each head on two, to two": Case(
        family="qwen3",
        prefill=ranks(4, block_size=8),
        decode=ranks(2, layers_per_group=2),
        transfer=TCP,
        overlap=True,
        **FEW,
    ),
    "norms of all heads, experts cut by their width, two ranks to one": Case(
        family="olmoe", prefill=ranks(2, block_size=8), decode=ranks(1, layers_per_group=2), overlap=True, **FEW
    ),
    "two ranks to three": Case(
        changes=SIX_HEADS, prefill=ranks(2, block_size=8), decode=ranks(3, layers_per_group=2), overlap=True, **FEW
    ),
    "three ranks to one": Case(
        changes=SIX_HEADS,
        prefill=ranks(3, block_size=8),
        decode=ranks(1, layers_per_group=2),
        transfer=TCP,
        **FEW,
    ),
    # Room for 64 tokens on the device: the rest lies on the host, layer by layer.
    "two ranks that prefill on the host": Case(
        family="gemma3", prefill=ranks(2, block_size=16, kv_blocks=4 * 4, staging_bytes=4 << 20, **ON_HOST), **FEW
    ),
    "decoding on the host": Case(
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
    ),
    "experts, decoding on the host": Case(
        family="mixtral",
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
    ),
    "of one pool": Case(one_pool=True, decode=blocks(5, 2), chunk_tokens=33, slab_bytes=10 * 256),
    "of one pool, overlapped": Case(
        drafts=0,
        one_pool=True,
        decode=blocks(16, 1),
        transfer=TCP,
        chunk_tokens=64,
        overlap=True,
        grammars=GRAMMARS[1:],
    ),
    "of one pool, windows in some layers": Case(
        one_pool=True, family="gemma3", decode={"block_size": 4}, chunk_tokens=20, overlap=True
    ),
    "whole experts of one pool, two ranks each": Case(
        one_pool=True,
        family="qwen3-moe",
        decode=ranks(2, expert_parallel=True, block_size=8),
        chunk_tokens=64,
        overlap=True,
        **FEW,
    ),
    "of one pool, two ranks each": Case(
        one_pool=True, family="qwen3", decode=ranks(2, block_size=8), chunk_tokens=64, overlap=True, **FEW
    ),
    "of one pool, on the host": Case(
        one_pool=True,
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
    ),
    "split anywhere": Case(prefill=blocks(8, 2), decode=blocks(8, 2), parts=(0.0, 0.5, 1.0, 0.25, 0.9)),
    "split between odd blocks, overlapped": Case(
        prefill=blocks(5, 2),
        decode=blocks(3, 3),
        transfer=TCP,
        chunk_tokens=33,
        slab_bytes=10 * 256,
        overlap=True,
        parts=(0.3, 0.8),
    ),
    "split, windows in some layers": Case(
        family="gemma3", decode={"block_size": 4}, chunk_tokens=20, overlap=True, parts=(0.5, 0.1)
    ),
    "split, two ranks": Case(
        family="qwen3", prefill=ranks(2, block_size=8), decode=ranks(2, layers_per_group=2), parts=(0.5,), **FEW
    ),
    "split, both on the host": Case(
        prefill={"kv_blocks": 4 * 4, "staging_bytes": 4 << 20, **ON_HOST},
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
        parts=(0.5, 0.2, 0.8),
    ),
    "split in one pool": Case(
        one_pool=True, decode=blocks(5, 2), chunk_tokens=33, slab_bytes=10 * 256, parts=(0.4, 0.7)
    ),
    "split in one pool, overlapped": Case(
        one_pool=True, decode=blocks(16, 1), transfer=TCP, chunk_tokens=64, overlap=True, parts=(0.5, 1.0, 0.0)
    ),
    "split in one pool, on the host": Case(
        one_pool=True,
        decode={"block_size": 8, "kv_blocks": 120, "staging_bytes": 1 << 20, **ON_HOST},
        lengths=(100, 33, 140, 64, 121, 90, 150, 80),
        num_tokens=40,
        parts=(0.5, 0.2, 0.8),
    ),
}
# Of families whose KV a local engine keeps on the host (test_tier_exactness), as the llama of a cluster does below.
IN_TEST_LONG = (
    "norms of all heads, decoding on the host",
    "sinks, decoding on the host",
    "experts, decoding on the host",
)
Models = Callable[[Case], SmallModel]


def in_all_heads(config: Any) -> int:
    """Numbers of a token's keys and values in one layer, of a config of transformers."""
    return int(config.num_attention_heads * (config.qk_head_dim + config.v_head_dim))


@pytest.mark.parametrize(("family", "degree"), [("deepseek-v2", 1), ("deepseek-v3", 1), ("deepseek-v3", 2)])
async def test_of_a_latent_model_the_latent_is_handed_over(models: Models, family: str, degree: int) -> None:
    """As many bytes as its config says, and a fifth of those of all heads or less: once, from however many ranks."""
    model, prompt = models(Case(family=family)), random_prompts([100])[0]
    config = AutoConfig.from_pretrained(model.folder)
    payloads: list[int] = []

    def counted(kv: Any, row: Any, layer: int, start: int, count: int, payload: Any, *rest: Any, **by_name: Any) -> int:
        payloads.append(payload.nbytes)
        return write_slab(kv, row, layer, start, count, payload, *rest, **by_name)

    async with cluster_of(model, prefill_engine=ranks(degree), decode_engine=ranks(degree)) as cluster:
        with mock.patch.object(receiver, "write_slab", counted):
            assert await tokens(cluster, "r", prompt, greedy(10)) == model.hugging_face(prompt, 10)
        token_bytes = cluster.models[1].layout.bytes_per_token_layer
    per_token = config.kv_lora_rank + config.qk_rope_head_dim
    assert token_bytes == per_token * 4
    assert sum(payloads) == len(prompt) * config.num_hidden_layers * per_token * 4
    assert in_all_heads(config) >= 5 * per_token


@pytest.mark.parametrize(
    "config", [DeepseekV3Config(), DeepseekV2Config(num_attention_heads=16)], ids=["V3", "V2-Lite"]
)
def test_of_a_published_latent_model_576_numbers_are_cached(config: Any, tmp_path: Path) -> None:
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.num_experts_per_tok = 6
    config.save_pretrained(tmp_path)
    engine = EngineConfig(model_ref=str(tmp_path), model_name="model")
    layout = layout_of(served_config(tmp_path, engine), engine, torch.bfloat16)
    assert layout.bytes_per_token_layer == 576 * 2
    assert layout.block_bytes == 576 * 2 * config.num_hidden_layers * layout.block_size
    assert in_all_heads(config) >= 5 * 576


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each made once."""

    @cache
    def made(family: str, changes: tuple[tuple[str, Any], ...]) -> SmallModel:
        return SmallModel(family, tmp_path_factory.mktemp(family), **dict(changes))

    return lambda case: made(case.family, tuple(case.changes.items()))


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


@pytest.mark.parametrize("grammar", [None, *GRAMMARS[:2]], ids=["free", "list", "object"])
def test_what_hugging_face_says_is_no_matter_of_the_guess(tmp_path: Path, grammar: str | None) -> None:
    prompt = random_prompts([40])[0]
    said = SmallModel("llama", tmp_path).hugging_face(prompt, 24, grammar)
    for wrong in ([*said[:-1], said[-1] ^ 1], said[:-1], [*said, 5], [said[0] ^ 1, *said[1:]]):
        assert SmallModel("llama", tmp_path).hugging_face(prompt, 24, grammar, guess=wrong) == said
    model = SmallModel("llama", tmp_path)
    with mock.patch.object(model, "_generate", side_effect=AssertionError):
        assert model.hugging_face(prompt, 24, grammar, guess=said) == said


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in IN_TEST_LONG), *in_test_long(*IN_TEST_LONG)])
async def test_tokens_are_hugging_faces(models: Models, name: str) -> None:
    """Of requests together, then of the longest again, of which the prefill worker has a prefix."""
    case = CASES[name]
    model, params = models(case), greedy(case.num_tokens)
    prompts = random_prompts(case.lengths)
    longest = max(prompts, key=len)
    layerkv = LayerKvConfig() if "host_bytes" in case.decode else None
    decode = DecodeWorkerConfig(
        overlap_steps=case.overlap,
        layerkv=layerkv,
        reserve_wait_s=HANGS_S,
        speculation=SpeculationConfig(fixed=case.drafts) if case.drafts else None,
    )
    if case.one_pool:
        decode = replace(decode, token_budget=case.chunk_tokens, max_slab_bytes=case.slab_bytes)
    async with cluster_of(
        model,
        prefill_engine=case.prefill,
        decode_engine=case.decode,
        prefill=PrefillWorkerConfig(chunk_tokens=case.chunk_tokens, max_slab_bytes=case.slab_bytes),
        decode=decode,
        transfer=case.transfer,
        num_prefill=0 if case.one_pool else 1,
        num_decode=2 if case.one_pool else 1,
    ) as cluster:
        with (
            computed_elsewhere(cluster) as pairs,
            split(cluster, *case.parts) as in_parts,
            count_ahead(cluster) as ahead,
            watching(cluster.models[1]) as decoding,
            mock.patch.object(KvSender, "keep", autospec=True, side_effect=KvSender.keep) as keep,
        ):
            found = await asyncio.gather(*(tokens(cluster, f"r{n}", p, params) for n, p in enumerate(prompts)))
            again, num_again = await cluster.generate("again", longest, params), 1
            if not again[0].num_cached_tokens:  # where room is scarce, others' blocks may have been computed later
                again, num_again = await cluster.generate("once more", longest, params), 2
            masked = await asyncio.gather(
                *(
                    tokens(cluster, f"masked{n}", longest, replace(params, grammar=g))
                    for n, g in enumerate(case.grammars)
                )
            )
        assert again[0].num_cached_tokens
        assert bool(keep.call_count) >= case.waits, "all had room at once"
        assert len(pairs) == (len(prompts) + num_again + len(masked) if case.one_pool else 0)
        assert bool(ahead) >= case.overlap, "no step was planned before the one in flight was over"
        assert len(in_parts) == (sum(length > 16 for length in case.lengths) + num_again if case.parts else 0)
        assert layerkv is None or max(decoding.placements) > 0, "all had room on the device"
        drafters = filter(None, (worker.scheduler.speculation for worker in cluster.decodes))
        drafted = sum(counts.drafted for drafter in drafters for counts in drafter.counts.values())
        # Not beside prompts, of which a decode worker of one pool may always have some, nor ahead of another step.
        assert case.overlap or case.one_pool or bool(drafted) == bool(case.drafts)
        stats = cluster.models[0].runner.transfer_stats
        assert "host_bytes" not in case.prefill or (stats is not None and stats.written_bytes > 0)
    for prompt, given in zip([*prompts, longest], [*found, tokens_of(again)], strict=True):
        assert given == model.hugging_face(prompt, case.num_tokens, guess=given)
    for grammar, given in zip(case.grammars, masked, strict=True):
        assert given == model.hugging_face(longest, case.num_tokens, grammar, guess=given)
