"""The in-process engine with its memory tiers, stepped by hand: who rests where is said, not decided.

Tells what each step cost, of which copies between the tiers were a part.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Collection
from dataclasses import dataclass

from engine.kv.allocation import BlockAllocator
from engine.sampling.params import SamplingParams
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepPlan
from engine.steps.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step costs the thread that computes."""

    wall_s: float
    compute_s: float  # of CPU time: what others take of its core is not in it
    waited_s: float  # for copies
    copied_s: float  # by the copy thread, most of it meanwhile
    num_preemptions: int  # how often another thread took its core, the copy thread perhaps


class TieredEngine:
    """Sequences on one model, without schedulers and without a prefix cache."""

    def __init__(self, model: LoadedModel) -> None:
        assert model.runner.transfer_stats is not None, "there is no host memory to measure"
        self.layout = model.layout
        self._runner = model.runner
        self._stats = model.runner.transfer_stats
        self._num_opened = 0
        self._allocator = BlockAllocator(
            model.block_pool,
            layer_groups=model.layout.num_layer_groups,
            block_size=model.layout.block_size,
            prefix_caching=False,
            host_pool=model.host_pool,
        )

    def close(self) -> None:
        self._runner.close()

    def open(self, prompt: list[int], host_groups: Collection[int], params: SamplingParams) -> Sequence:
        """Open a sequence of which nothing is computed yet; these layer groups of it will rest in host memory."""
        self._num_opened += 1
        seq = Sequence(request_id=f"tiered-{self._num_opened}", attempt=0, params=params, prompt_token_ids=prompt)
        self._allocator.open(seq, use_cache=False, host_groups=frozenset(host_groups))
        return seq

    def prefill(
        self, prompts: list[list[int]], host_groups: Collection[int], params: SamplingParams, chunk_tokens: int
    ) -> list[Sequence]:
        """Sequences with their first output token, computed one after the other."""
        seqs = [self.open(prompt, host_groups, params) for prompt in prompts]
        for seq in seqs:
            while not seq.output_token_ids:
                self.step([seq], chunk_tokens)
        return seqs

    def release(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._allocator.release(seq)

    def step(self, seqs: list[Sequence], most_tokens: int) -> tuple[StepCost, list[SampledToken | None]]:
        """Compute what each lacks, at most so many tokens. What is sampled is appended, and returned."""
        plan = StepPlan(tuple(ScheduledSequence(seq, min(seq.num_uncomputed, most_tokens)) for seq in seqs))
        for item in plan.items:
            grown = self._allocator.grow(item.seq, item.seq.num_computed + item.num_tokens)
            assert grown, "the engine was made too small for what is measured"
        started = self._clocks()
        output = self._runner.execute(plan)
        ended = self._clocks()
        for item, token in zip(plan.items, output.sampled, strict=True):
            item.seq.num_computed += item.num_tokens
            if token is not None:
                item.seq.output_token_ids.append(token.token_id)
        wall_s, compute_s, waited_s, copied_s, preempted = (b - a for a, b in zip(started, ended, strict=True))
        cost = StepCost(
            wall_s=wall_s,
            compute_s=compute_s,
            waited_s=waited_s,
            copied_s=copied_s,
            num_preemptions=int(preempted),
        )
        return cost, output.sampled

    def rewind(self, seq: Sequence, num_computed: int) -> None:
        """Take a sequence back to an earlier moment, whose step can then be taken again. Its blocks stay."""
        assert num_computed <= seq.num_computed
        seq.num_computed = num_computed
        del seq.output_token_ids[max(0, num_computed + 1 - len(seq.prompt_token_ids)) :]

    def _clocks(self) -> tuple[float, ...]:
        """The clocks, in the order of `StepCost`."""
        stats = self._stats
        return (
            time.perf_counter(),
            time.thread_time(),
            stats.exposed_s,
            stats.fetch_s + stats.write_s,
            resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw,
        )
