"""Prefill and decode workers, gateway and scheduler in one process, over real connections: their tokens, and room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from cluster.errors import OverloadedError, RequestTooLargeError
from decode_workers.worker import DecodeWorkerConfig
from engine.sequence import SequenceKey
from kv_transfer.connections.connection import Connection
from kv_transfer.messages.requests import Cancel, HandedOver, RequestSpec, Reserve, Reserved, Start, StepFrame
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import brake, cluster_of
from tests.support.clusters.mini_requests import PROMPT, busy, interrupted, sampled, tokens, tokens_of
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

# --- exact tokens ---


async def test_workers_tell_that_torch_has_a_part_in_what_transformers_code_computes(llama: SmallModel) -> None:
    """Its norms and activations, say: to the bit they are not those of a native model."""
    async with cluster_of(llama, decode_engine={"backend": "transformers"}) as cluster:
        native, by_transformers = cluster.prefills[0].info.arithmetic, cluster.decodes[0].info.arithmetic
        assert "torch" in by_transformers
        assert by_transformers != native or native.startswith("torch"), "no C++ kernels here"


async def test_a_cached_prefix_is_reported_and_handed_over(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        for n, (prompt, cached) in enumerate([(PROMPT, 0), (PROMPT, 144), (PROMPT[:100] + [5] * 30, 96)]):
            events = await cluster.generate(f"r{n}", prompt, greedy())
            assert events[0].num_cached_tokens == cached
            assert tokens_of(events) == llama.local(prompt, greedy()).tokens
        assert cluster.prefills[0].scheduler.num_uncomputed_tokens == 0
        salted = await cluster.generate("salted", PROMPT, greedy(), cache_salt="another tenant")
        assert salted[0].num_cached_tokens == 0


async def test_prompt_logprobs_come_with_the_first_token(llama: SmallModel) -> None:
    params = greedy(4, prompt_logprobs=2, logprobs=1)
    expected = llama.local(PROMPT, params).prompt_logprobs
    assert expected is not None
    async with cluster_of(llama, prefill=PrefillWorkerConfig(chunk_tokens=40)) as cluster:
        for n in range(2):
            events = await cluster.generate(f"r{n}", PROMPT, params)
            assert [event.prompt_logprobs is not None for event in events] == [True, False, False, False]
            assert all(event.logprob is not None and len(event.top_logprobs or ()) == 1 for event in events)
            found = events[0].prompt_logprobs
            assert found is not None
            assert [logprob for logprob, _ in found] == pytest.approx([e.logprob for e in expected], abs=1e-4)
            assert [[t for t, _ in top] for _, top in found] == [[t for t, _ in e.top] for e in expected]


async def test_a_prefill_worker_with_little_memory_cuts_no_answer_short(llama: SmallModel) -> None:
    """The prompt fills its memory to the last token; the answer's length is decode's affair."""
    async with cluster_of(llama, prefill_engine={"kv_blocks": 4}) as cluster:
        assert cluster.prefills[0].info.max_model_len == 64
        for length in (63, 64):
            events = await cluster.generate(f"r{length}", PROMPT[:length], greedy())
            assert tokens_of(events) == llama.local(PROMPT[:length], greedy()).tokens
            assert cluster.models[0].costs.cost() is not None


async def test_without_prefill_workers_decode_computes_prompts(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=0, decode=DecodeWorkerConfig(token_budget=40)) as cluster:
        prompts = random_prompts((1, 2, 15, 16, 17, 33, 64, 100, 129, 200))
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", p, greedy()) for n, p in enumerate(prompts)))
        assert found == [llama.local(prompt, greedy()).tokens for prompt in prompts]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_request_with_earlier_tokens_goes_on_after_them(llama: SmallModel, num_prefill: int) -> None:
    expected = llama.local(PROMPT, greedy()).tokens
    async with cluster_of(llama, num_prefill=num_prefill) as cluster:
        events = await cluster.generate("r", PROMPT, greedy(), attempt=3, output_token_ids=expected[:10])
        assert [event.index for event in events] == list(range(10, 24))
        assert [event.token_id for event in events] == expected[10:]
        assert [event.num_cached_tokens for event in events] == [0] + [None] * 13


async def test_work_spreads_over_all_workers(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        prompts = random_prompts([40] * 24)
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", p, greedy()) for n, p in enumerate(prompts)))
        assert found == [llama.local(prompt, greedy()).tokens for prompt in prompts]
        assert all(model.costs.cost() is not None for model in cluster.models)


async def test_a_seed_gives_the_same_tokens_alone_and_among_others(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        alone = await tokens(cluster, "alone", PROMPT[:40], sampled(5))
        assert alone == llama.local(PROMPT[:40], sampled(5)).tokens
        others = [tokens(cluster, f"r{n}", p, sampled(n)) for n, p in enumerate(random_prompts([30] * 31))]
        among, *rest = await asyncio.gather(tokens(cluster, "among", PROMPT[:40], sampled(5)), *others)
        assert among == alone
        assert len({tuple(found) for found in rest}) == 31


async def test_a_seed_gives_the_same_tokens_after_preemptions(llama: SmallModel) -> None:
    """Eight sequences of which at the end four fit."""
    async with cluster_of(llama, decode_engine={"kv_blocks": 20, "block_size": 4}) as cluster:
        prompts = random_prompts([6] * 8)
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", p, sampled(n)) for n, p in enumerate(prompts)))
        assert cluster.decodes[0].scheduler.num_preemptions > 0
        assert found == [llama.local(p, sampled(n)).tokens for n, p in enumerate(prompts)]


async def test_a_seed_gives_the_same_tokens_after_a_decode_s_death(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        found = await interrupted(cluster, sampled(9), 7, lambda: cluster.remove(busy(cluster)))
        assert found == llama.local(PROMPT, sampled(9)).tokens


# --- room ---


async def test_a_reservation_waits_for_room_and_is_granted(llama: SmallModel) -> None:
    async with cluster_of(llama, decode_engine={"kv_blocks": 12}) as cluster:
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT, greedy()) for n in range(4)))
        assert found == [llama.local(PROMPT, greedy()).tokens] * 4


async def test_a_reservation_that_finds_no_room_in_time_is_refused(llama: SmallModel) -> None:
    async with cluster_of(
        llama,
        prefill_engine={"kv_blocks": 12},  # too few for a prompt that is kept until decode has room
        decode_engine={"kv_blocks": 12},
        decode=DecodeWorkerConfig(reserve_wait_s=0.2),
    ) as cluster:
        with brake(cluster.decodes[0].model.runner) as held:
            first = asyncio.create_task(cluster.generate("a", PROMPT, greedy()))
            await held.reached()
            with pytest.raises(OverloadedError, match="the workers are full") as refused:
                await cluster.generate("b", PROMPT, greedy())
            assert refused.value.retry_after_s == 0.2
        assert tokens_of(await first) == llama.local(PROMPT, greedy()).tokens


async def test_a_full_queue_says_when_those_in_it_have_room(llama: SmallModel) -> None:
    """Not how long a reservation may wait, which nobody in it is; nor how long one has waited whom something else
    holds up."""
    async with cluster_of(
        llama, num_prefill=0, decode=DecodeWorkerConfig(max_waiting=1, reserve_wait_s=10 * HANGS_S)
    ) as cluster:
        with brake(cluster.decodes[0].model.runner) as held:
            others = [asyncio.create_task(cluster.generate("a", PROMPT, greedy()))]
            await held.reached()
            others.append(asyncio.create_task(cluster.generate("b", PROMPT, greedy())))
            await eventually(lambda: cluster.decodes[0].scheduler.num_waiting == 1)
            with pytest.raises(OverloadedError, match="the workers are full") as refused:
                await cluster.generate("c", PROMPT, greedy())
            assert refused.value.retry_after_s is not None and 0 < refused.value.retry_after_s < 10 * HANGS_S
            waiting = cluster.decodes[0].scheduler.sequence(SequenceKey("b", 0))
            assert waiting is not None
            waiting.accepted_at -= 100 * HANGS_S
            with pytest.raises(OverloadedError, match="the workers are full") as refused:
                await cluster.generate("d", PROMPT, greedy())
            assert refused.value.retry_after_s == 10 * HANGS_S
        assert [tokens_of(await other) for other in others] == [llama.local(PROMPT, greedy()).tokens] * 2


async def test_a_request_that_no_worker_holds_is_refused_for_good(llama: SmallModel) -> None:
    async with cluster_of(llama, decode_engine={"kv_blocks": 12}) as cluster:
        for length in (169, 192, 300):
            with pytest.raises(RequestTooLargeError):
                await cluster.generate(f"r{length}", [5] * length, greedy(24))
        assert len(await tokens(cluster, "fits", [5] * 168, greedy(24))) == 24


async def test_the_gateway_is_told_how_much_of_a_hand_off_was_exposed(llama: SmallModel) -> None:
    """Once for each attempt that decode verified, and not for one that ends with its first token."""
    async with cluster_of(llama) as cluster:
        decode, prefill = [await cluster.connect(w) for w in (cluster.decodes[0], cluster.prefills[0])]
        began = time.monotonic()
        heard: list[HandedOver] = []
        for name, params in (("short", greedy(1)), ("long", greedy(3))):
            request = RequestSpec(request_id=name, attempt=4, prompt_token_ids=PROMPT, params=params)
            await decode.send(Reserve(request=request))
            reserved = await decode.receive()
            assert isinstance(reserved, Reserved)
            await prefill.send(Start(request=request, ticket=reserved.ticket))
            if name == "short":
                await _next(prefill, lambda frame: frame.tokens)
                await decode.send(Cancel(request_id=name, attempt=4))
            else:
                heard += (await _next(prefill, lambda frame: frame.handoffs)).handoffs
                await _next(decode, lambda frame: frame.tokens and frame.tokens[-1].finish_reason)
        assert [(handoff.request_id, handoff.attempt) for handoff in heard] == [("long", 4)]
        assert 0 < heard[0].exposed_s < time.monotonic() - began
        for connection in (decode, prefill):
            connection.close("the test is over")


async def _next(worker: Connection, is_it: Callable[[StepFrame], object]) -> StepFrame:
    """The first frame of which that is so; there is no hand-off in those before it."""
    async with asyncio.timeout(HANGS_S):
        while True:
            message = await worker.receive()
            if isinstance(message, StepFrame):
                if is_it(message):
                    return message
                assert not message.handoffs
