"""The simulated cluster against arithmetic by hand, and its promises: determinism, exact fast-forward, empty pools."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest.mock import ANY

import pytest

from cluster.__main__ import main
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.records import Gaps
from cluster.simulation.routers.base import PlacedRequest, turned_away
from cluster.simulation.routers.baselines import QueueLengthRouter, RoundRobin
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, simulate
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.prompts import content_hashes
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.fit import scaled
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.scheduling import Place, Placement, Queued, Unplaceable
from kv_transfer.messages.workers import WorkerSnapshot
from tests.support.thoroughness import THOROUGH

COST = StepCost(base_s=0.004, prefill_token_s=3e-5, prefill_pair_s=1e-9, decode_s=2e-5, context_token_s=4e-8)
SHAPE = WorkerShape(
    cost=COST, kv_tokens=64_000, token_budget=1024, block_size=32, handoff_s=0.002, handoff_token_s=1e-6
)
CONFIG = SimulationConfig(num_prefill=2, num_decode=2, prefill=SHAPE, decode=SHAPE, message_s=0.001)
WORKLOAD = Workload(
    requests_per_s=4.0,
    num_requests=120 if THOROUGH else 60,
    burstiness=3.0,
    turn=LogNormal(median=900, sigma=1.0, most=6000),
)


class DecodeOnlyRouter(QueueLengthRouter):
    """The one decode worker computes everything."""

    def choose(self, query: Place, now: float) -> PlacedRequest:
        return PlacedRequest(query, None, self.decodes[0])


def one(prompt_tokens: int, output_tokens: int, request_id: str = "r0", arrival_s: float = 1.0) -> TraceRequest:
    return TraceRequest(
        request_id=request_id, arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )


def prefill_s(*chunks: tuple[int, int]) -> float:
    """Of chunks of (tokens, tokens before them)."""
    return sum(COST.base_s + 3e-5 * n + 1e-9 * (n * cached + n * (n + 1) / 2) for n, cached in chunks)


def decode_s(contexts: range) -> float:
    return sum(COST.base_s + 2e-5 + 4e-8 * context for context in contexts)


def test_a_lone_request_takes_as_long_as_by_hand() -> None:
    [record] = simulate(CONFIG, [one(2500, 100)], QueueLengthRouter()).records
    assert record.ttft_s == pytest.approx(6 * 0.001 + prefill_s((1024, 0), (1024, 1024), (452, 2048)), rel=1e-12)
    # The last chunk's slab is exposed, then 99 steps attend to 2501 to 2599 tokens.
    exposed = 0.002 + 452 * 1e-6
    assert record.tpot_s == pytest.approx((exposed + decode_s(range(2501, 2600))) / 99, rel=1e-12)
    assert record.e2e_s == pytest.approx((record.ttft_s or 0) + 99 * (record.tpot_s or 0), rel=1e-12)


def test_a_lone_request_computed_by_decode_alone() -> None:
    [record] = simulate(replace(CONFIG, num_prefill=0), [one(1500, 10)], DecodeOnlyRouter()).records
    assert record.ttft_s == pytest.approx(4 * 0.001 + prefill_s((1024, 0), (476, 1024)), rel=1e-12)
    assert record.tpot_s == pytest.approx(decode_s(range(1501, 1510)) / 9, rel=1e-12)
    assert (record.prefill, record.decode) == (None, "decode-0")


def test_every_gap_counts_the_hand_off_and_what_is_computed_beside_it() -> None:
    """The first gap of a request that is handed over holds the exposed part; on one worker that does not size its steps
    1,024 tokens of another's prompt stall the request that decodes there once."""
    [handed_over] = simulate(CONFIG, [one(1024, 5)], QueueLengthRouter()).records
    steps = [decode_s(range(context, context + 1)) for context in range(1025, 1029)]
    assert handed_over.gaps.num == 4
    assert handed_over.gaps.longest_s == pytest.approx(0.002 + 1024 * 1e-6 + steps[0], rel=1e-9)
    slo = SloConfig(classes=(SloClass(name="fast", gap_s=0.02), SloClass(name="lax", gap_s=1.0)), default="fast")
    sized = replace(CONFIG, num_prefill=0, num_decode=1, slo=slo)
    requests = [one(100, 150), replace(one(1000, 2, "r1", 1.2), slo_class="lax")]
    kept = simulate(sized, requests, DecodeOnlyRouter()).records[0]
    assert 0.015 < kept.gaps.longest_s <= 0.02, "workers size their steps by what was promised"
    config = replace(sized, promises_steps=False)
    stalled, other = simulate(config, requests, DecodeOnlyRouter()).records
    beside = prefill_s((1000, 0)) + 2e-5  # and its own token, at some context
    assert stalled.gaps.longest_s == pytest.approx(beside, rel=1e-3)
    assert stalled.gaps.num == 149 and stalled.gaps.p99_s <= 0.02, "one of them is late, which may be"
    assert stalled.is_met and other.is_met
    twice = [*requests, replace(one(1000, 2, "r2", 1.3), slo_class="lax")]
    stalled = simulate(config, twice, DecodeOnlyRouter()).records[0]
    assert stalled.gaps.p99_s == pytest.approx(beside, rel=1e-3) and not stalled.is_met
    kept = simulate(sized, twice, DecodeOnlyRouter()).records[0]
    assert kept.gaps.longest_s <= 0.02 and kept.is_met


