"""The prefill scheduler under everything that can come between two steps."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sequence import SampledToken, Sequence, SequenceKey, StepPlan
from prefill_workers.scheduler import PrefillScheduler
from tests.prefill_workers.prefill_shapes import BLOCK_SIZE, TOKEN_BUDGET, host_rule, prompt_of
from tests.support.ghost_runner import GhostRunner, next_token
from tests.support.thoroughness import examples

MAX_WAITING = 5
COLUMNS = 6

some = st.integers(0, 2**16)
lengths = st.integers(1, COLUMNS * BLOCK_SIZE)
prompts = st.one_of(  # many that begin alike
    lengths.map(lambda length: [2] * length), st.lists(st.integers(2, 3), min_size=1, max_size=COLUMNS * BLOCK_SIZE)
)
rates = st.sampled_from([0.1, 2.5, 100.0])


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
        self.loading: set[SequenceKey] = set()
        self.unreserved: set[SequenceKey] = set()  # decode has no room for them yet
        self.overtaken: set[SequenceKey] = set()  # they were loading once
        self.broken: set[SequenceKey] = set()  # they hold blocks and are never computed again
        self.host_pool: BlockPool | None = None

    @initialize(layer_groups=st.integers(1, 3), host_columns=st.sampled_from([0, 3, COLUMNS, 3 * COLUMNS]), rate=rates)
    def set_out(self, layer_groups: int, host_columns: int, rate: float) -> None:
        """`rate`: host bytes moved while one token is computed."""
        self.pool = BlockPool(COLUMNS * layer_groups)
        self.host_pool = BlockPool(host_columns * layer_groups) if host_columns else None
        self.allocator = BlockAllocator(
            self.pool, layer_groups=layer_groups, block_size=BLOCK_SIZE, host_pool=self.host_pool
        )
        self.kv: dict[tuple[str, int, int], int] = {}
        self.runner = GhostRunner(self.allocator, self.kv)
        self.scheduler = PrefillScheduler(
            self.allocator,
            token_budget=TOKEN_BUDGET,
            max_waiting=MAX_WAITING,
            staging_columns=COLUMNS,
            host_groups=host_rule(self.allocator, COLUMNS, rate),
        )

    @precondition(lambda self: self.host_pool is not None)
    @rule()
    def copy_down(self) -> None:
        """What write-through does, at any moment, as far as there is room."""
        assert self.host_pool is not None
        for key, block in self.pool.findable().items():
            if self.host_pool.find(key) is None and self.host_pool.num_available:
                lease = self.host_pool.lease(1)
                for offset in range(BLOCK_SIZE):
                    self.kv["host", lease.blocks[0], offset] = self.kv["device", block, offset]
                self.host_pool.publish(lease, lease.blocks[0], key)
                self.host_pool.release(lease)

    @rule()
    def evict(self) -> None:
        self.pool.drop_cached()

    @precondition(lambda self: self.loading)
    @rule(which=some)
    def loaded(self, which: int) -> None:
        key = sorted(self.loading)[which % len(self.loading)]
        self.loading.remove(key)
        self.scheduler.loaded(key)

    @precondition(lambda self: self.unreserved)
    @rule(which=some)
    def reserved(self, which: int) -> None:
        key = sorted(self.unreserved)[which % len(self.unreserved)]
        self.unreserved.remove(key)
        self.scheduler.reserved(key)

    @rule(
        prompt=prompts,
        logprobs=st.sampled_from([False, False, True]),
        loading=st.booleans(),
        is_reserved=st.sampled_from([True, True, False]),
    )
    def add(self, prompt: list[int], logprobs: bool, loading: bool, is_reserved: bool) -> None:
        if not self.scheduler.can_add():
            assert self.scheduler.num_waiting == MAX_WAITING
            return
        seq = prompt_of(f"r{self.num_requests}", prompt, logprobs=logprobs)
        self.num_requests += 1
        self.scheduler.add(seq, loading=loading, is_reserved=is_reserved)
        if not is_reserved:
            self.unreserved.add(seq.key)
            self.overtaken.add(seq.key)
        if loading:
            self.loading.add(seq.key)
            self.overtaken.add(seq.key)
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
        self.loading.discard(key)
        self.unreserved.discard(key)
        self.broken.discard(key)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        plan = self.scheduler.plan()
        for seq in self.sequences.values():
            if seq.lease is None or seq.key in self.entered:
                continue
            self.entered.add(seq.key)
            assert seq.key not in self.loading
            assert seq.num_computed == seq.num_cached < seq.num_tokens
            assert seq.num_cached == 0 or not seq.wants_prompt_logprobs
        keys = [item.seq.key for item in plan.items]
        assert (
            len(set(keys)) == len(keys)
            and set(keys) <= self.sequences.keys() - self.computed - self.loading - self.broken
        )
        assert plan.num_tokens <= TOKEN_BUDGET
        assert len(keys) == 1 or not any(item.seq.num_alone for item in plan.items), "a suspect's step is shared"
        if plan.items:
            self.plan = plan
        else:
            assert self.computed or self.broken or self.sequences.keys() <= self.loading | self.unreserved, (
                "there is work, and nothing is done"
            )

    @precondition(lambda self: self.plan is not None)
    @rule()
    def finish_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        output = self.runner.execute(plan)
        before = {item.seq.key: item.seq.num_computed for item in plan.items}
        for seq, sampled in self.scheduler.finish_step(plan, output):
            assert sampled is not None, "a whole prompt has a first token"
            self._take(seq, sampled)
        for item in plan.items:
            if item.seq.key in self.sequences:
                assert not self.allocator.is_moving(item.seq)
                assert item.seq.num_computed == before[item.seq.key] + item.num_tokens
        self._check_released()

    @precondition(lambda self: self.plan is not None)
    @rule(suspect=st.booleans())
    def fail_step(self, suspect: bool) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        broken = {item.seq.key for item in plan.items if self.allocator.is_moving(item.seq)}
        given_up = {item.seq.key for item in plan.items if item.seq.key in self.broken}
        self.scheduler.abandon_step()
        self._check_released()
        for key in broken & self.sequences.keys():
            self.broken.add(key)
        if suspect:
            lost = self.scheduler.suspect(plan, None)
            assert {seq.key for seq in lost} == broken & self.sequences.keys() | given_up

    @property
    def running(self) -> list[SequenceKey]:
        """Those that have their blocks and are to be computed."""
        ended = self.computed | self.broken
        return [key for key, seq in self.sequences.items() if seq.lease is not None and key not in ended]

    @precondition(lambda self: self.running)
    @rule(which=some)
    def give_up(self, which: int) -> None:
        """Its steps fail, alone as well, or the worker changes its role; also while a step is in flight."""
        key = self.running[which % len(self.running)]
        self.scheduler.stop_computing(key)
        self.broken.add(key)

    @invariant()
    def the_pool_is_whole(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(
            self.sequences.keys() | self.released_in_flight
        )
        assert all(self.scheduler.sequence(key) is seq for key, seq in self.sequences.items())
        if self.host_pool is not None:
            self.host_pool.check()
        kept = [self.sequences[key] for key in self.unreserved if self.sequences[key].lease is not None]
        assert sum(self.allocator.num_columns_for(seq.num_tokens) for seq in kept) <= COLUMNS / 2
        undone = [seq for key, seq in self.sequences.items() if key not in self.computed | self.broken]
        assert self.scheduler.num_uncomputed_tokens >= sum(seq.num_uncomputed for seq in undone)

    def teardown(self) -> None:
        num_steps = 2 + sum(1 + seq.num_tokens for seq in self.sequences.values())
        for _ in range(num_steps if self.sequences or self.plan else 0):
            if self.plan is not None:
                self.finish_step()
            for key in [*self.computed, *self.broken]:
                self._release(key)
            while self.loading:
                self.loaded(0)
            while self.unreserved:
                self.reserved(0)
            self.begin_step()
        assert not self.sequences, "sequences starve"
        if hasattr(self, "pool"):
            self.pool.check_idle()
        if self.host_pool is not None:
            self.host_pool.check_idle()

    def _take(self, seq: Sequence, sampled: SampledToken) -> None:
        assert seq.key in self.sequences and seq.key not in self.computed
        assert sampled.token_id == next_token(seq.prompt_token_ids)
        assert seq.num_uncomputed == 0
        assert seq.lease is not None, "its blocks must stay until the hand-over is done"
        ahead = self.accepted[: self.accepted.index(seq.key)]
        if self.host_pool is None and not self.overtaken.intersection(ahead):
            assert set(ahead) <= self.computed | self.broken, "first come, first served"
        self.computed.add(seq.key)

    def _check_released(self) -> None:
        assert not any(key in self.scheduler for key in self.released_in_flight)
        self.released_in_flight.clear()


TestPrefillScheduler = PrefillMachine.TestCase
TestPrefillScheduler.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)
