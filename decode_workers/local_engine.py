"""The decode worker's scheduler and runner in one loop of one process: no network, no Ray, no other thread.

What tests and benchmarks compare the cluster with, and the shortest way to use the engine from Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from decode_workers.pacing import LayerKvConfig
from decode_workers.scheduler import Emission
from decode_workers.worker import decode_scheduler
from engine.cost_model.step_cost import StepWork
from engine.drafting.speculation import Speculation
from engine.sequence import Sequence
from engine.steps.loading import LoadedModel
from kv_transfer.worker.base import block_allocator


class LocalEngine:
    """Continuous batching with chunked prefill on one model. Add sequences at any time, then `step` until idle.

    `layerkv`: how sequences rest in the model's host memory, if it has some; None: they do not. `speculation`: who
    guesses tokens; None: nobody. `clock`: in seconds.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_num_seqs: int = 64,
        token_budget: int = 512,
        layerkv: LayerKvConfig | None = None,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = model.runner
        self._clock = clock
        self._costs = model.costs
        self.speculation = speculation
        self.scheduler = decode_scheduler(
            model,
            block_allocator(model),
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            layerkv=layerkv,
            speculation=speculation,
        )

    def add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)

    def step(self) -> list[Emission]:
        """One step; empty when there was nothing to do."""
        began = self._clock()
        plan = self.scheduler.plan(began)
        if plan.is_empty:
            return []
        output = self._runner.execute(plan)
        self._costs.observe(StepWork.of_plan(plan), max(self._clock() - began - output.drawing_s, 1e-9))
        return self.scheduler.finish_step(plan, output)

    def run(self, seqs: Iterable[Sequence]) -> Iterator[Emission]:
        """Generate all of these to their ends, tokens as they come."""
        for seq in seqs:
            self.add(seq)
        while self.scheduler.num_running or self.scheduler.num_waiting:
            yield from self.step()