@pytest.mark.parametrize("num_gaps", [1, 99, 100, 101, 700])
def test_the_p99_of_gaps_is_in_time_where_the_promise_is_kept(num_gaps: int) -> None:
    for num_late in range(9):
        late = min(num_late, num_gaps)
        times = list(accumulate([0.02] * (num_gaps - late) + [0.08] * late, initial=0.0))
        assert (Gaps.between(times).p99_s <= 0.05) is (late * 100 <= num_gaps)
    assert Gaps.between([1.0]) == Gaps()


def test_one_token_ends_with_prefill() -> None:
    [record] = simulate(CONFIG, [one(500, 1)], QueueLengthRouter()).records
    assert record.end_s == record.first_token_s
    assert record.tpot_s is None


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    first = TraceRequest(
        request_id="a", arrival_s=0.0, prompt_tokens=2048, output_tokens=4, content=(1, 2, 3, 4), content_tokens=512
    )
    second = replace(first, request_id="b", arrival_s=5.0, content=(1, 2, 9, 4))
    config = replace(CONFIG, num_prefill=1, num_decode=1)
    records = simulate(config, [first, second], QueueLengthRouter()).records
    assert [record.cached_tokens for record in records] == [0, 1024]
    assert records[1].ttft_s == pytest.approx(6 * 0.001 + prefill_s((1024, 1024)), rel=1e-12)


def test_a_burst_behind_one_text_is_served_as_the_scheduler_foretells_what_its_workers_find() -> None:
    """A worker computes all of a prompt in 0.15 s: by that two on each would be in time."""
    slo = SloConfig(classes=(SloClass(name="fast", ttft_s=0.5, tpot_s=0.1),), default="fast")
    config = replace(CONFIG, num_prefill=1, num_decode=1, slo=slo)
    burst = [
        replace(one(4196, 4, f"r{n}", 1.0 + n / 1000), content=(*range(8), 100 + n), content_tokens=512)
        for n in range(12)
    ]
    router = LegatoRouter()
    records = simulate(config, burst, router).records
    assert all(record.is_met and not record.num_rejections for record in records)
    foretold = {one.request.request_id: one.verdict.decision.best for one in router.log.newest(1000)}
    assert {r.request_id: r.cached_tokens for r in records} == {n: row.cached_tokens for n, row in foretold.items()}
    assert sum(record.cached_tokens == 0 for record in records) == len({(r.prefill or r.decode) for r in records})
    bare = replace(config, prefill=replace(SHAPE, prefix_caching=False), decode=replace(SHAPE, prefix_caching=False))
    router = LegatoRouter()
    assert any(record.num_rejections for record in simulate(bare, burst, router).records)
    assert all(one.verdict.decision.best.cached_tokens == 0 for one in router.log.newest(1000)), "nothing is kept"


