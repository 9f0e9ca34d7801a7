"""The prefill scheduler under everything that can come between two steps, and its rules one by one."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.allocation import BlockAllocator
from engine.block_pool import BlockPool
from engine.sampling_params import SamplingParams
from engine.sequence import SampledToken, Sequence, SequenceKey, StepPlan
from prefill_workers.placement import HostPlacement, moved_tokens, spread
from prefill_workers.scheduler import PrefillScheduler
from tests.ghost_runner import GhostRunner, next_token

BLOCK_SIZE = 4
TOKEN_BUDGET = 7
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
        self.runner = GhostRunner(self.allocator)
        placement = _placement(self.allocator, COLUMNS, rate)
        self.scheduler = PrefillScheduler(
            self.allocator,
            token_budget=TOKEN_BUDGET,
            max_waiting=MAX_WAITING,
            staging_columns=COLUMNS,
            host_groups=placement.host_groups,
        )

    @precondition(lambda self: self.host_pool is not None)
    @rule()
    def copy_down(self) -> None:
        """What write-through does, at any moment, as far as there is room."""
        assert self.host_pool is not None
        for key, block in self.pool._block_of.items():
            if self.host_pool.find(key) is None and self.host_pool.num_available:
                lease = self.host_pool.lease(1)
                for offset in range(BLOCK_SIZE):
                    self.runner._kv["host", lease.blocks[0], offset] = self.runner._kv["device", block, offset]
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

    @rule(
        prompt=prompts,
        logprobs=st.sampled_from([False, False, True]),
        loading=st.booleans(),
    )
    def add(self, prompt: list[int], logprobs: bool, loading: bool) -> None:
        if not self.scheduler.can_add():
            assert self.scheduler.num_waiting == MAX_WAITING
            return
        seq = _seq(f"r{self.num_requests}", prompt, logprobs=logprobs)
        self.num_requests += 1
        self.scheduler.add(seq, loading=loading)
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
        self.broken.discard(key)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        plan, admitted = self.scheduler.plan()
        for seq in admitted:
            assert seq.key in self.sequences and seq.key not in self.entered, "it entered before"
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
        if plan.items:
            self.plan = plan
        else:
            assert self.computed or self.broken or self.sequences.keys() <= self.loading, (
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
            self._take(seq, sampled)
        for item in plan.items:
            if item.seq.key in self.sequences:
                assert not self.allocator.is_moving(item.seq)
                assert item.seq.num_computed == before[item.seq.key] + item.num_tokens
        self._check_released()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        broken = {item.seq.key for item in plan.items if self.allocator.is_moving(item.seq)}
        self.scheduler.abandon_step()
        self._check_released()
        for key in broken & self.sequences.keys():
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
            assert set(ahead) <= self.computed, "first come, first served"
        self.computed.add(seq.key)

    def _check_released(self) -> None:
        assert not any(key in self.scheduler for key in self.released_in_flight)
        self.released_in_flight.clear()


TestPrefillScheduler = PrefillMachine.TestCase
TestPrefillScheduler.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def _placement(allocator: BlockAllocator, staging_columns: int, bytes_per_token: float) -> HostPlacement:
    """One byte for each token of a group, one second for each token computed."""
    return HostPlacement(
        allocator=allocator,
        staging_columns=staging_columns,
        chunk_tokens=TOKEN_BUDGET,
        block_bytes=allocator.block_size,
        host_bytes_per_s=lambda: bytes_per_token,
        prefill_s=float,
    )


def _seq(name: str, prompt: list[int], *, logprobs: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=8, seed=0, prompt_logprobs=0 if logprobs else None)
    return Sequence(request_id=name, attempt=0, params=params, prompt_token_ids=prompt)


class Bench:
    """A scheduler on ghost KV, stepped by hand."""

    def __init__(
        self,
        columns: int = 40,
        *,
        token_budget: int = 16,
        layer_groups: int = 1,
        host_columns: int = 0,
        staging_columns: int = 0,
        rate: float = 100.0,
        shared_tokens: float = math.inf,
    ) -> None:
        self.pool = BlockPool(columns * layer_groups)
        host_pool = BlockPool(host_columns * layer_groups) if host_columns else None
        allocator = BlockAllocator(self.pool, layer_groups=layer_groups, block_size=BLOCK_SIZE, host_pool=host_pool)
        self.runner = GhostRunner(allocator)
        self.scheduler = PrefillScheduler(
            allocator,
            token_budget=token_budget,
            max_waiting=8,
            staging_columns=staging_columns,
            host_groups=_placement(allocator, staging_columns, rate).host_groups,
            shared_tokens=lambda: shared_tokens,
        )

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


def test_prompts_share_a_step_only_up_to_where_sharing_saves_time() -> None:
    bench = Bench(shared_tokens=10.7)
    for name, length in (("a", 4), ("b", 5), ("c", 9), ("d", 17)):
        bench.scheduler.add(_seq(name, [ord(name)] * length))
    assert bench.step() == ([("a", 4), ("b", 5), ("c", 1)], ["a", "b"])
    assert bench.step() == ([("c", 8), ("d", 2)], ["c"])
    assert bench.step() == ([("d", 15)], ["d"])  # alone, it has the whole budget


def test_without_room_to_share_every_prompt_has_its_own_steps() -> None:
    bench = Bench(shared_tokens=0.0)
    for name, length in (("a", 20), ("b", 5)):
        bench.scheduler.add(_seq(name, [ord(name)] * length))
    assert [bench.step() for _ in range(3)] == [([("a", 16)], []), ([("a", 4)], ["a"]), ([("b", 5)], ["b"])]


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


def test_one_that_loads_keeps_its_place_and_holds_nobody_up() -> None:
    bench = Bench()
    for name, loading in (("a", True), ("b", False), ("c", False)):
        bench.scheduler.add(_seq(name, [ord(name)] * 10), loading=loading)
    assert bench.step() == ([("b", 10), ("c", 6)], ["b"])
    bench.scheduler.loaded(("a", 0))
    bench.scheduler.add(_seq("d", [4] * 10))
    assert bench.step() == ([("c", 4), ("a", 10), ("d", 2)], ["c", "a"])


def test_one_that_is_released_while_it_loads_is_gone() -> None:
    bench = Bench()
    bench.scheduler.add(_seq("a", [2] * 10), loading=True)
    bench.scheduler.release(("a", 0))
    bench.scheduler.loaded(("a", 0))
    assert (bench.scheduler.num_waiting, bench.step()) == (0, ([], []))


def test_prompts_are_admitted_by_compute_while_others_hold_the_device() -> None:
    """`a` fills the device and is being handed over; `b` is computed from host memory in the meantime."""
    bench = Bench(columns=4, layer_groups=4, host_columns=8, staging_columns=8)
    for name, length in (("a", 16), ("b", 20), ("c", 20)):
        bench.scheduler.add(_seq(name, [ord(name)] * length))
    assert bench.step() == ([("a", 16)], ["a"])
    assert bench.step() == ([("b", 16)], [])
    b = bench.scheduler.sequence(("b", 0))
    assert b is not None
    assert b.host_groups == {0, 1, 2, 3}
    assert bench.step() == ([("b", 4)], ["b"])
    assert bench.step() == ([], []), "host memory has no room for c"
    for name in ("a", "b"):
        bench.scheduler.release((name, 0))
    assert bench.step() == ([("c", 16)], [])


def test_without_a_ring_prompts_wait_for_the_device() -> None:
    bench = Bench(columns=4, layer_groups=4, host_columns=8, staging_columns=0)
    for name in ("a", "b"):
        bench.scheduler.add(_seq(name, [ord(name)] * 16))
    assert bench.step() == ([("a", 16)], ["a"])
    assert bench.step() == ([], [])


def test_the_ring_bounds_the_host_resident_prompts_of_a_step() -> None:
    bench = Bench(columns=1, layer_groups=2, host_columns=20, staging_columns=3, token_budget=24)
    for name in ("a", "b"):
        bench.scheduler.add(_seq(name, [ord(name)] * 12))
    assert bench.step() == ([("a", 12)], ["a"])
    assert bench.step() == ([("b", 12)], ["b"])


def test_a_published_block_is_never_written_by_who_shares_it() -> None:
    """A hit never covers the last token, so what is computed goes to blocks of one's own."""
    bench = Bench()
    for name in ("a", "b"):
        bench.scheduler.add(_seq(name, [2] * 12))
        bench.step()
    a, b = (bench.scheduler.sequence((name, 0)) for name in ("a", "b"))
    assert a is not None and b is not None
    assert a.block_table is not None and b.block_table is not None
    assert b.num_cached == 8
    assert (a.block_table.view == b.block_table.view).tolist() == [[True, True, False]]


def test_as_few_groups_stay_on_the_device_as_hide_the_transfer() -> None:
    """12 tokens in chunks of 7 move 12 + 7 tokens of each group; computing takes 12 s."""
    allocator = BlockAllocator(BlockPool(400), layer_groups=8, block_size=BLOCK_SIZE, host_pool=BlockPool(400))
    assert moved_tokens(12, TOKEN_BUDGET) == 19
    seq = _seq("a", [2] * 12)
    for rate, num_hidden in ((100.0, 8), (19 / 12 * 5.01, 5), (19 / 12 * 1.5, 1), (0.01, 1)):
        assert len(_placement(allocator, 3, rate).host_groups(seq)) == num_hidden
    assert _placement(allocator, 2, 100.0).host_groups(seq) == frozenset(), "longer than the ring"


def test_groups_are_spread_evenly() -> None:
    assert [sorted(spread(count, 8)) for count in (0, 1, 2, 4, 7)] == [
        [],
        [4],
        [2, 6],
        [1, 3, 5, 7],
        [0, 1, 2, 4, 5, 6, 7],
    ]
    assert all(len(spread(count, total)) == count for total in range(1, 40) for count in range(total + 1))
