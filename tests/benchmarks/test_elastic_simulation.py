"""Pools that grow and shrink in the simulator, under requests that come faster and slower again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.scheduling.elastic import Elasticity, ElasticSimulation
from benchmarks.scheduling.sizing import FixedSizes, PredictedSizes, QueueRules, QueueSizes
from cluster.autoscaling.sizing import PoolRules, PoolsPlan
from cluster.simulation.records import RequestRecord
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult
from cluster.simulation.workers.worker import SimulatedWorker, WorkerShape
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.step_cost import StepCost

COST = StepCost(base_s=0.005, prefill_token_s=2e-4, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=1e-6)
SHAPE = WorkerShape(cost=COST, kv_tokens=64_000, max_num_seqs=32, block_size=512, token_budget=2048)
SLO = SloConfig(classes=(SloClass(name="chat", ttft_s=5.0, tpot_s=0.03, share=0.95),), default="chat")
ELASTICITY = Elasticity(start_s=20.0)


def steps(rates: Sequence[tuple[float, float]]) -> Iterator[TraceRequest]:
    """Requests of 4000 prompt tokens (0.8 s) and 20 new ones, evenly, at each rate until its time."""
    now, number = 0.0, 0
    for rate, until in rates:
        while now < until:
            yield TraceRequest(
                request_id=f"r{number}", arrival_s=now, prompt_tokens=4000, output_tokens=20, content=(number,),
                content_tokens=4000,
            )  # fmt: skip
            now, number = now + 1 / rate, number + 1


def config(num_prefill: int, num_decode: int) -> SimulationConfig:
    return SimulationConfig(num_prefill=num_prefill, num_decode=num_decode, prefill=SHAPE, decode=SHAPE, slo=SLO)


def router() -> LegatoRouter:
    return LegatoRouter()


class Scripted(FixedSizes):
    """Sizes from given times on. Remembers what it was shown, and whose ends."""

    def __init__(self, script: dict[float, tuple[int, int]]) -> None:
        self._script = script
        self.shown: list[tuple[float, int, int]] = []
        self.num_ended = 0

    def sizes(
        self, prefill: Sequence[SimulatedWorker], decode: Sequence[SimulatedWorker], now: float
    ) -> tuple[int, int] | None:
        self.shown.append((now, len(prefill), len(decode)))
        due = [time for time in self._script if time <= now]
        return self._script[max(due)] if due else None

    def ended(self, record: RequestRecord, now: float) -> None:
        self.num_ended += 1


def test_workers_come_after_their_start_and_go_when_they_are_done() -> None:
    sizing = Scripted({10.0: (3, 2), 60.0: (1, 1)})
    simulation = ElasticSimulation(config(1, 1), router(), sizing, ELASTICITY)
    records = simulation.run(steps([(1.0, 120.0)])).records
    serving = {now: (prefill, decode) for now, prefill, decode in sizing.shown}
    assert serving[29.0] == (1, 1) and serving[31.0] == (3, 2) and serving[61.0] == (1, 1)
    assert all(record.end_s is not None for record in records) and sizing.num_ended == len(records)
    duration = max(record.end_s or 0.0 for record in records)
    assert simulation.worker_seconds("prefill") == pytest.approx(duration + 2 * 50.0, abs=5.0)
    assert simulation.worker_seconds("decode") == pytest.approx(duration + 50.0, abs=15.0)


def test_a_worker_that_is_not_needed_any_more_never_serves() -> None:
    sizing = Scripted({10.0: (2, 1), 20.0: (1, 1)})
    simulation = ElasticSimulation(config(1, 1), router(), sizing, ELASTICITY)
    simulation.run(steps([(0.5, 60.0)]))
    assert {prefill for _, prefill, _ in sizing.shown} == {1}


def served(result: SimulationResult) -> float:
    return result.summary.overall.attainment


def test_predicted_sizes_follow_a_demand_that_triples_and_falls() -> None:
    """Against the pools that would serve the peak: nearly all in time, for much less; and they shrink to what they
    were."""
    plan = PoolsPlan(
        prefill=PoolRules(initial=2, max_workers=8, hold_s=40.0, start_s=ELASTICITY.start_s),
        decode=PoolRules(initial=2, max_workers=8, hold_s=40.0, start_s=ELASTICITY.start_s),
    )
    demand = [(1.0, 100.0), (1.5, 120.0), (2.0, 140.0), (3.0, 320.0), (1.0, 700.0)]
    legato = router()
    elastic = ElasticSimulation(config(2, 2), legato, PredictedSizes(legato, plan, SLO), ELASTICITY)
    result = elastic.run(steps(demand))
    most = max(elastic.samples, key=lambda sample: sample.prefill + sample.decode)
    assert 4 <= most.prefill <= 6  # 3 requests/s of 0.8 s at 70 %
    assert elastic.samples[-1].prefill == elastic.samples[90].prefill == 2
    fixed = ElasticSimulation(config(most.prefill, most.decode), router(), FixedSizes(), ELASTICITY)
    peak = fixed.run(steps(demand))
    assert served(peak) > 0.99 and served(result) > 0.97
    assert elastic.worker_seconds("prefill") < 0.75 * fixed.worker_seconds("prefill")
    changes = [after.prefill - before.prefill for before, after in itertools.pairwise(elastic.samples)]
    signs = [math.copysign(1, change) for change in changes if change]
    assert signs == sorted(signs, reverse=True)  # up, and then down


def test_queue_sizes_have_the_delays_of_serve() -> None:
    rules = QueueRules(target_per_replica=8000.0, min_workers=1, max_workers=4)
    sizing = QueueSizes(rules, QueueRules(target_per_replica=16.0, min_workers=1, max_workers=4), (1, 1))
    simulation = ElasticSimulation(config(1, 1), router(), sizing, ELASTICITY)
    simulation.run(steps([(0.25, 30.0), (3.0, 120.0), (0.25, 300.0)]))
    first_up = next(sample.at_s for sample in simulation.samples if sample.prefill > 1)
    assert first_up >= 32.0
    assert simulation.samples[-1].prefill == 1