def played(config: SimulationConfig, seed: int = 5) -> SimulationResult:
    return simulate(config, draw_requests(WORKLOAD, seed), QueueLengthRouter())


def test_the_same_seed_gives_the_same_records() -> None:
    assert played(CONFIG) == played(CONFIG)
    assert played(CONFIG) != played(CONFIG, seed=6)


def test_noise_is_of_its_seed_and_has_mean_1() -> None:
    noisy = replace(CONFIG, decode=replace(SHAPE, step_noise=0.2))
    request = [one(1000, 1022)]
    [plain] = simulate(CONFIG, request, QueueLengthRouter()).records
    [first, again, other] = [
        simulate(config, request, QueueLengthRouter()).records[0] for config in (noisy, noisy, replace(noisy, seed=9))
    ]
    assert first == again
    assert first.end_s != other.end_s
    assert first.tpot_s == pytest.approx(plain.tpot_s, rel=0.02)
    assert first.ttft_s == plain.ttft_s


@pytest.mark.parametrize(("kv_tokens", "is_short"), [(64_000, False), (8_000, True)])
def test_fast_forward_changes_no_bit(kv_tokens: int, is_short: bool) -> None:
    """Also where sequences are preempted for lack of blocks."""
    decode = replace(SHAPE, kv_tokens=kv_tokens, step_noise=0.1)
    quick = played(replace(CONFIG, decode=decode))
    assert quick == played(replace(CONFIG, decode=replace(decode, fast_forward=False)))
    assert (quick.summary.num_preemptions > 0) is is_short


class Recorder(QueueLengthRouter):
    """Notes who is told what and when; turns requests away before `opens_at`."""

    def __init__(self, opens_at: float = 0.0) -> None:
        super().__init__()
        self._opens_at = opens_at
        self.beats: list[tuple[str, float]] = []
        self.news: list[tuple[str, str]] = []

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> None:
        self.beats.append((snapshot.worker_id, now))
        super().heartbeat(snapshot, now)

    def choose(self, query: Place, now: float) -> PlacedRequest | Unplaceable:
        if now >= self._opens_at:
            return super().choose(query, now)
        return turned_away(query, "not yet", self._opens_at - now)

    def ended(self, request_id: str, now: float, num_output_tokens: int | None) -> None:
        self.news.append((request_id, f"{num_output_tokens} tokens"))
        super().ended(request_id, now, num_output_tokens)

    def first_token(self, request_id: str, now: float) -> None:
        self.news.append((request_id, "first token"))
        super().first_token(request_id, now)


class Splitting(Recorder):
    """Of each prompt that a prefill worker computes, the decode worker computes what is behind the first 1,024
    tokens."""

    def place(self, request: Place, now: float) -> Placement | Unplaceable:
        placement = super().place(request, now)
        assert isinstance(placement, Placement)
        return replace(placement, split_at=1024) if request.num_tokens > 1024 else placement

    def part_computed(self, request_id: str, now: float) -> None:
        self.news.append((request_id, "first part"))


@pytest.mark.parametrize("reserves_late", [False, True])
def test_a_prompt_in_two_parts_takes_their_steps_and_one_hand_over(reserves_late: bool) -> None:
    router = Splitting()
    result = simulate(replace(CONFIG, reserves_late=reserves_late), [one(2500, 20)], router)
    [record] = result.records
    steps_s = prefill_s((1024, 0)) + 0.002 + 1e-6 * 1024 + prefill_s((1024, 1024), (452, 2048))
    assert record.ttft_s == pytest.approx((4 if reserves_late else 6) * 0.001 + steps_s, rel=1e-9)
    assert (record.split_at, record.end_s is not None) == (1024, True)
    assert router.news == [("r0", "first part"), ("r0", "first token"), ("r0", "20 tokens")]


