"""The prefill scheduler under everything that can come between two steps, and its rules one by one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.allocation import BlockAllocator
from engine.block_pool import BlockPool
from engine.sampling_params import SamplingParams
from engine.sequence import SampledToken, Sequence, SequenceKey, StepPlan
from prefill_workers.scheduler import PrefillScheduler
from tests.ghost_runner import GhostRunner, next_token

BLOCK_SIZE = 4
TOKEN_BUDGET = 7
MAX_WAITING = 5
COLUMNS = 6

some = st.integers(0, 2**16)


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[SequenceKey] = []  # in order; released ones are taken out
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.computed: set[SequenceKey] = set()  # handing over
        self.entered: set[SequenceKey] = set()
        self.released_in_flight: set[SequenceKey] = set()
        self.plan: StepPlan | None = None
        self.num_requests = 0

    @initialize(layer_groups=st.integers(1, 2))
    def set_out(self, layer_groups: int) -> None:
        self.pool = BlockPool(COLUMNS * layer_groups)
        allocator = BlockAllocator(self.pool, layer_groups=layer_groups, block_size=BLOCK_SIZE)
        self.runner = GhostRunner(allocator)
        self.scheduler = PrefillScheduler(allocator, token_budget=TOKEN_BUDGET, max_waiting=MAX_WAITING)

    @rule(prompt=st.lists(st.integers(2, 3), min_size=1, max_size=COLUMNS * BLOCK_SIZE), logprobs=st.booleans())
    def add(self, prompt: list[int], logprobs: bool) -> None:
        if not self.scheduler.can_add():
            assert self.scheduler.num_waiting == MAX_WAITING
            return
        seq = _seq(f"r{self.num_requests}", prompt, logprobs=logprobs)
        self.num_requests += 1
        self.scheduler.add(seq)
        self.accepted.append(seq.key)
        self.sequences[seq.key] = seq

    @precondition(lambda self: self.sequences)
    @rule(which=some)
    def release(self, which: int) -> None:
        """A cancel, a failed hand-off, or the end of a good one."""
        self._release(list(self.sequences)[which % len(self.sequences)])

    def _release(self, key: SequenceKey) -> None:
        if self.plan is not None and any(item.seq.key == key for item in self.plan.items):
            self.released_in_flight.add(key)
        self.scheduler.release(key)
        self.scheduler.release(key)
        del self.sequences[key]
        self.accepted.remove(key)
        self.computed.discard(key)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        plan, admitted = self.scheduler.plan()
        for seq in admitted:
            assert seq.key in self.sequences and seq.key not in self.entered, "it entered before"
            self.entered.add(seq.key)
            assert seq.num_computed == seq.num_cached < seq.num_tokens
            assert seq.num_cached == 0 or not seq.wants_prompt_logprobs
        keys = [item.seq.key for item in plan.items]
        assert len(set(keys)) == len(keys) and set(keys) <= self.sequences.keys() - self.computed
        assert plan.num_tokens <= TOKEN_BUDGET
        if plan.items:
            self.plan = plan
        else:
            assert self.computed or not self.sequences, "there is work, and nothing is done"

    @precondition(lambda self: self.plan is not None)
    @rule()
    def finish_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        output = self.runner.execute(plan)
        before = {item.seq.key: item.seq.num_computed for item in plan.items}
        for seq, sampled in self.scheduler.finish_step(plan, output):
            self._take(seq, sampled)
        for item in plan.items:
            if item.seq.key in self.sequences:
                assert item.seq.num_computed == before[item.seq.key] + item.num_tokens
        self._check_released()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_step(self) -> None:
        assert self.plan is not None
        self.plan = None
        self.scheduler.abandon_step()
        self._check_released()

    @invariant()
    def the_pool_is_whole(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(
            self.sequences.keys() | self.released_in_flight
        )
        assert all(self.scheduler.sequence(key) is seq for key, seq in self.sequences.items())
        undone = [seq for key, seq in self.sequences.items() if key not in self.computed]
        assert self.scheduler.num_uncomputed_tokens >= sum(seq.num_uncomputed for seq in undone)

    def teardown(self) -> None:
        num_steps = 2 + sum(1 + seq.num_tokens for seq in self.sequences.values())
        for _ in range(num_steps if self.sequences or self.plan else 0):
            if self.plan is not None:
                self.finish_step()
            for key in list(self.computed):
                self._release(key)
            self.begin_step()
        assert not self.sequences, "sequences starve"
        if hasattr(self, "pool"):
            self.pool.check_idle()

    def _take(self, seq: Sequence, sampled: SampledToken) -> None:
        assert seq.key in self.sequences and seq.key not in self.computed
        assert sampled.token_id == next_token(seq.prompt_token_ids)
        assert seq.num_uncomputed == 0
        assert seq.lease is not None, "its blocks must stay until the hand-over is done"
        ahead = self.accepted[: self.accepted.index(seq.key)]
        assert set(ahead) <= self.computed, "first come, first served"
        self.computed.add(seq.key)

    def _check_released(self) -> None:
        assert not any(key in self.scheduler for key in self.released_in_flight)
        self.released_in_flight.clear()


TestPrefillScheduler = PrefillMachine.TestCase
TestPrefillScheduler.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def _seq(name: str, prompt: list[int], *, logprobs: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=8, seed=0, prompt_logprobs=0 if logprobs else None)
    return Sequence(request_id=name, attempt=0, params=params, prompt_token_ids=prompt)


class Bench:
    """A scheduler on ghost KV, stepped by hand."""

    def __init__(self, columns: int = 40, *, token_budget: int = 16) -> None:
        self.pool = BlockPool(columns)
        allocator = BlockAllocator(self.pool, layer_groups=1, block_size=BLOCK_SIZE)
        self.runner = GhostRunner(allocator)
        self.scheduler = PrefillScheduler(allocator, token_budget=token_budget, max_waiting=8)

    def step(self) -> tuple[list[tuple[str, int]], list[str]]:
        """What was computed, and whose first token came."""
        plan, _ = self.scheduler.plan()
        first = self.scheduler.finish_step(plan, self.runner.execute(plan))
        return [(i.seq.request_id, i.num_tokens) for i in plan.items], [seq.request_id for seq, _ in first]


def test_what_a_long_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    bench = Bench()
    for name, length in (("a", 36), ("b", 5), ("c", 9)):
        bench.scheduler.add(_seq(name, [ord(name)] * length))
    assert bench.scheduler.num_uncomputed_tokens == 50
    assert bench.step() == ([("a", 16)], [])
    assert bench.step() == ([("a", 16)], [])
    assert bench.step() == ([("a", 4), ("b", 5), ("c", 7)], ["a", "b"])
    assert bench.scheduler.num_uncomputed_tokens == 2
    assert bench.step() == ([("c", 2)], ["c"])


def test_a_prompt_enters_only_when_its_turn_has_come() -> None:
    """Blocks that nothing would be computed into yet could serve others better."""
    bench = Bench()
    bench.scheduler.add(_seq("a", [2] * 40))
    bench.scheduler.add(_seq("b", [3] * 4))
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    assert bench.pool.num_held == 10


def test_a_prompt_waits_for_blocks_that_are_being_handed_over() -> None:
    bench = Bench(columns=4)
    bench.scheduler.add(_seq("a", [2] * 12))
    bench.scheduler.add(_seq("b", [3] * 8))
    assert bench.step() == ([("a", 12)], ["a"])
    assert bench.step() == ([], [])
    bench.scheduler.release(("a", 0))
    assert bench.step() == ([("b", 8)], ["b"])
    bench.scheduler.release(("b", 0))
    bench.pool.check_idle()


def test_a_cached_prefix_is_not_computed_again_unless_its_logprobs_are_wanted() -> None:
    bench = Bench()
    prompt = [2] * 11
    for name, logprobs, computed in (("a", False, 11), ("b", False, 3), ("c", True, 11)):
        bench.scheduler.add(_seq(name, prompt, logprobs=logprobs))
        assert bench.step() == ([(name, computed)], [name])
        bench.scheduler.release((name, 0))
    bench.pool.check_idle()


def test_a_prompt_that_did_not_fit_keeps_nothing_of_its_hit() -> None:
    bench = Bench(columns=4)
    for name, token, length in (("a", 2, 8), ("b", 3, 4)):
        bench.scheduler.add(_seq(name, [token] * length))
    bench.step()
    big = _seq("c", [2] * 16)
    bench.scheduler.add(big)
    assert bench.step() == ([], [])
    assert (big.lease, big.num_cached, big.num_computed) == (None, 0, 0)
    for name in ("a", "b", "c"):
        bench.scheduler.release((name, 0))
    bench.pool.check_idle()
