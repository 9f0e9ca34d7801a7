"""Requests that make workers fail, beside innocent ones: these bring all their tokens, and few workers are lost.

Whoever computes the poison's pattern raises (once, or from then on in every step), dies or hangs; nothing else of the
cluster knows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

from cluster.errors import PoisonRequestError
from cluster.gateway.request_state import RequestState
from cluster.gateway.worker_connections import WorkerConnections
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.cost_model.step_cost import StepWork
from engine.sampling.grammar import RULES_OF_A_CLIENT
from engine.sampling.pending_output import PendingOutput
from engine.sequence import ScheduledSequence
from engine.steps import loop as step_loop
from engine.steps.runner import PreparedStep
from prefill_workers.worker import PrefillWorker
from tests.in_process_cluster.failures.test_silence import KNOWN
from tests.support.clusters.mini_cluster import MiniCluster, cluster_of
from tests.support.clusters.mini_requests import tokens_of
from tests.support.clusters.one_pool import split
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.thoroughness import combined
from tests.support.waiting import eventually

Deed = Literal["raises", "breaks", "kills", "hangs"]
Phase = Literal["prefill", "first decode", "deep in decode"]

POISON = random_prompts([50], seed=666)[0]
INNOCENTS = [random_prompts([20 + 5 * n], seed=n)[0] for n in range(8)]
NUM_TOKENS = 60
NUM_POISONS = 20
LATEST = {"prefill": 0, "first decode": len(POISON), "deep in decode": len(POISON) + 12}


def strikes(phase: Phase) -> Callable[[ScheduledSequence], bool]:
    """A step that computes the poison's token at this position, or one after it."""
    return lambda item: item.seq.prompt_token_ids[:8] == POISON[:8] and item.stop > LATEST[phase]


class Trap:
    """What happens to workers that compute the poison. Dead and ill ones are replaced, as they are in production."""

    def __init__(
        self, cluster: MiniCluster, deed: Deed, strikes: Callable[[ScheduledSequence], bool], one_by_one: bool
    ) -> None:
        """`one_by_one`: hanging workers are missed each by itself, or else two in one moment."""
        self._cluster = cluster
        self._told: str | None = None
        if not one_by_one:
            self._in_one_moment(cluster.orchestrator.connections)
        self._deed = deed
        self._strikes = strikes
        self._holds: dict[str, threading.Event] = {}  # of workers that hang, or are about to die
        self._is_dying: set[str] = set()
        self._replacing: dict[str, asyncio.Task[None]] = {}
        self.num_strikes = 0
        self.lost: list[str] = []
        self.second_fails_after_s = 0.0  # how long each failing step of the second worker that is lost takes
        self.dies_after_s = 0.0  # from the beginning of the step that kills
        for worker in cluster.workers:
            self._set_for(worker)
        self._supervisor = asyncio.create_task(self._supervise())

    def _set_for(self, worker: PrefillWorker | DecodeWorker) -> None:
        runner = worker.model.runner
        run = runner.run

        def trapped(step: PreparedStep, *hooks: object) -> PendingOutput:
            strikes = any(map(self._strikes, step.plan.items))
            if strikes and worker.info.worker_id not in self.lost:
                self.num_strikes += 1
                if self._deed != "raises":
                    self._hold(worker.info.worker_id)
            if strikes or worker.info.worker_id in self.lost:
                if self.lost[1:2] == [worker.info.worker_id]:
                    time.sleep(self.second_fails_after_s)
                raise RuntimeError("the poison works")
            return run(step, *hooks)  # type: ignore[arg-type]

        runner.run = trapped  # type: ignore[method-assign,assignment]

        def predicted_s(work: StepWork) -> float | None:
            """Only a trap's victim is ever late: on a busy machine anybody's step may take a second."""
            late = self.lost if self._told is None else [name for name in self.lost if name != self._told]
            return KNOWN.step_s(work) if worker.info.worker_id in late else None

        worker.steps.costs.predicted_s = predicted_s  # type: ignore[method-assign]

    def _in_one_moment(self, connections: WorkerConnections) -> None:
        """The second worker that hangs is told to be late just after the first, and before anybody has left that."""
        tell = connections.step_overdue

        def told(worker_id: str, is_overdue: bool) -> None:
            tell(worker_id, is_overdue)
            if is_overdue and self._told is None and len(self.lost) == 2:
                self._told = next(name for name in self.lost if name != worker_id)  # who says nothing by itself
                asyncio.get_running_loop().call_soon(tell, self._told, True)

        connections.step_overdue = told  # type: ignore[method-assign]

    def _hold(self, worker_id: str) -> None:
        hold = self._holds[worker_id] = threading.Event()
        self.lost.append(worker_id)
        if self._deed == "kills":
            self._is_dying.add(worker_id)
        if self._deed != "breaks":
            hold.wait()

    async def _supervise(self) -> None:
        """Whoever dies is dead at once, however long it takes to put others in the place of those who died before."""
        while True:
            self._settle_late()
            for worker in self._cluster.workers:
                worker_id = worker.info.worker_id
                if (worker_id in self._is_dying or not worker.is_healthy) and worker_id not in self._replacing:
                    await asyncio.sleep(self.dies_after_s)
                    for connection in worker.connections:
                        connection.abort()  # before its step ends: nobody hears of that
                    self._holds[worker_id].set()
                    self._replacing[worker_id] = asyncio.create_task(self._replace(worker))
            await asyncio.sleep(0.005)

    def _settle_late(self) -> None:
        """Whoever has computed the poison is known as lost before a copy is tried, as its gateway expects after a time:
        on a busy machine, steps that fail and a device that is tried out may take longer."""
        quarantine = self._cluster.orchestrator._quarantine
        if all(map(quarantine.is_lost, self.lost)):
            return
        for record in quarantine._records.values():
            if record.not_before:
                record.not_before = max(record.not_before, time.monotonic() + 1.0)

    async def _replace(self, worker: PrefillWorker | DecodeWorker) -> None:
        await self._cluster.remove(worker)
        add = self._cluster.add_prefill if isinstance(worker, PrefillWorker) else self._cluster.add_decode
        self._set_for(await add())

    async def end(self) -> None:
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        await asyncio.gather(*self._replacing.values())
        for hold in self._holds.values():
            hold.set()