@pytest.mark.parametrize("num_prefill", [2, 0])
def test_a_trace_with_prompts_in_two_parts_is_served_and_leaves_nothing(num_prefill: int) -> None:
    class InParts(LegatoRouter):
        def place(self, request: Place, now: float) -> Placement | Unplaceable | Queued:
            answer = super().place(request, now)
            if not isinstance(answer, Placement) or request.num_tokens <= 64:
                return answer
            other = "decode-0" if answer.decode == "decode-1" else "decode-1"
            return replace(answer, prefill=answer.prefill or other, split_at=request.num_tokens // 64 * 32)

    config = replace(CONFIG, num_prefill=num_prefill, num_decode=2 if num_prefill else 4)
    router = InParts(DecisionPolicy(one_pool=not num_prefill))
    records = simulate(config, draw_requests(WORKLOAD, seed=1), router).records
    assert any(record.split_at for record in records)
    assert all(record.end_s is not None or record.rejected for record in records)
    assert not len(router.ledger)


def test_who_is_turned_away_comes_back_after_retry_after_or_never() -> None:
    [gone] = simulate(CONFIG, [one(100, 5)], Recorder(opens_at=20.0)).records
    assert (gone.num_rejections, gone.rejected, gone.end_s, gone.is_met) == (1, "not yet", None, False)
    assert gone.retry_after_s == pytest.approx(20.0 - 1.001)
    [back] = simulate(replace(CONFIG, max_returns=1), [one(100, 5)], Recorder(opens_at=20.0)).records
    assert (back.num_rejections, back.rejected, back.is_met) == (1, "", True)
    # The client's way there and back lies between the answer and the second arrival.
    assert back.first_arrival_s == 1.0
    assert back.arrival_s == pytest.approx(20.001)
    assert back.ttft_s == pytest.approx(6 * 0.001 + prefill_s((100, 0)), rel=1e-9)


def test_busy_workers_beat_once_a_period_and_idle_ones_once_more() -> None:
    router = Recorder()
    [record] = simulate(CONFIG, [one(2500, 400)], router).records
    assert record.end_s is not None
    times = [now for worker_id, now in router.beats if worker_id == "decode-0"]
    assert times == [0.25 + 0.5 * k for k in range(2, 2 + len(times))]
    assert record.end_s <= times[-1] <= record.end_s + 1.0
    assert {worker_id for worker_id, _ in router.beats} == {"prefill-0", "decode-0"}
    assert router.news == [("r0", "first token"), ("r0", "400 tokens")]


def test_who_watches_hears_of_refusals_first_tokens_and_ends() -> None:
    told: list[tuple[int, bool, bool]] = []
    config = replace(CONFIG, max_returns=1)
    simulate(
        config,
        [one(100, 5)],
        Recorder(opens_at=20.0),
        lambda r: told.append((r.num_rejections, r.first_token_s is not None, r.end_s is not None)),
    )
    assert told == [(1, False, False), (1, True, False), (1, True, True)]


class WaitingRouter(QueueLengthRouter):
    """Everyone waits for the next whole second."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Place] = []
        self._next_at: float | None = None
        self.asked_at: list[float] = []

    def place(self, request: Place, now: float) -> Placement | Unplaceable | Queued:  # type: ignore[override]
        self._waiting.append(request)
        self._next_at = math.ceil(now)
        return Queued(request_id=request.request_id, attempt=request.attempt, within_s=1.0)

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        self.asked_at.append(now)
        waiting, self._waiting, self._next_at = self._waiting, [], None
        return [super(WaitingRouter, self).place(request, now) for request in waiting]

    def next_at(self) -> float | None:
        return self._next_at


def test_who_waits_is_answered_when_the_router_says() -> None:
    router = WaitingRouter()
    requests = [one(1000, 5, "a", 0.25), one(1000, 5, "b", 0.5), one(1000, 5, "c", 3.5)]
    records = simulate(CONFIG, requests, router).records
    assert router.asked_at == [1.0, 4.0]
    assert [record.placed_s for record in records] == [1.002, 1.002, 4.002]
    assert all(record.end_s for record in records)


def test_a_reservation_waits_for_room_and_is_refused_in_the_end() -> None:
    """The pool holds one of the prompts; the second waits until the first one's 300 tokens are out, or for too long. It
    is too long to be kept where prompts are computed."""
    decode = replace(SHAPE, kv_tokens=3200)
    config = replace(CONFIG, num_prefill=1, num_decode=1, prefill=decode, decode=decode)
    requests = [one(2500, 300), one(2500, 3, "r1")]
    first, second = simulate(config, requests, QueueLengthRouter()).records
    assert first.end_s is not None
    assert second.first_token_s is not None
    assert second.first_token_s > first.end_s
    impatient = replace(decode, reserve_wait_s=0.5)
    first, second = simulate(replace(config, decode=impatient), requests, QueueLengthRouter()).records
    assert (first.rejected, second.rejected) == ("", "no room for its KV within 0.5 s")


@pytest.mark.parametrize("reserves_late", [False, True])
def test_memory_that_is_lacking_does_not_hold_up_prompts(reserves_late: bool) -> None:
    """The pool holds one of the prompts: the second is computed meanwhile, and its second token waits for room."""
    decode = replace(SHAPE, kv_tokens=3200)
    config = replace(
        CONFIG,
        num_prefill=1,
        num_decode=1,
        prefill=replace(SHAPE, max_model_len=4096),
        decode=decode,
        reserves_late=reserves_late,
    )
    requests = [one(2500, 300), one(2500, 3, "r1")]
    first, second = simulate(config, requests, QueueLengthRouter()).records
    assert first.end_s is not None
    assert second.first_token_s is not None
    assert second.first_token_s < first.end_s
    assert second.gaps.longest_s > first.end_s - second.first_token_s
    assert second.rejected == ""
    # Who found no room for too long goes on, as its client has a token already.
    impatient = replace(config, decode=replace(decode, reserve_wait_s=0.5))
    again = simulate(impatient, requests, QueueLengthRouter()).records[1]
    assert (again.rejected, again.first_token_s) == ("", second.first_token_s)
    assert again.end_s is not None


def test_memory_that_is_taken_late_may_be_pulled() -> None:
    decode = replace(SHAPE, kv_tokens=3200)
    config = replace(CONFIG, num_prefill=1, num_decode=1, decode=decode)
    requests = [one(2500, 300)]
    pulled = replace(config, reserves_late=True, prefill=replace(SHAPE, pulled_token_s=1e-5))
    late = replace(config, reserves_late=True)
    [first], [slower] = (simulate(each, requests, QueueLengthRouter()).records for each in (late, pulled))
    assert slower.gaps.longest_s == pytest.approx(first.gaps.longest_s + 2500 * 1e-5, rel=1e-9)
    assert slower.ttft_s == first.ttft_s


def test_a_prompt_that_is_too_long_is_refused_for_good() -> None:
    config = replace(CONFIG, decode=replace(SHAPE, kv_tokens=320), max_returns=5)
    [record] = simulate(config, [one(320, 3)], DecodeOnlyRouter()).records
    assert (record.num_rejections, record.retry_after_s) == (1, None)
    assert record.rejected == "320 tokens leave no room in 320"


def test_the_summary_counts_who_was_served_in_time() -> None:
    slo = SloConfig(classes=(SloClass(name="fast", ttft_s=0.1, tpot_s=0.05), SloClass(name="slow")), default="fast")
    requests = [
        one(1000, 11, "a", 0.0),  # in time
        one(8000, 11, "b", 1.0),  # late
        replace(one(8000, 11, "c", 2.0), slo_class="slow"),
        one(1000, 11, "d", 4.0),
    ]
    result = simulate(replace(CONFIG, slo=slo), requests, QueueLengthRouter())
    overall, fast, slow = result.summary.classes
    assert [summary.name for summary in result.summary.classes] == ["all", "fast", "slow"]
    assert (overall.attainment, fast.attainment, slow.attainment) == (3 / 4, 2 / 3, 1.0)
    assert (overall.goodput, fast.goodput) == (3 / 4.0, 2 / 4.0)
    assert fast.gap.p50 == pytest.approx(decode_s(range(1005, 1006)), rel=0.015)
    assert fast.ttft.p50 == pytest.approx(6 * 0.001 + prefill_s((1000, 0)))
    assert 0 < result.summary.utilisation["prefill"] < 0.5
    assert json.loads(json.dumps(result.summary.as_json()))["classes"][1]["name"] == "fast"
    assert len({len(line) for line in result.summary.text().splitlines()[:4]}) == 1, (
        "a line for each class, below the heads"
    )


def test_the_command_prints_a_table_or_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 5, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]}\n' * 3)
    options = ["--prefill", "2", "--decode", "2", "--trace", str(trace), "--router", "legato", "--router", "mooncake"]
    options += ["--gap-ms", "50"]
    monkeypatch.setattr(sys, "argv", ["cluster", "simulate", *options])
    assert main() == 0
    assert "Mooncake: 0.00 requests/s offered" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["cluster", "simulate", *options, "--format", "azure"])
    assert main() == 1
    assert "is no request in Azure's format" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["cluster", "simulate", "--model", "llama-3.1-70b"])
    assert main() == 1
    assert "use more devices" in capsys.readouterr().err


# --- workers that differ ---


def test_a_pool_of_different_devices() -> None:
    """Each takes the time and has the room that are its own, and reports them: Legato sends more to who is faster."""
    slow = replace(SHAPE, cost=scaled(COST, 4.0), kv_tokens=6400)
    mixed = replace(CONFIG, shapes={"prefill-1": slow, "decode-0": slow})
    requests = [one(1000, 11, f"r{n}", 4.0 * n) for n in range(4)]
    records = simulate(mixed, requests, RoundRobin()).records
    quick, slower = 6 * 0.001 + prefill_s((1000, 0)), 6 * 0.001 + 4 * prefill_s((1000, 0))
    assert [record.ttft_s for record in records] == pytest.approx([quick, slower] * 2, rel=1e-9)
    assert [record.tpot_s for record in records[:2]] == pytest.approx(
        [(0.002 + 1e-3 + factor * decode_s(range(1001, 1011))) / 10 for factor in (4, 1)], rel=1e-9
    )
    [too_long] = simulate(mixed, [one(7000, 3)], RoundRobin()).records
    assert too_long.rejected == "7000 tokens leave no room in 6400"
    placed = simulate(mixed, draw_requests(WORKLOAD, 5), LegatoRouter()).records
    by_worker = Counter(record.prefill for record in placed)
    assert by_worker["prefill-0"] > 2 * by_worker["prefill-1"]
    with pytest.raises(ValueError, match="there is no worker decode-7"):
        replace(CONFIG, shapes={"decode-7": slow})
    with pytest.raises(ValueError, match="the same block size"):
        replace(CONFIG, shapes={"decode-0": replace(SHAPE, block_size=16)})


def test_the_command_plays_mixed_pools_and_shared_links(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["cluster", "simulate", "--requests", "8", "--json", *options])
        rc = main()
        return rc, "".join(capsys.readouterr())

    plain = play()
    assert play("--worker", "decode-0=h100") == plain
    assert json.loads(play("--worker", "decode-0=l40s")[1])["classes"][0]["tpot"]["p50"] > 0.02
    wide, narrow = (
        json.loads(play("--share-links", "--link-gb-per-s", rate)[1])["classes"][0] for rate in ("50", "0.5")
    )
    assert narrow["tpot"]["p99"] > 1.1 * wide["tpot"]["p99"]
    assert play("--worker", "decode-0") == (1, ANY)
    assert "as in decode-2=l40s" in play("--worker", "decode-0=tpu")[1]


# --- host memory ---


def test_what_the_device_had_to_give_up_comes_back_from_host_memory() -> None:
    """Prompts of three conversations in turns, of which the device keeps one: without host memory each is computed
    anew; with it, it is copied, in the time that copies take."""
    host_token_s = 1e-6
    device = replace(SHAPE, kv_tokens=3200)
    tiers = replace(device, host_kv_tokens=16_000, host_token_s=host_token_s)
    turns = [
        TraceRequest(
            request_id=f"r{n}",
            arrival_s=2.0 * n,
            prompt_tokens=2048,
            output_tokens=4,
            content=tuple(10 * (n % 3) + k for k in range(4)),
            content_tokens=512,
        )
        for n in range(6)
    ]

    def play(shape: WorkerShape, router: QueueLengthRouter | LegatoRouter) -> SimulationResult:
        return simulate(replace(CONFIG, num_prefill=1, num_decode=1, prefill=shape), turns, router)

    assert [r.cached_tokens for r in play(device, QueueLengthRouter()).records] == [0] * 6
    result = play(tiers, QueueLengthRouter())
    found = 2048 - 32  # never the last block: its last token is computed
    assert [record.cached_tokens for record in result.records] == [0] * 3 + [found] * 3
    ttft_s = 6 * 0.001 + prefill_s((2048 - found, found)) + found * host_token_s
    assert result.records[5].ttft_s == pytest.approx(ttft_s, rel=1e-9)
    small = play(replace(tiers, host_kv_tokens=3200), QueueLengthRouter())
    assert small.records[3].cached_tokens < found, "host memory that is full gives up the oldest"
    router = LegatoRouter()
    play(tiers, router)
    hashes = b"".join(content_hashes(turns[5], 5, 32))
    reach = router.block_index.longest_prefix(hashes)["prefill-0"]
    assert (reach.device, reach.host) == (64, 64)
    older = router.block_index.longest_prefix(b"".join(content_hashes(turns[4], 4, 32)))["prefill-0"]
    assert (older.device < 64, older.host) == (True, 64), "the scheduler knows what lies there"


def test_host_memory_under_load_is_used_and_given_back() -> None:
    """Its pools are empty in the end, too, which each simulation asserts."""
    workload = replace(WORKLOAD, num_requests=80, follow_up=0.7)
    narrow = replace(SHAPE, kv_tokens=12_000)
    tiers = replace(narrow, host_kv_tokens=200_000, host_token_s=1e-6)

    def play(shape: WorkerShape, num_prefill: int) -> SimulationResult:
        config = replace(CONFIG, num_prefill=num_prefill, num_decode=4 - num_prefill, prefill=shape, decode=shape)
        router = LegatoRouter(DecisionPolicy(one_pool=not num_prefill))
        return simulate(config, draw_requests(workload, 2), router)

    without, with_host = play(narrow, 2), play(tiers, 2)
    assert play(tiers, 2) == with_host
    assert with_host.summary.cached_share > 1.2 * without.summary.cached_share
    assert with_host.summary.overall.ttft.p50 < without.summary.overall.ttft.p50
    assert play(tiers, 0).summary.overall.num_served > 70


# --- steps that are not linear ---


def test_few_prompt_tokens_in_a_step_are_dear_and_workers_learn_it() -> None:
    """They know their steps by a linear model alone; what any step with prompts takes is the part of it that moves."""
    curved = replace(SHAPE, half_speed_tokens=200.0)
    config = replace(CONFIG, prefill=curved, decode=curved)
    [record] = simulate(config, [one(2500, 100)], QueueLengthRouter()).records
    chunks = ((1024, 0), (1024, 1024), (452, 2048))
    lost = sum(200 / n * (prefill_s((n, cached)) - COST.base_s) for n, cached in chunks)
    assert record.ttft_s == pytest.approx(6 * 0.001 + prefill_s(*chunks) + lost, rel=1e-9)
    assert record.tpot_s == pytest.approx((0.002 + 452 * 1e-6 + decode_s(range(2501, 2600))) / 99, rel=1e-9)

    class Reported(RoundRobin):
        def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> None:
            super().heartbeat(snapshot, now)
            self.cost = self.prefills[0].cost

    router = Reported()
    simulate(config, draw_requests(WORKLOAD, 5), router)
    assert router.cost.prefill_base_s > 0.5 * 200 * COST.prefill_token_s
    assert router.cost.prefill_token_s == pytest.approx(COST.prefill_token_s, rel=0.1)
    with pytest.raises(ValueError, match="half_speed_tokens is -1"):
        replace(SHAPE, half_speed_tokens=-1.0)


# --- one pool ---


class ForEachOther(QueueLengthRouter):
    """Two decode workers, each of which computes the prompts that the other one goes on with."""

    def choose(self, query: Place, now: float) -> PlacedRequest:
        number = int(query.request_id[1:]) % 2
        return PlacedRequest(query, self.decodes[1 - number], self.decodes[number])


def test_a_decode_worker_computes_for_another_one_as_a_prefill_worker_does() -> None:
    pool = replace(CONFIG, num_prefill=0)
    [apart] = simulate(CONFIG, [one(2500, 100)], QueueLengthRouter()).records
    [record] = simulate(pool, [one(2500, 100)], ForEachOther()).records
    assert (record.prefill, record.decode) == ("decode-1", "decode-0")
    assert (record.ttft_s, record.tpot_s) == (apart.ttft_s, apart.tpot_s)
    [single] = simulate(pool, [one(2500, 1)], ForEachOther()).records
    assert single.end_s == single.first_token_s, "it ended with its first token, and nothing stays held"


def test_two_whose_memory_is_kept_for_each_other_s_prompts_do_not_wait_for_ever() -> None:
    narrow = replace(SHAPE, kv_tokens=2560)
    pool = replace(CONFIG, num_prefill=0, prefill=narrow, decode=narrow)
    records = simulate(pool, [one(2000, 20, f"r{n}") for n in range(6)], ForEachOther()).records
    assert all(record.end_s is not None for record in records)
    assert any(record.prefill is None for record in records), "they did not stand in each other's way"


def test_roles_emerge_where_targets_are_tight_and_nothing_moves_where_they_are_not() -> None:
    def handed_over(tpot_s: float) -> int:
        slo = SloConfig(classes=(SloClass(name="chat", ttft_s=4.0, tpot_s=tpot_s),), default="chat")
        pool = replace(CONFIG, num_prefill=0, num_decode=4, slo=slo)
        records = simulate(pool, draw_requests(WORKLOAD, 1), LegatoRouter(DecisionPolicy(one_pool=True))).records
        assert sum(record.end_s is not None for record in records) > 0.9 * len(records)
        return sum(record.prefill is not None for record in records)

    assert handed_over(10.0) == 0
    assert handed_over(0.008) > 0.2 * WORKLOAD.num_requests


def test_nobody_is_refused_for_memory_that_a_prefix_in_common_does_not_take() -> None:
    slo = SloConfig(classes=(SloClass(name="chat", ttft_s=2.0, tpot_s=0.1),), default="chat")
    pool = replace(CONFIG, num_prefill=0, num_decode=1, decode=replace(SHAPE, kv_tokens=16_000), slo=slo)
    asked = [replace(one(6100, 300, f"r{n}", 1.0 + 0.5 * n), content=tuple(range(11))) for n in range(40)]
    records = simulate(pool, asked, LegatoRouter(DecisionPolicy(one_pool=True))).records
    assert [record.request_id for record in records if not record.is_met] == []
    begun = sorted(record.first_token_s for record in records if record.first_token_s is not None)
    ended = sorted(record.end_s for record in records if record.end_s is not None)
    most = max(number - sum(end < at for end in ended) for number, at in enumerate(begun, start=1))
    assert most * 6100 > 16_000, f"{most} at a time would have had the room apart"
