"""Simulated workers that guess tokens: counted by hand, repeated bit for bit, and never for less goodput."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from cluster.__main__ import main
from cluster.simulation.routers.baselines import QueueLengthRouter
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.workers import WorkerSnapshot

# As large a model as steps of 8 ms and drafts of 30 us mean, on one device.
COST = StepCost(base_s=0.008, prefill_token_s=3e-5, prefill_pair_s=0.0, decode_s=2e-4, context_token_s=4e-8)
SHAPE = WorkerShape(cost=COST, kv_tokens=64_000, token_budget=1024, block_size=32)
CONFIG = SimulationConfig(num_prefill=1, num_decode=1, prefill=SHAPE, decode=SHAPE)


def guessing(acceptance: float, config: SimulationConfig = CONFIG) -> SimulationConfig:
    return replace(config, decode=replace(config.decode, acceptance=acceptance))


class Listening(QueueLengthRouter):
    """Keeps the newest snapshot of who decodes."""

    newest: WorkerSnapshot

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> None:
        if snapshot.worker_id == "decode-0":
            self.newest = snapshot
        super().heartbeat(snapshot, now)


def lone(num_output: int) -> list[TraceRequest]:
    return [TraceRequest(request_id="r0", arrival_s=1.0, prompt_tokens=100, output_tokens=num_output)]


def test_tokens_of_a_step_come_together_and_as_many_as_asked_for() -> None:
    router = Listening()
    [plain] = simulate(CONFIG, lone(2000), router).records
    assert router.newest.tokens_per_step == router.newest.drafts_stretch == 1.0
    [record] = simulate(guessing(0.8), lone(2000), router).records
    assert record.gaps.num == plain.gaps.num == 1999
    times = (plain.tpot_s or 0) / (record.tpot_s or 1)
    assert 3.0 < times < 5.0, "1 / (1 - 0.8) at most"
    speed = router.newest.tokens_per_step / router.newest.drafts_stretch  # of the latest steps
    assert speed == pytest.approx(times, rel=0.5) and router.newest.drafts_stretch > 1.0
    assert record.gaps.longest_s < (plain.gaps.longest_s or 0) + 15 * COST.prefill_token_s + 1e-9


def test_the_same_seed_repeats_and_another_one_does_not() -> None:
    first, again, other = (
        simulate(replace(guessing(0.5), seed=seed), lone(300), QueueLengthRouter()).records for seed in (1, 1, 2)
    )
    assert first == again and first != other


def goodput(acceptance: float, rate: float, tpot_s: float, *, num_prefill: int = 1, median_prompt: int = 300) -> float:
    slo = SloConfig(classes=(SloClass(name="fast", ttft_s=2.0, tpot_s=tpot_s),), default="fast")
    turn = LogNormal(median=median_prompt, sigma=0.5, most=8 * median_prompt)
    workload = Workload(requests_per_s=rate, num_requests=60, turn=turn)
    config = guessing(acceptance, replace(CONFIG, num_prefill=num_prefill, slo=slo))
    return simulate(config, draw_requests(workload, 3), LegatoRouter()).summary.classes[0].goodput


@pytest.mark.parametrize("rate", [3.0, 12.0, 40.0])
def test_goodput_is_never_below_that_without(rate: float) -> None:
    assert goodput(0.7, rate, 0.03) >= goodput(0.0, rate, 0.03)


def test_a_worker_that_computes_prompts_too_serves_more_with_guesses() -> None:
    """Nearly each of its steps has prompts then, and lasts as long as the mean allows: with several tokens, longer."""
    without = goodput(0.0, 9.0, 0.02, num_prefill=0, median_prompt=1500)
    assert 0.0 < 1.15 * without < goodput(0.7, 9.0, 0.02, num_prefill=0, median_prompt=1500)


def test_what_is_seldom_right_costs_next_to_nothing() -> None:
    """Drafts stop, and are tried now and then."""
    tpots_s = [
        simulate(guessing(rate), lone(2000), QueueLengthRouter()).records[0].tpot_s or 0 for rate in (0.0, 0.001)
    ]
    assert tpots_s[1] < 1.01 * tpots_s[0]


def test_tighter_promises_are_kept_with_guesses() -> None:
    """A step takes 8 ms and more, so that 6 ms a token cannot be had without."""
    assert goodput(0.0, 3.0, 0.006) == 0.0 < goodput(0.7, 3.0, 0.006)


def test_what_is_no_acceptance_is_refused() -> None:
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="acceptance"):
            replace(SHAPE, acceptance=wrong)


def test_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for acceptance in ("0", "0.7"):
        monkeypatch.setattr(
            sys, "argv", ["cluster", "simulate", "--requests", "20", "--acceptance", acceptance, "--json"]
        )
        main()
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] != told[1]