async def poisoned(cluster: MiniCluster, name: str) -> None:
    with pytest.raises(PoisonRequestError):
        await cluster.generate(name, POISON, greedy(NUM_TOKENS))


async def innocents_beside_poison(
    cluster: MiniCluster,
    model: SmallModel,
    deed: Deed,
    phase: Phase,
    *,
    at_once: bool,
    one_by_one: bool = True,
    second_fails_after_s: float = 0.0,
    dies_after_s: float = 0.0,
) -> None:
    trap = Trap(cluster, deed, strikes(phase), one_by_one)
    trap.second_fails_after_s, trap.dies_after_s = second_fails_after_s, dies_after_s
    try:
        innocents = [
            asyncio.create_task(cluster.generate(f"innocent{n}", prompt, greedy(NUM_TOKENS)))
            for n, prompt in enumerate(INNOCENTS)
        ]
        runs = cluster.orchestrator.runs

        def under_way(number: int) -> bool:
            """Or through, where another one is kept waiting."""
            run = runs.get(f"innocent{number}")
            return innocents[number].done() or (run is not None and len(run.emitted) > 2)

        await eventually(lambda: all(map(under_way, range(len(innocents)))))
        if at_once:
            await asyncio.gather(*(poisoned(cluster, f"poison{n}") for n in range(NUM_POISONS)))
        else:
            for n in range(NUM_POISONS):
                await poisoned(cluster, f"poison{n}")
        found = await asyncio.gather(*innocents)
        expected = [model.local(prompt, greedy(NUM_TOKENS)).tokens for prompt in INNOCENTS]
        assert [tokens_of(events) for events in found] == expected
        if deed == "raises":
            assert {event.attempt for events in found for event in events} == {0}, "an innocent lost an attempt"
    finally:
        await trap.end()
    assert trap.num_strikes > 0
    assert len(trap.lost) == (0 if deed == "raises" else 2)
    assert all(worker.is_healthy for worker in cluster.workers)


