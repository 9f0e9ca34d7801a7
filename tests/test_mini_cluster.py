"""Whole requests through gateway, scheduler, prefill and decode, without Ray: exact tokens, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager, suppress
from typing import Any

import pytest

from cluster.errors import DeadlineError, FailedError, OverloadedError, RequestTooLargeError
from cluster.global_scheduler import SchedulerPolicy
from cluster.orchestrator import OrchestratorConfig
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.pending_output import PendingOutput
from engine.prepared_step import PreparedStep
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import StepPlan
from kv_transfer.messages import TokenEvent
from kv_transfer.transfer_config import TransferConfig
from prefill_workers.worker import PrefillWorkerConfig
from tests.mini_cluster import Brake, MiniCluster, brake, cluster_of
from tests.small_models import SmallModel, greedy, random_prompts
from tests.waiting import HANGS_S, eventually

PROMPT = random_prompts([150], seed=7)[0]
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 129, 200)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("llama"))


def tokens_of(events: list[TokenEvent]) -> list[int]:
    """The tokens, each of which must have come once and in order, and the last one as such."""
    assert [event.index for event in events] == list(range(len(events)))
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    return [event.token_id for event in events]


async def tokens(cluster: MiniCluster, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
    return tokens_of(await cluster.generate(name, prompt, params))


# --- exact tokens ---


@pytest.mark.parametrize(
    ("transport", "blocks", "layers", "chunk_tokens", "slab_bytes"),
    [
        ("shm", (16, 16), (None, None), 512, 4 * 2**20),
        ("tcp", (16, 16), (None, None), 64, 4 * 2**20),
        ("shm", (8, 32), (1, 2), 64, 7 * 256),
        ("tcp", (5, 3), (2, 3), 33, 10 * 256),
        ("gloo", (16, 8), (1, 3), 40, 9 * 256),
        ("auto", (32, 8), (4, 1), 50, 1),
    ],
)
async def test_tokens_are_those_of_one_machine_and_of_hugging_face(
    llama: SmallModel,
    transport: str,
    blocks: tuple[int, int],
    layers: tuple[int | None, int | None],
    chunk_tokens: int,
    slab_bytes: int,
) -> None:
    """Whatever the bytes travel by and the blocks at both ends, in several chunks and slabs (256 bytes a token)."""
    async with cluster_of(
        llama,
        prefill_engine={"block_size": blocks[0], "layers_per_group": layers[0], "kv_blocks": 2000},
        decode_engine={"block_size": blocks[1], "layers_per_group": layers[1], "kv_blocks": 2000},
        prefill=PrefillWorkerConfig(chunk_tokens=chunk_tokens, max_slab_bytes=slab_bytes),
        transfer=TransferConfig(transport=transport),  # type: ignore[arg-type]
    ) as cluster:
        prompts = random_prompts(LENGTHS)
        together = await asyncio.gather(*(tokens(cluster, f"r{n}", p, greedy()) for n, p in enumerate(prompts)))
        for prompt, found in zip(prompts, together, strict=True):
            assert found == llama.local(prompt, greedy()).tokens == llama.hugging_face(prompt, 24)


@pytest.mark.parametrize("family", ["mistral", "qwen2-windowed", "gemma3"])
async def test_sliding_windows_survive_the_hand_off(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = SmallModel(family, tmp_path_factory.mktemp(family))
    async with cluster_of(
        model, decode_engine={"block_size": 4}, prefill=PrefillWorkerConfig(chunk_tokens=20)
    ) as cluster:
        for n, prompt in enumerate(random_prompts((5, 70, 140))):
            found = await tokens(cluster, f"r{n}", prompt, greedy())
            assert found == model.local(prompt, greedy()).tokens == model.hugging_face(prompt, 24)


async def test_a_cached_prefix_is_reported_and_handed_over(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        for n, (prompt, cached) in enumerate([(PROMPT, 0), (PROMPT, 144), (PROMPT[:100] + [5] * 30, 96)]):
            events = await cluster.generate(f"r{n}", prompt, greedy())
            assert events[0].num_cached_tokens == cached
            assert tokens_of(events) == llama.local(prompt, greedy()).tokens
        assert cluster.prefills[0]._scheduler.num_uncomputed_tokens == 0
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
            assert cluster.prefills[0]._steps.rates.prefill_tokens_per_s > 0


async def test_without_prefill_workers_decode_computes_prompts(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=0, decode=DecodeWorkerConfig(token_budget=40)) as cluster:
        prompts = random_prompts(LENGTHS)
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
        assert all(worker._steps.rates.prefill_tokens_per_s > 0 for worker in cluster.prefills)
        assert all(worker._steps.rates.decode_step_s > 0 for worker in cluster.decodes)


# --- sampling ---


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=24, seed=seed, temperature=0.9, top_p=0.95, presence_penalty=0.5, ignore_eos=True)


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
        assert cluster.decodes[0]._scheduler.num_preemptions > 0
        assert found == [llama.local(p, sampled(n)).tokens for n, p in enumerate(prompts)]


async def test_a_seed_gives_the_same_tokens_after_a_decode_s_death(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        found = await interrupted(cluster, sampled(9), 7, lambda: cluster.remove(busy(cluster)))
        assert found == llama.local(PROMPT, sampled(9)).tokens


# --- ends and cancels ---


async def test_a_request_that_ends_with_its_first_token_frees_its_reservation(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        expected = llama.local(PROMPT, greedy(1)).tokens
        assert await tokens(cluster, "r0", PROMPT, greedy(1)) == expected
        await cluster.idle()
        events = await cluster.generate("r1", PROMPT, greedy(9, stop_token_ids=tuple(expected)))
        assert (tokens_of(events), events[0].finish_reason) == (expected, "stop")


@pytest.mark.parametrize("after", [0, 1, 2, 10])
async def test_a_stream_that_is_closed_frees_everything(llama: SmallModel, after: int) -> None:
    """After so many tokens; before the first one it has not even begun."""
    async with cluster_of(llama) as cluster:
        async with aclosing(cluster.stream("r", PROMPT, greedy(80))) as events:
            for _ in range(after):
                await anext(events)
        await cluster.idle()
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_a_cancel_while_the_prompt_is_computed_frees_everything(llama: SmallModel) -> None:
    """Some of its slabs have arrived, the step goes on meanwhile."""
    async with cluster_of(llama, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        with brake(cluster.prefills[0]._model.runner, starts_beyond(100)) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            await cancel(request)
            await eventually(lambda: cluster.models[1].block_pool.num_leases == 0)
        await cluster.idle()
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_a_cancel_while_decode_is_in_a_step_frees_everything(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        with brake(cluster.decodes[0]._model.runner) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            await cancel(request)


async def test_a_cancel_while_the_reservation_waits_leaves_nothing_waiting(llama: SmallModel) -> None:
    async with cluster_of(llama, decode_engine={"kv_blocks": 12}) as cluster:
        with brake(cluster.prefills[0]._model.runner):
            first, second = (asyncio.create_task(cluster.generate(name, PROMPT, greedy())) for name in "ab")
            await eventually(lambda: cluster.decodes[0]._landings.num_waiting)
            await cancel(second)
            await eventually(lambda: not cluster.decodes[0]._landings.num_waiting)
        assert tokens_of(await first) == llama.local(PROMPT, greedy()).tokens


@pytest.mark.parametrize("which", ["the reservation", "the first in the queue"])
async def test_who_waits_for_blocks_comes_in_as_soon_as_a_cancel_frees_them(llama: SmallModel, which: str) -> None:
    """Also while no step is going on that would have a look at the queue when it ends.

    `a` holds 10 of 12 blocks while prefill computes; `b` wants 3 and waits at decode, `c` wants 1 and waits behind it.
    """
    async with cluster_of(
        llama, decode_engine={"kv_blocks": 12}, policy=SchedulerPolicy(local_prefill_below=50)
    ) as cluster:
        with brake(cluster.prefills[0]._model.runner) as held:
            lengths = {"a": 150, "b": 48, "c": 7}
            requests = {}
            for name, length in lengths.items():
                requests[name] = asyncio.create_task(cluster.generate(name, PROMPT[:length], greedy(5)))
                await (held.reached() if name == "a" else eventually(lambda: waiting(cluster) == len(requests) - 1))
            cancelled, next_one = ("a", "b") if which == "the reservation" else ("b", "c")
            await cancel(requests.pop(cancelled))
            found = await asyncio.wait_for(requests.pop(next_one), HANGS_S)
            assert tokens_of(found) == llama.local(PROMPT[: lengths[next_one]], greedy(5)).tokens
            held.release()
            await asyncio.gather(*requests.values())


async def test_a_gateway_s_death_frees_everything(llama: SmallModel) -> None:
    """Requests of every phase: decoding, in a prefill step, reserved, and waiting for a reservation."""
    async with cluster_of(
        llama, decode_engine={"kv_blocks": 30}, prefill=PrefillWorkerConfig(chunk_tokens=64)
    ) as cluster:
        gateway = cluster.orchestrator
        decoding = cluster.stream("decoding", PROMPT[:20], greedy(200))
        await anext(decoding)
        await anext(decoding)
        with brake(cluster.prefills[0]._model.runner) as held:
            others = [asyncio.create_task(cluster.generate(f"r{n}", PROMPT, greedy())) for n in range(5)]
            await held.reached()
            await eventually(lambda: cluster.decodes[0]._landings.num_waiting)
            await gateway.stop()
        await cluster.idle()
        await cancel(*others)
        await decoding.aclose()
        cluster.orchestrator = cluster.new_orchestrator()
        cluster.orchestrator.start()
        await cluster.ready()
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_many_requests_of_which_a_third_is_cancelled_at_any_moment(llama: SmallModel) -> None:
    """Too little memory for all, so that some wait and some are preempted."""
    async with cluster_of(
        llama,
        num_prefill=2,
        num_decode=2,
        prefill=PrefillWorkerConfig(chunk_tokens=48),
        decode=DecodeWorkerConfig(reserve_wait_s=HANGS_S),
        decode_engine={"kv_blocks": 40, "block_size": 8},
    ) as cluster:
        await cancel_a_third(cluster, llama, num_requests=100, at_once=16)


# --- room ---


async def test_a_reservation_waits_for_room_and_is_granted(llama: SmallModel) -> None:
    async with cluster_of(llama, decode_engine={"kv_blocks": 12}) as cluster:
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT, greedy()) for n in range(4)))
        assert found == [llama.local(PROMPT, greedy()).tokens] * 4


async def test_a_reservation_that_finds_no_room_in_time_is_refused(llama: SmallModel) -> None:
    async with cluster_of(
        llama, decode_engine={"kv_blocks": 12}, decode=DecodeWorkerConfig(reserve_wait_s=0.2)
    ) as cluster:
        with brake(cluster.decodes[0]._model.runner) as held:
            first = asyncio.create_task(cluster.generate("a", PROMPT, greedy()))
            await held.reached()
            with pytest.raises(OverloadedError, match="no room") as refused:
                await cluster.generate("b", PROMPT, greedy())
            assert refused.value.retry_after_s == 0.2
        assert tokens_of(await first) == llama.local(PROMPT, greedy()).tokens


async def test_a_request_that_no_worker_holds_is_refused_for_good(llama: SmallModel) -> None:
    async with cluster_of(llama, decode_engine={"kv_blocks": 12}) as cluster:
        for length in (169, 192, 300):
            with pytest.raises(RequestTooLargeError):
                await cluster.generate(f"r{length}", [5] * length, greedy(24))
        assert len(await tokens(cluster, "fits", [5] * 168, greedy(24))) == 24


# --- deaths and failures ---


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_a_prefill_s_death_in_the_middle_of_a_hand_off_is_not_noticed(
    llama: SmallModel, num_prefill: int
) -> None:
    """Another one computes the prompt under the same reservation; or decode itself, if there is none."""
    async with cluster_of(llama, num_prefill=num_prefill, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        dying = cluster.prefills[0]
        with prefills_braked(cluster) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            dying = next(w for w, one in zip(cluster.prefills, held, strict=True) if one.holding.is_set())
            death = asyncio.create_task(cluster.remove(dying))
            await asyncio.sleep(0)
            for one in held:
                one.release()
            await death
            assert tokens_of(await request) == llama.local(PROMPT, greedy()).tokens


@pytest.mark.parametrize("after", [1, 2, 12])
async def test_a_decode_s_death_is_not_noticed(llama: SmallModel, after: int) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        found = await interrupted(cluster, greedy(40), after, lambda: cluster.remove(busy(cluster)))
        assert found == llama.local(PROMPT, greedy(40)).tokens


async def test_a_request_waits_for_the_successor_of_the_only_decode_worker(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:

        async def replace() -> None:
            await cluster.remove(cluster.decodes[0])
            asyncio.get_running_loop().call_later(0.4, lambda: asyncio.ensure_future(cluster.add_decode()))

        assert await interrupted(cluster, greedy(40), 5, replace) == llama.local(PROMPT, greedy(40)).tokens
        assert len(cluster.decodes) == 1


async def test_requests_are_placed_without_a_scheduler_and_by_its_successor(llama: SmallModel) -> None:
    expected = llama.local(PROMPT, greedy()).tokens
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        found = await interrupted(cluster, greedy(), 4, cluster.scheduler.stop)
        assert found == expected
        await eventually(lambda: cluster.orchestrator._scheduler._connection is None)
        alone = await asyncio.gather(*(tokens(cluster, f"alone{n}", PROMPT, greedy()) for n in range(8)))
        assert alone == [expected] * 8
        await cluster.start_scheduler()
        for n in range(20):  # across the moment when the new scheduler knows the gateway and no worker yet
            assert await tokens(cluster, f"again{n}", PROMPT, greedy()) == expected
            assert cluster.orchestrator.limits() is not None
        await eventually(lambda: len(cluster.scheduler._scheduler.replicas().workers) == 4)


async def test_without_a_scheduler_dead_workers_are_not_waited_for(llama: SmallModel) -> None:
    expected = llama.local(PROMPT, greedy()).tokens
    patient = OrchestratorConfig(link_timeout_s=2 * HANGS_S)
    async with cluster_of(llama, num_prefill=2, num_decode=2, orchestrator=patient) as cluster:
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator._scheduler._connection is None)
        assert await interrupted(cluster, greedy(), 4, lambda: cluster.remove(busy(cluster))) == expected
        await cluster.remove(cluster.prefills[0])
        for n in range(8):
            assert await asyncio.wait_for(tokens(cluster, f"r{n}", PROMPT, greedy()), HANGS_S) == expected


async def test_a_hung_decode_s_requests_go_on_elsewhere(llama: SmallModel) -> None:
    """Its event loop answers, its device does not."""
    config = OrchestratorConfig(stall_s=0.3)
    async with cluster_of(llama, num_decode=2, orchestrator=config) as cluster, AsyncExitStack() as stack:
        ballast = await stack.enter_async_context(aclosing(cluster.stream("ballast", PROMPT[:9], greedy(200))))
        await anext(ballast)
        await anext(ballast)
        chosen = next(worker for worker in cluster.decodes if not worker._gateway_of)

        async def hang() -> None:
            assert chosen._gateway_of, "it was placed where there was less to do, and would be again"
            stack.enter_context(brake(chosen._model.runner))

        found = await asyncio.wait_for(interrupted(cluster, greedy(40), 5, hang), HANGS_S)
        assert found == llama.local(PROMPT, greedy(40)).tokens


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_step_that_fails_costs_another_attempt_and_no_token(llama: SmallModel, role: str) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        for worker in cluster.prefills if role == "prefill" else cluster.decodes:
            fail_once(worker._model.runner)
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT[n:], greedy()) for n in range(4)))
        assert found == [llama.local(PROMPT[n:], greedy()).tokens for n in range(4)]
        assert all(worker.healthy for worker in cluster.workers)


async def test_a_reservation_whose_prefill_falls_silent_lapses_and_the_request_goes_on(llama: SmallModel) -> None:
    # Long enough that the other worker's own keep-alives come in time on a busy machine.
    config = DecodeWorkerConfig(lease_ttl_s=1.5)
    async with cluster_of(llama, num_prefill=2, decode=config, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        with prefills_braked(cluster) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            silent = next(w for w, one in zip(cluster.prefills, held, strict=True) if one.holding.is_set())
            silent._sender.stop()  # its keep-alives
            next(one for one in held if not one.holding.is_set()).release()
            await eventually(lambda: request.done() or cluster.orchestrator._runs["r"].attempt > 0)
            for one in held:  # the next attempt may be the silent one's again
                one.release()
            found = await asyncio.wait_for(request, HANGS_S)
            assert tokens_of(found) == llama.local(PROMPT, greedy()).tokens


async def test_a_request_ends_at_its_deadline(llama: SmallModel) -> None:
    async with cluster_of(llama, orchestrator=OrchestratorConfig(request_deadline_s=0.3)) as cluster:
        with brake(cluster.prefills[0]._model.runner), pytest.raises(DeadlineError, match="within"):
            await cluster.generate("r", PROMPT, greedy())


async def test_a_request_that_fails_everywhere_fails(llama: SmallModel) -> None:
    config = OrchestratorConfig(max_attempts=3, retry_delay_s=0.01)
    async with cluster_of(llama, orchestrator=config) as cluster:
        runner = cluster.decodes[0]._model.runner
        with broken(runner), pytest.raises(FailedError, match="3 times"):
            await cluster.generate("r", PROMPT, greedy())
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


# --- drain ---


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(llama: SmallModel, role: str) -> None:
    expected = llama.local(PROMPT, greedy()).tokens
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        worker = cluster.prefills[0] if role == "prefill" else cluster.decodes[0]
        with brake(worker._model.runner) as held:
            before = [asyncio.create_task(cluster.generate(f"r{n}", PROMPT, greedy())) for n in range(4)]
            await held.reached()
            drain = asyncio.create_task(worker.drain(HANGS_S))
            await eventually(lambda: sees_draining(cluster))
            num_held = len(worker._gateway_of)
            during = [asyncio.create_task(cluster.generate(f"d{n}", PROMPT, greedy())) for n in range(4)]
            assert [tokens_of(await request) for request in during] == [expected] * 4
            assert len(worker._gateway_of) == num_held and not drain.done()
        await asyncio.wait_for(drain, HANGS_S)
        assert [tokens_of(await request) for request in before] == [expected] * 4
        assert not worker._gateway_of


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_placed_on_a_worker_that_begins_to_drain_goes_elsewhere(llama: SmallModel, role: str) -> None:
    """Before the scheduler hears of it: no client is turned away because a worker is being replaced."""
    expected = llama.local(PROMPT, greedy()).tokens
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        worker = cluster.prefills[0] if role == "prefill" else cluster.decodes[0]
        await worker.drain(0.0)
        assert not sees_draining(cluster)
        assert await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT, greedy()) for n in range(4))) == [expected] * 4
        assert not worker._gateway_of


async def test_a_worker_whose_last_sequence_fails_is_drained(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        for worker in cluster.decodes:
            fail_once(worker._model.runner)
        with brake(cluster.prefills[0]._model.runner) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            worker = busy(cluster)
            drain = asyncio.create_task(worker.drain(HANGS_S))
            await asyncio.sleep(0)
        await asyncio.wait_for(drain, HANGS_S)
        assert tokens_of(await request) == llama.local(PROMPT, greedy()).tokens


# --- helpers ---


def busy(cluster: MiniCluster) -> DecodeWorker:
    return next(worker for worker in cluster.decodes if worker._gateway_of)


def waiting(cluster: MiniCluster) -> int:
    return sum(worker._scheduler.num_waiting for worker in cluster.decodes)


def sees_draining(cluster: MiniCluster) -> bool:
    """Whether the scheduler has heard of it."""
    return any(snapshot.draining for _, snapshot in cluster.scheduler._scheduler.replicas().workers)


async def cancel_a_third(cluster: MiniCluster, model: SmallModel, *, num_requests: int, at_once: int) -> None:
    """Of prompts of up to 120 tokens, at any moment; the others bring the tokens that one engine brings."""
    chooser = random.Random(3)
    slots = asyncio.Semaphore(at_once)

    async def one(number: int, length: int, patience_s: float | None) -> None:
        prompt, params = random_prompts([length], seed=number)[0], sampled(number)
        async with slots:
            request = asyncio.create_task(cluster.generate(f"r{number}", prompt, params))
            await asyncio.wait({request}, timeout=patience_s)
            if patience_s is None:
                assert tokens_of(request.result()) == model.local(prompt, params).tokens
            else:
                await cancel(request)

    await asyncio.gather(
        *(
            one(n, chooser.randint(1, 120), chooser.uniform(0.0, 0.2) if n % 3 == 0 else None)
            for n in range(num_requests)
        )
    )


async def cancel(*requests: asyncio.Task[Any]) -> None:
    for request in requests:
        request.cancel()
    for request in requests:
        with suppress(asyncio.CancelledError):
            await request


async def interrupted(
    cluster: MiniCluster, params: SamplingParams, after: int, interrupt: Callable[[], Awaitable[object]]
) -> list[int]:
    """The tokens of a request that is interrupted after so many of them."""
    found = []
    async with aclosing(cluster.stream("interrupted", PROMPT, params)) as events:
        async for event in events:
            found.append(event)
            if len(found) == after:
                await interrupt()
    return tokens_of(found)


def starts_beyond(position: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(item.seq.num_computed + item.num_tokens > position for item in plan.items)


def is_long(num_tokens: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(item.seq.num_tokens > num_tokens for item in plan.items)


@contextmanager
def prefills_braked(cluster: MiniCluster) -> Iterator[list[Brake]]:
    """Before the last chunk of `PROMPT`, when slabs of the others are on their way."""
    with ExitStack() as stack:
        yield [stack.enter_context(brake(worker._model.runner, starts_beyond(100))) for worker in cluster.prefills]


@contextmanager
def broken(runner: ModelRunner) -> Iterator[None]:
    """Every step fails."""
    run = runner.run

    def failing(step: PreparedStep, *hooks: object) -> PendingOutput:
        raise RuntimeError("the device is broken")

    runner.run = failing  # type: ignore[method-assign,assignment]
    yield
    runner.run = run  # type: ignore[method-assign]


def fail_once(runner: ModelRunner) -> None:
    """The runner's first step fails, after some of its layers."""
    run = runner.run

    def failing(step: PreparedStep, on_layer: Callable[[int], None] | None = None, *hooks: object) -> PendingOutput:
        runner.run = run  # type: ignore[method-assign]
        if on_layer is not None:
            on_layer(0)
            on_layer(1)
        raise RuntimeError("the device has hiccuped")

    runner.run = failing  # type: ignore[method-assign,assignment]
