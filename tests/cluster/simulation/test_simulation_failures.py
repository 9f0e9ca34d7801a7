"""Workers that die and workers that become slow, in the simulated cluster: by hand, and by many schedules."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

import pytest

from cluster.__main__ import main
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.failures import Kill, Slow
from cluster.simulation.records import RequestRecord
from cluster.simulation.routers.base import Router
from cluster.simulation.routers.baselines import (
    CacheAware,
    Dynamo,
    LeastOutstandingTokens,
    QueueLengthRouter,
    RoundRobin,
)
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.workers.links import NetworkLink
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.workers import WorkerSnapshot

COST = StepCost(base_s=0.004, prefill_token_s=3e-5, prefill_pair_s=1e-9, decode_s=2e-5, context_token_s=4e-8)
SHAPE = WorkerShape(cost=COST, kv_tokens=64_000, token_budget=1024, block_size=32, prefix_caching=False)
MESSAGE_S = 0.001
CONFIG = SimulationConfig(num_prefill=2, num_decode=2, prefill=SHAPE, decode=SHAPE, message_s=MESSAGE_S)
LINKED = replace(SHAPE, link=NetworkLink(bytes_per_s=2e9, token_bytes=131_072, num_layers=32))
WORKLOAD = Workload(
    requests_per_s=8.0, num_requests=60, burstiness=3.0, turn=LogNormal(median=900, sigma=1.0, most=6000)
)


def one(prompt_tokens: int, output_tokens: int) -> TraceRequest:
    return TraceRequest(request_id="r0", arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def prefill_s(num_tokens: int) -> float:
    return COST.prefill_s(num_tokens, 0, 1024)


def played(config: SimulationConfig, router: Router, seed: int = 3) -> list[RequestRecord]:
    return simulate(config, draw_requests(WORKLOAD, seed), router).records


def test_who_decodes_on_a_worker_that_dies_goes_on_elsewhere_behind_the_tokens_that_it_has() -> None:
    [whole] = simulate(CONFIG, [one(1000, 101)], QueueLengthRouter()).records
    assert whole.first_token_s is not None
    assert whole.tpot_s is not None
    killed_at = whole.first_token_s + 50.5 * whole.tpot_s
    killed = replace(CONFIG, failures=(Kill(worker_id="decode-0", at_s=killed_at),))
    [record] = simulate(killed, [one(1000, 101)], QueueLengthRouter()).records
    assert (record.prefill, record.decode, record.num_retries) == ("prefill-0", "decode-1", 1)
    assert record.first_token_s == whole.first_token_s, "what its client has stays"
    assert record.gaps.num == 100
    # Seen to be gone, asked and answered, reserved, and the prompt computed with the 50 tokens.
    again_s = 6 * MESSAGE_S + prefill_s(1051)
    assert again_s < record.gaps.longest_s < again_s + 2 * whole.tpot_s
    assert whole.end_s is not None
    assert record.end_s is not None
    assert record.end_s - whole.end_s > again_s


def test_the_reservation_outlives_the_worker_that_was_to_fill_it() -> None:
    killed = replace(CONFIG, failures=(Kill(worker_id="prefill-0", at_s=0.05),))
    [record] = simulate(killed, [one(3000, 5)], LegatoRouter()).records
    assert (record.prefill, record.decode, record.num_retries) == ("prefill-1", "decode-0", 1)
    again_s = 0.05 + MESSAGE_S + MESSAGE_S + 2 * MESSAGE_S + 2 * MESSAGE_S + prefill_s(3000) + MESSAGE_S
    assert record.ttft_s == pytest.approx(again_s, rel=1e-9)


def test_a_hand_off_does_not_end_without_the_worker_that_it_comes_from() -> None:
    """It dies while the last bytes are on their way: what decode has is not the whole, and is computed again."""
    config = replace(CONFIG, prefill=LINKED, decode=LINKED)
    [whole] = simulate(config, [one(1000, 20)], QueueLengthRouter()).records
    assert whole.first_token_s is not None
    killed = replace(config, failures=(Kill(worker_id="prefill-0", at_s=whole.first_token_s),))
    [record] = simulate(killed, [one(1000, 20)], QueueLengthRouter()).records
    assert (record.prefill, record.num_retries, record.gaps.num) == ("prefill-1", 1, 19)
    assert record.first_token_s == whole.first_token_s


def test_who_is_on_its_way_to_a_dead_worker_is_told_and_goes_elsewhere() -> None:
    at_s = 2.5 * MESSAGE_S  # placed, and its message is under way
    for worker_id in ("decode-0", "prefill-0"):
        killed = replace(CONFIG, failures=(Kill(worker_id=worker_id, at_s=at_s),))
        [record] = simulate(killed, [one(1000, 5)], QueueLengthRouter()).records
        assert record.num_retries == 1
        assert worker_id not in (record.prefill, record.decode)
        assert record.ttft_s is not None
        assert record.ttft_s < prefill_s(1000) + 20 * MESSAGE_S


@pytest.mark.parametrize(
    "later", [Slow(worker_id="decode-0", at_s=1e4, factor=2.0), Kill(worker_id="prefill-1", at_s=0.0, back_s=1e4)]
)
def test_what_happens_when_all_are_served_makes_no_worker_look_idle(later: Kill | Slow) -> None:
    config = replace(CONFIG, num_prefill=2)
    whole = simulate(replace(config, failures=(Kill(worker_id="prefill-1", at_s=0.0),)), [one(1000, 101)], RoundRobin())
    failures = (Kill(worker_id="prefill-1", at_s=0.0), later) if isinstance(later, Slow) else (later,)
    result = simulate(replace(config, failures=failures), [one(1000, 101)], RoundRobin())
    assert result.records == whole.records
    assert result.summary.utilisation == whole.summary.utilisation
    assert whole.summary.utilisation["decode"] > 0.2


def test_without_anybody_left_requests_wait_for_the_next_life() -> None:
    config = replace(CONFIG, num_decode=1, max_returns=20)
    killed = replace(config, failures=(Kill(worker_id="decode-0", at_s=0.5, back_s=10.0),))
    for router in (LegatoRouter(), LeastOutstandingTokens()):
        [record] = simulate(killed, [one(1000, 200)], router).records
        assert record.end_s is not None
        assert record.end_s > 10.5
        assert 9.5 < record.gaps.longest_s < 11.5
        assert record.gaps.num == 199
    never = replace(config, failures=(Kill(worker_id="decode-0", at_s=0.5),))
    [record] = simulate(never, [one(1000, 200)], LeastOutstandingTokens()).records
    assert record.end_s is None
    assert record.rejected


def test_a_request_that_fails_four_times_without_progress_has_failed() -> None:
    config = replace(CONFIG, num_prefill=5, num_decode=1)
    kills = tuple(Kill(worker_id=f"prefill-{index}", at_s=0.4 * (index + 1)) for index in range(5))
    long = one(60_000, 5)  # seconds
    [record] = simulate(replace(config, failures=kills), [long], LegatoRouter()).records
    assert (record.num_retries, record.rejected, record.end_s) == (4, "it failed 4 times", None)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_dies_when_each_request_ends_once_and_nothing_stays_held(seed: int) -> None:
    """That pools are empty in the end is asserted by every simulation; here, that all tokens come, in all ways of
    working."""
    rng = random.Random(seed)
    one_pool, late, linked = rng.random() < 0.4, rng.random() < 0.3, rng.random() < 0.5
    shape = replace(LINKED if linked else SHAPE, kv_tokens=rng.choice((12_000, 64_000)), prefix_caching=True)
    shape = replace(shape, pulled_token_s=rng.choice((0.0, 1e-6)), host_token_s=1e-6)
    if rng.random() < 0.5:
        shape = replace(shape, host_kv_tokens=20_000, asks_neighbours=linked)
    config = replace(
        CONFIG,
        num_prefill=0 if one_pool else 3,
        num_decode=6 if one_pool else 3,
        prefill=shape,
        decode=shape,
        reserves_late=late,
        max_returns=rng.choice((0, 3)),
        seed=seed,
    )
    ids = [f"{pool}-{index}" for pool in ("prefill", "decode") for index in range(6)]
    failures = [
        Kill(worker_id=worker_id, at_s=rng.uniform(0, 9), back_s=rng.choice((0.5, 3.0)))
        for worker_id in rng.choices([w for w in ids if w in config.worker_ids], k=12)
    ]
    failing = replace(config, failures=(*failures, Slow(worker_id="decode-1", at_s=1.0, factor=3.0)))
    routers = [LegatoRouter, LeastOutstandingTokens, Dynamo, CacheAware]
    router = (lambda: LegatoRouter(DecisionPolicy(one_pool=True))) if one_pool else routers[seed % 4]
    records = played(failing, router(), seed)
    assert len({record.request_id for record in records}) == len(records) == WORKLOAD.num_requests
    served = [record for record in records if record.end_s is not None]
    assert len(served) > 0.6 * len(records)
    assert sum(record.num_retries for record in served) > 0
    assert all(record.gaps.num == record.output_tokens - 1 for record in served)
    assert all(record.rejected for record in records if record.end_s is None)
    if seed == 0:
        assert played(failing, router(), seed) == records


# --- stragglers ---


class Reports(LegatoRouter):
    """Notes what one worker reports."""

    def __init__(self) -> None:
        super().__init__()
        self.base_s: list[tuple[float, float]] = []

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        if snapshot.worker_id == "decode-0" and snapshot.step_cost is not None:
            cost = snapshot.step_cost
            self.base_s.append((now, cost.base_s + 1000 * cost.context_token_s + cost.decode_s))
        return super().heartbeat(snapshot, now)


def test_a_slow_worker_takes_longer_measures_that_and_gets_less() -> None:
    slowed = replace(CONFIG, failures=(Slow(worker_id="decode-0", at_s=2.0, factor=4.0),))
    router = Reports()
    [record] = simulate(slowed, [one(1000, 1500)], router).records
    assert record.decode == "decode-0"
    early = [step_s for now, step_s in router.base_s if now < 2.0]
    late = [step_s for now, step_s in router.base_s if now > 8.0]
    assert late[-1] == pytest.approx(4 * early[0], rel=0.1)
    assert record.gaps.longest_s > 3.5 * COST.base_s
    before = [record.decode for record in played(CONFIG, LegatoRouter()) if record.first_arrival_s > 2.5]
    after = [record.decode for record in played(slowed, LegatoRouter()) if record.first_arrival_s > 2.5]
    assert after.count("decode-0") < 0.7 * before.count("decode-0")
    healed = replace(CONFIG, failures=(*slowed.failures, Slow(worker_id="decode-0", at_s=4.0, factor=1.0)))
    router = Reports()
    simulate(healed, [one(1000, 3000)], router)
    assert router.base_s[-1][1] == pytest.approx(early[0], rel=0.1)


# --- asking for it ---


def test_texts_say_who_fails_and_when() -> None:
    assert Kill.parse("decode-1@30") == Kill(worker_id="decode-1", at_s=30.0)
    assert Kill.parse("decode-1@30+2.5") == Kill(worker_id="decode-1", at_s=30.0, back_s=2.5)
    assert Slow.parse("prefill-0@0:1.5") == Slow(worker_id="prefill-0", at_s=0.0, factor=1.5)
    for text in ("decode-1", "decode-1@", "decode-1@x", "decode-1@-1", "decode-1@3+", "decode-1@inf"):
        with pytest.raises(ValueError, match="is not like decode-1@30"):
            Kill.parse(text)
    for text in ("decode-1@3", "decode-1@3:0", "decode-1@3:-2", "decode-1@3:nan"):
        with pytest.raises(ValueError, match="is not like decode-1@30:2"):
            Slow.parse(text)
    with pytest.raises(ValueError, match="there is no worker decode-9"):
        replace(CONFIG, failures=(Kill(worker_id="decode-9", at_s=1.0),))


def test_the_command_kills_and_slows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def play(*options: str) -> tuple[int, str]:
        sizes = ["--requests", "12", "--rate", "20", "--decode", "2"]
        monkeypatch.setattr(sys, "argv", ["cluster", "simulate", *sizes, "--router", "least-tokens", *options])
        rc = main()
        return rc, "".join(capsys.readouterr())

    plain = play("--json")
    slow, killed = play("--json", "--slow", "decode-0@0:5"), play("--json", "--kill", "decode-1@1+3")
    tpot = [json.loads(text)["classes"][0]["tpot"]["p95"] for _, text in (plain, slow)]
    assert tpot[1] > 3 * tpot[0]
    assert json.loads(killed[1])["classes"][0]["num_served"] == 12
    assert json.loads(killed[1])["num_retries"] > 0
    assert "retries" in play("--kill", "decode-1@1+3")[1]
    assert "retries" not in play()[1]
    code, text = play("--kill", "decode-1")
    assert (code, "is not like decode-1@30" in text) == (1, True)
