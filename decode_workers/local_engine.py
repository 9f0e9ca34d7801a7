"""The decode worker's scheduler and runner in one loop of one process: no network, no Ray, no other thread.

What tests and benchmarks compare the cluster with, and the shortest way to use the engine from Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from decode_workers.scheduler import DecodeScheduler, Emission
from engine.allocation import BlockAllocator
from engine.loading import LoadedModel
from engine.sequence import Sequence


class LocalEngine:
    """Continuous batching with chunked prefill on one model. Add sequences at any time, then `step` until idle."""

    def __init__(self, model: LoadedModel, *, max_num_seqs: int = 64, token_budget: int = 512) -> None:
        self._runner = model.runner
        allocator = BlockAllocator(
            model.block_pool,
            layer_groups=model.layout.num_layer_groups,
            block_size=model.layout.block_size,
            prefix_caching=model.prefix_caching,
        )
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
        )

    def add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)

    def step(self) -> list[Emission]:
        """One step; empty when there was nothing to do."""
        plan = self.scheduler.plan()
        if not plan.items:
            return []
        return self.scheduler.finish_step(plan, self._runner.execute(plan))

    def run(self, seqs: Iterable[Sequence]) -> Iterator[Emission]:
        """Generate all of these to their ends, tokens as they come."""
        for seq in seqs:
            self.add(seq)
        while self.scheduler.num_running or self.scheduler.num_waiting:
            yield from self.step()
