"""Several models in the simulator: apart as if each were alone, and together where workers change their model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import takewhile

import pytest

from cluster.__main__ import main
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.models import ModelsResult, simulate_models
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest, paced, swing
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.step_cost import StepCost
from tests.support.thoroughness import THOROUGH

# A prompt of 4000 tokens takes 0.8 s.
COST = StepCost(base_s=0.005, prefill_token_s=2e-4, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=1e-7)
SHAPE = WorkerShape(cost=COST, kv_tokens=200_000, max_num_seqs=64, block_size=512, token_budget=2048)
SLO = SloConfig(classes=(SloClass(name="chat", ttft_s=5.0, tpot_s=0.1, share=0.9),), default="chat")
CONFIG = SimulationConfig(num_prefill=0, num_decode=2, prefill=SHAPE, decode=SHAPE, slo=SLO)
ONE_POOL = DecisionPolicy(one_pool=True)
PERIOD_S = 600.0 if THOROUGH else 300.0
CHANGE_S = 1.0
# Three quarters of what four workers can do; at its peak, one model's is more than two can.
WORKLOAD = Workload(
    requests_per_s=1.9,
    num_requests=10_000,
    turn=LogNormal(median=3500, sigma=0.3, most=8000),
    output=LogNormal(median=40, sigma=0.3, most=100),
    num_systems=1,
    system_tokens=0,
    follow_up=0.0,
)


def swinging(
    seed: int, phase: float, pace: Callable[[float, float], Callable[[float], float]]
) -> Iterator[TraceRequest]:
    requests = paced(draw_requests(WORKLOAD, seed), pace(PERIOD_S, phase))
    return takewhile(lambda request: request.arrival_s < PERIOD_S, requests)


@cache
def played(seed: int, change_s: float | None) -> ModelsResult:
    requests = {"a": swinging(2 * seed, 0.0, swing), "b": swinging(2 * seed + 1, 0.5, swing)}
    changes = None if change_s is None else dict.fromkeys("ab", change_s)
    decisions = dict.fromkeys("ab", ONE_POOL)
    return simulate_models(dict.fromkeys("ab", CONFIG), requests, change_s=changes, decisions=decisions)


def test_models_whose_workers_stay_are_as_if_each_were_alone() -> None:
    until_s = PERIOD_S if THOROUGH else PERIOD_S / 5
    requests = {
        name: [request for request in swinging(2 + number, number / 2, swing) if request.arrival_s < until_s]
        for number, name in enumerate("ab")
    }
    together = simulate_models(dict.fromkeys("ab", CONFIG), requests, decisions=dict.fromkeys("ab", ONE_POOL))
    for number, (name, found) in enumerate(together.by_model.items()):
        alone = replace(CONFIG, first_number=2 * number)
        assert len(found.records) > 20
        assert found.records == simulate(alone, requests[name], LegatoRouter(ONE_POOL)).records, name


def test_workers_follow_a_demand_that_swings_from_one_model_to_the_other() -> None:
    """Nearly all in time, where the pools that both models are given in the mean lose many; and nobody is lost."""
    fixed, changing = played(1, None), played(1, CHANGE_S)
    assert changing.in_time >= 0.95
    assert fixed.in_time < changing.in_time - 0.05
    assert {change.model for change in changing.changes} == {"a", "b"}
    assert len(changing.changes) <= 6, "there and back"
    assert all(CHANGE_S <= change.came_at - change.ordered_at <= 10.0 + CHANGE_S + 0.1 for change in changing.changes)
    for result in changing.by_model.values():
        assert all(record.end_s is not None or record.num_rejections for record in result.records)


def test_a_worker_with_its_other_model_is_its_own_again() -> None:
    """It serves under the name that it has there, and counts for the time that it was there."""
    changing = played(1, CHANGE_S)
    served = {record.decode or "" for record in changing.by_model["a"].records if record.end_s is not None}
    assert served > {"decode-0", "decode-1"}
    assert all(int(worker_id.partition("-")[2]) >= 4 for worker_id in served - {"decode-0", "decode-1"})
    for result in changing.by_model.values():
        assert 0.3 < result.summary.utilisation["decode"] < 0.9


def test_demand_swings_about_its_mean() -> None:
    there = [request.arrival_s for request in swinging(1, 0.0, swing)]
    counts = [sum(n * PERIOD_S / 4 <= at < (n + 1) * PERIOD_S / 4 for at in there) for n in range(4)]
    assert min(counts[0], counts[3]) > 2 * max(counts[1], counts[2])
    assert len(there) == pytest.approx(WORKLOAD.requests_per_s * PERIOD_S, rel=0.1)
    assert there == sorted(there)


def test_workers_that_are_unlike_each_other_keep_their_model() -> None:
    unlike = replace(CONFIG, shapes={"decode-0": SHAPE})
    with pytest.raises(ValueError, match="unlike each other"):
        simulate_models({"a": unlike, "b": CONFIG}, {"a": [], "b": []}, change_s={"a": 1.0, "b": 1.0})


# --- the command ---

TWO = ["--model", "llama-3.1-8b", "--model", "llama-3.1-8b", "--requests", "40", "--rate", "2"]


def simulated(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cluster", "simulate", *options])
    return main()


def test_the_command_plays_several_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(monkeypatch, *TWO, "--swing", "20", "--model-flips", "1") == 0
    told = capsys.readouterr().out
    assert "llama-3.1-8b, LegatoRouter: " in told and "llama-3.1-8b#2, LegatoRouter: " in told
    assert told.splitlines()[-1] == "all models: 100.0% in time, 0 workers changed their model"
    assert simulated(monkeypatch, *TWO, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["model"] for row in rows] == ["llama-3.1-8b", "llama-3.1-8b#2"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--swing", "20"], "give --model several times"),
        (["--model-flips", "1"], "give --model several times"),
        ([*TWO, "--trace", "x"], "give each model a --trace, or none"),
        ([*TWO, "--format", "azure", "--format", "azure", "--format", "azure"], "each trace a --format"),
        ([*TWO, "--kill", "decode-0@3"], "--kill is not there for several models"),
        ([*TWO, "--router", "mooncake"], "--router mooncake knows one model"),
    ],
)
def test_what_is_told_of_one_model_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], advice: str
) -> None:
    assert simulated(monkeypatch, *options) == 1
    assert advice in capsys.readouterr().err