async def test_nobody_is_suspected_for_a_grammar_that_fails(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names its request; several at once are no reason to replace a worker either."""
    # On a busy machine a step may be overdue, for which all in it are suspected.
    monkeypatch.setattr("engine.steps.loop._OVERDUE_TIMES", 1e9)
    one_of = " | ".join(f'"{number}" "b"' for number in range(2000))  # too many to be followed at once
    ambiguous = greedy(120, grammar=f"{RULES_OF_A_CLIENT}\nstart: /a{{20}}/ x\nx: {one_of}")
    names = [f"theirs{n}" for n in range(3)]
    alone: set[str] = set()
    async with cluster_of(llama, num_prefill=1, num_decode=2) as cluster:
        for worker in cluster.workers:
            runner = worker.model.runner

            def noted(step: PreparedStep, *hooks: Any, run: Callable[..., PendingOutput] = runner.run) -> PendingOutput:
                seqs = [item.seq for item in step.plan.items]
                alone.update(seq.request_id for seq in seqs if seq.num_alone or seq.request_id == "probe")
                return run(step, *hooks)

            runner.run = noted  # type: ignore[method-assign,assignment]
        params = greedy(160)
        innocents = [
            asyncio.create_task(cluster.generate(f"innocent{n}", prompt, params)) for n, prompt in enumerate(INNOCENTS)
        ]

        async def fails(name: str) -> None:
            with pytest.raises(PoisonRequestError):
                await cluster.generate(name, POISON, ambiguous)

        await asyncio.gather(*map(fails, names))
        found = await asyncio.gather(*innocents)
        assert [tokens_of(events) for events in found] == [llama.local(prompt, params).tokens for prompt in INNOCENTS]
        assert {event.attempt for events in found for event in events} == {0}
        assert all(worker.is_healthy for worker in cluster.workers)
    assert alone == set(names)


async def test_copies_that_were_recalled_while_their_step_failed(llama: SmallModel) -> None:
    """Both workers begin with ten copies each. The second one's are gone when its step has failed, so it has nobody to
    compute alone, by whom it would find its device broken: it looks by itself, and no third worker is tried."""
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        await innocents_beside_poison(cluster, llama, "breaks", "prefill", at_once=True, second_fails_after_s=0.3)


@combined(
    deed=["raises", "breaks", "kills"],
    phase=["prefill", "first decode", "deep in decode"],
    at_once={"one after another": False, "at once": True},
)
async def test_innocent_requests_do_not_pay_for_poison(
    llama: SmallModel, deed: Deed, phase: Phase, at_once: bool
) -> None:
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        await innocents_beside_poison(cluster, llama, deed, phase, at_once=at_once)


@pytest.mark.parametrize("deed", ["raises", "breaks", "kills"])
async def test_nor_where_steps_overlap(llama: SmallModel, deed: Deed) -> None:
    """What was on its way from a worker is lost with it: the poison may strike two tokens later at the next one. When a
    worker dies, it has long found that it cannot plan ahead of a suspect's step."""
    overlapping = DecodeWorkerConfig(overlap_steps=True)
    async with cluster_of(llama, num_prefill=2, num_decode=2, decode=overlapping) as cluster:
        await innocents_beside_poison(cluster, llama, deed, "deep in decode", at_once=True, dies_after_s=0.05)


async def test_who_goes_on_with_a_part_of_a_prompt_is_known_to_be_in_its_steps(llama: SmallModel) -> None:
    """When its worker dies it is one of those who may be the reason, as any other."""
    async with cluster_of(llama) as cluster:
        with split(cluster, 0.5) as placed:
            async with contextlib.aclosing(cluster.stream("r", POISON, greedy())) as events:
                first = await anext(events)
                assert cluster.decodes[0].info.worker_id in cluster.orchestrator.runs["r"].computing_on
        assert placed and first.waited_s is not None


@pytest.mark.parametrize(("phase", "at_once"), [("prefill", False), ("first decode", True), ("deep in decode", False)])
async def test_nor_for_poison_that_hangs_its_worker(
    llama: SmallModel, phase: Phase, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "_HUNG_S", 2.0)  # until it is replaced
    async with cluster_of(llama, num_prefill=2, num_decode=2, overdue_s=1.0) as cluster:
        await innocents_beside_poison(cluster, llama, "hangs", phase, at_once=at_once)


async def test_nor_where_two_hang_in_the_same_moment(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """When copies are recalled from the second, it is known to be late, and will not say so again."""
    monkeypatch.setattr(step_loop, "_HUNG_S", 2.0)
    async with cluster_of(llama, num_prefill=2, num_decode=2, overdue_s=1.0) as cluster:
        await innocents_beside_poison(cluster, llama, "hangs", "first decode", at_once=True, one_by_one=False)


async def test_copies_that_only_wait_for_their_turn_are_recalled_as_well(llama: SmallModel) -> None:
    """Else they come to a worker's shared step while another copy is tried: a third worker would be lost."""
    may_strike, may_prefill = threading.Event(), threading.Event()
    strikes_now = strikes("deep in decode")
    async with cluster_of(llama, num_prefill=1, num_decode=2) as cluster:
        trap = Trap(cluster, "breaks", lambda item: strikes_now(item) and may_strike.wait(), one_by_one=True)
        runs = cluster.orchestrator.runs
        try:
            first = asyncio.create_task(poisoned(cluster, "first"))
            await eventually(lambda: "first" in runs and len(runs["first"].emitted) > 2)
            runner = cluster.prefills[0].model.runner
            run = runner.run

            def held(step: PreparedStep, *hooks: object) -> PendingOutput:
                may_prefill.wait()
                return run(step, *hooks)  # type: ignore[arg-type]

            runner.run = held  # type: ignore[method-assign,assignment]
            innocent = asyncio.create_task(cluster.generate("innocent", INNOCENTS[0], greedy(NUM_TOKENS)))
            await eventually(lambda: "innocent" in runs and bool(runs["innocent"].computing_on))
            names = [f"copy{n}" for n in range(4)]
            copies = [asyncio.create_task(poisoned(cluster, name)) for name in names]
            await eventually(lambda: all(n in runs and runs[n].state is RequestState.PREFILLING for n in names))
            assert not any(runs[name].computing_on for name in names)
            striking = runs["first"].computing_on  # its decode worker
            elsewhere = [name for name in names if not any(map(runs[name].concerns, striking))]
            assert elsewhere, "decode workers take turns"
            may_strike.set()
            await eventually(lambda: all(runs[name].attempt > 0 for name in elsewhere))
            may_prefill.set()
            await asyncio.gather(first, *copies)
            assert tokens_of(await innocent) == llama.local(INNOCENTS[0], greedy(NUM_TOKENS)).tokens
        finally:
            may_strike.set()
            may_prefill.set()
            await trap.end()
        assert len(trap.lost) == 2
