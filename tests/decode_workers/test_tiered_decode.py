"""The decode scheduler with host memory: under everything that can come between two steps, and its rules one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from decode_workers.offload_policy import OffloadPolicy
from decode_workers.pacing import LayerKvConfig
from decode_workers.scheduler import DecodeScheduler, DecodeState
from engine.cost_model.step_cost import StepCost
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.model.adapters import AdapterSlot
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, StepPlan
from kernels.adapters import Adapter, AdapterLayer
from tests.decode_workers.test_decode_scheduler import (
    BLOCK_SIZE,
    EOS,
    MAX_MODEL_LEN,
    TOKEN_BUDGET,
    DecodeMachine,
    guesses,
)
from tests.support.ghost_runner import GhostRunner, next_token
from tests.support.thoroughness import examples

GROUPS = 2
MODEL_COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What was measured: each step's seconds and those of a prompt token beside them, and of copies."""

    cost: StepCost | None = None
    host_bytes_per_s: float = 0.0


def cost_of(step_s: float, token_s: float) -> StepCost:
    return StepCost(base_s=step_s, prefill_token_s=token_s, prefill_pair_s=0.0, decode_s=0.0, context_token_s=0.0)


FAST = Speeds(cost=cost_of(0.01, 1e-3), host_bytes_per_s=1e6)
SLOW_MEMORY = Speeds(cost=cost_of(0.01, 1e-5), host_bytes_per_s=10.0)
LATE = Speeds(cost=cost_of(1.0, 0.02), host_bytes_per_s=1e3)


class TieredMachine(DecodeMachine):
    """The same stories, on a device that is too small and a host that may be."""

    patience = 12

    @initialize(
        columns=st.integers(2, 8),
        host_columns=st.integers(MODEL_COLUMNS, 14),
        staging_columns=st.integers(3, 12),
        max_num_seqs=st.integers(1, 6),
        speeds=st.sampled_from([FAST, SLOW_MEMORY, LATE, Speeds()]),
        num_drafts=st.sampled_from([0, 1, 3, 8]),
    )
    def set_out_in_tiers(
        self,
        columns: int,
        host_columns: int,
        staging_columns: int,
        max_num_seqs: int,
        speeds: Speeds,
        num_drafts: int,
    ) -> None:
        longest = max(columns, min(host_columns, staging_columns)) * BLOCK_SIZE
        columns = columns if longest >= MAX_MODEL_LEN else MODEL_COLUMNS
        self.pool, self.host_pool = BlockPool(columns * GROUPS), BlockPool(host_columns * GROUPS)
        allocator = BlockAllocator(self.pool, layer_groups=GROUPS, block_size=BLOCK_SIZE, host_pool=self.host_pool)
        self.staging_columns = staging_columns
        self.runner = GhostRunner(allocator)
        config = LayerKvConfig(max_in_flight=8, growth_tokens=4, max_steps_without_prefill=3)
        tiers = OffloadPolicy(
            allocator,
            config,
            staging_columns=staging_columns,
            block_bytes=10,
            cost=lambda: speeds.cost,
            host_bytes_per_s=lambda: speeds.host_bytes_per_s,
        )
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=max_num_seqs,
            token_budget=TOKEN_BUDGET,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
            tiers=tiers,
            cost=lambda: speeds.cost,
            speculation=guesses(num_drafts),
        )

    @invariant()
    def the_host_pool_is_whole(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.host_pool.check()
        if self.plan is not None:
            staged = [item.seq for item in self.plan.items if item.seq.host_groups]
            assert sum(-(-seq.num_tokens // BLOCK_SIZE) for seq in staged) <= self.staging_columns
            assert all(
                item.stop <= -(-item.seq.num_tokens // BLOCK_SIZE) * BLOCK_SIZE
                for item in self.plan.items
                if item.seq.host_groups
            )

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            self.host_pool.check_idle()


TieredMachine.set_out = None  # type: ignore[assignment,method-assign]
TestTieredDecode = TieredMachine.TestCase
TestTieredDecode.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)


# --- rules, one by one ---


class Bench:
    """A tiered scheduler on ghost KV, stepped by hand; each step takes `step_s`."""

    def __init__(
        self,
        *,
        columns: int,
        host_columns: int = 100,
        staging_columns: int = 30,
        max_num_seqs: int = 8,
        speeds: Speeds = FAST,
        step_s: float = 0.02,
    ) -> None:
        self.pool, self.host_pool = BlockPool(columns * GROUPS), BlockPool(host_columns * GROUPS)
        allocator = BlockAllocator(self.pool, layer_groups=GROUPS, block_size=BLOCK_SIZE, host_pool=self.host_pool)
        self.runner = GhostRunner(allocator)
        self.tiers = OffloadPolicy(
            allocator,
            LayerKvConfig(max_in_flight=64, growth_tokens=4, max_steps_without_prefill=4),
            staging_columns=staging_columns,
            block_bytes=10,
            cost=lambda: speeds.cost,
            host_bytes_per_s=lambda: speeds.host_bytes_per_s,
        )
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=max_num_seqs,
            token_budget=32,
            max_model_len=1000,
            eos_token_ids=EOS,
            tiers=self.tiers,
            cost=lambda: speeds.cost,
        )
        self.step_s = step_s
        self.now = 0.0

    def hand_over(self, name: str, prompt: list[int], max_tokens: int = 12) -> Sequence:
        """Reserved, received and admitted."""
        seq = sequence(name, prompt, max_tokens)
        assert self.scheduler.can_reserve(seq.num_tokens)
        self.scheduler.reserve(seq)
        self.runner.receive(seq)
        self.scheduler.admit(seq.key, next_token(prompt))
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self.now += self.step_s
        for emission in self.scheduler.finish_step(plan, self.runner.execute(plan)):
            before = emission.seq.tokens(0, emission.seq.num_tokens - 1)
            assert emission.token.token_id == next_token(before)
        return plan

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            self.step()
            if not (self.scheduler.num_running or self.scheduler.num_waiting):
                self.pool.check_idle()
                self.host_pool.check_idle()
                return
        raise AssertionError("sequences starve")


def sequence(name: str, prompt: list[int], max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    return Sequence(request_id=name, attempt=0, params=params, prompt_token_ids=prompt)


def _names(plan: StepPlan) -> list[str]:
    return [item.seq.request_id for item in plan.items]


def test_who_lacks_its_adapter_makes_room_before_who_has_its_own() -> None:
    bench = Bench(columns=10, host_columns=40, speeds=Speeds())
    running = bench.hand_over("running", [2] * 16, max_tokens=24)
    waiting = bench.hand_over("waiting", [3] * 15)
    waiting.adapter = AdapterSlot("digest", Path("folder"))
    while running.key in bench.scheduler:
        assert not running.host_groups
        bench.step()
    assert waiting.host_groups and bench.scheduler.num_preemptions == 0
    waiting.adapter.loaded = Adapter(lambda _: AdapterLayer(), 0)
    bench.run()


def test_who_lacks_its_adapter_in_host_memory_is_not_preempted_for_blocks_of_the_device() -> None:
    """It has none; and those who want them are too long to be computed from the host, where it would leave room."""
    bench = Bench(columns=12, host_columns=40, staging_columns=4, speeds=Speeds())
    running = [bench.hand_over(name, [2, number] * 8, max_tokens=14) for number, name in enumerate("ab", 3)]
    idle = bench.hand_over("idle", [3] * 4)
    idle.adapter = AdapterSlot("digest", Path("folder"))
    assert len(idle.host_groups) == GROUPS and not any(seq.host_groups for seq in running)
    while any(seq.key in bench.scheduler for seq in running):
        bench.step()
        assert bench.scheduler.state(idle.key) is DecodeState.RUNNING
    assert bench.scheduler.num_preemptions == 1
    idle.adapter.loaded = Adapter(lambda _: AdapterLayer(), 0)
    bench.run()


def test_a_reservation_lands_on_the_host_where_the_device_is_full() -> None:
    bench = Bench(columns=4, host_columns=8)
    first, second = bench.hand_over("first", [2] * 8), bench.hand_over("second", [3] * 8)
    assert (first.host_groups, second.host_groups) == (frozenset(), frozenset(range(GROUPS)))
    assert bench.scheduler.num_paused == 1
    assert not bench.scheduler.can_reserve(24), "neither tier has room"
    assert set(_names(bench.step())) == {"first", "second"}
    bench.run()


def _next_attempt(prompt: list[int], max_tokens: int) -> Sequence:
    """Of the request "r", which has its first token."""
    seq = sequence("r", prompt, max_tokens)
    seq.attempt = 1
    seq.output_token_ids = [next_token(prompt)]
    return seq


def test_a_renewed_reservation_keeps_its_place_on_the_host() -> None:
    bench = Bench(columns=2)
    seq = sequence("r", [2] * 12, 8)
    bench.scheduler.reserve(seq)
    assert seq.host_groups
    newer = _next_attempt([2] * 12, 8)
    assert bench.scheduler.renew(seq.key, newer)
    assert (seq.host_lease, newer.host_groups) == (None, frozenset(range(GROUPS)))
    bench.runner.receive(newer)
    bench.scheduler.admit(newer.key, next_token(newer.tokens(0, 13)))
    bench.run()


def test_a_reservation_on_the_host_that_its_renewal_makes_longer_than_the_ring_is_refused() -> None:
    """Of one whose prompt is split the rest could never be computed, and no other prompt would have the ring."""
    bench = Bench(columns=8, host_columns=20, staging_columns=4)
    bench.hand_over("first", [2] * 28, max_tokens=3)
    seq = sequence("r", [3] * 15, 4)
    bench.scheduler.reserve(seq)
    assert seq.host_groups
    longer = _next_attempt([3] * 15, 4)
    assert not bench.scheduler.renew(seq.key, longer)
    assert bench.scheduler.state(seq.key) is DecodeState.RESERVED
    bench.scheduler.drop(seq.key)
    assert not bench.scheduler.can_reserve(longer.num_tokens), "neither tier has room for it"
    bench.run()
    assert bench.scheduler.can_reserve(longer.num_tokens)


def test_memory_pressure_offloads_and_recomputes_nothing() -> None:
    bench = Bench(columns=10)
    for number in range(4):
        bench.hand_over(f"r{number}", [2, number + 3] * 4, max_tokens=24)
    bench.run()
    assert bench.tiers.num_offloads > 0
    assert bench.tiers.num_restores > 0
    assert bench.scheduler.num_preemptions == 0


def test_recomputing_is_chosen_where_it_is_cheaper_or_the_host_is_full() -> None:
    for bench in (Bench(columns=12, speeds=SLOW_MEMORY), Bench(columns=12, host_columns=1)):
        for number in range(3):
            bench.hand_over(f"r{number}", [2, number + 3] * 4, max_tokens=24)
        bench.run()
        assert bench.tiers.num_offloads == 0
        assert bench.scheduler.num_preemptions > 0


def test_the_ring_bounds_a_step_and_everyone_has_a_turn_in_bounded_time() -> None:
    """Eight sequences on the host, of which the ring takes two at a time."""
    bench = Bench(columns=2, staging_columns=10)
    seqs = [bench.hand_over(f"r{number}", [2, number + 3] * 7, max_tokens=5) for number in range(8)]
    assert all(seq.host_groups for seq in seqs)
    last_turn = dict.fromkeys((seq.request_id for seq in seqs), 0)
    for number in range(1, 17):
        names = _names(bench.step())
        assert 1 <= len(names) <= 2
        last_turn |= dict.fromkeys(names, number)
        assert all(number - last <= 5 for last in last_turn.values()), "someone waits"
    bench.run()


@pytest.mark.parametrize(("host_bytes_per_s", "num_staged"), [(1e3, 1), (7e3, 2), (1e6, 3)])
def test_however_late_the_others_are_what_a_token_s_time_fetches_goes_with_each_step(
    host_bytes_per_s: float, num_staged: int
) -> None:
    """At least one goes, and those on the device are not held up either."""
    bench = Bench(columns=12, step_s=10.0, speeds=replace(FAST, host_bytes_per_s=host_bytes_per_s))
    running = [bench.hand_over(f"d{number}", [2, number + 3] * 2, max_tokens=12) for number in range(3)]
    waiting = [bench.hand_over(f"h{number}", [4, number + 3] * 12, max_tokens=7) for number in range(3)]
    assert [bool(seq.host_groups) for seq in (*running, *waiting)] == [False] * 3 + [True] * 3
    bench.step()
    turns: Counter[str] = Counter()
    for _ in range(3):
        names = _names(bench.step())
        assert {"d0", "d1", "d2"} <= set(names)
        assert len(names) == 3 + num_staged
        turns.update(name for name in names if name.startswith("h"))
    assert set(turns.values()) == {num_staged}, "in turn"
    assert bench.tiers.num_restores == 0, "they stay where they are"


def test_a_prompt_is_computed_beside_late_decodes_every_so_often() -> None:
    bench = Bench(columns=40, speeds=LATE, step_s=1.0)
    bench.hand_over("running", [2, 3], max_tokens=60).tpot_s = 1.06  # hardly more than a step takes without a prompt
    bench.step()
    bench.scheduler.add(sequence("prompt", [5] * 120, 2))
    with_chunk = ["prompt" in _names(bench.step()) for _ in range(15)]
    assert with_chunk == ([False] * 4 + [True]) * 3


def test_a_prompt_that_the_device_cannot_hold_is_computed_on_the_host() -> None:
    bench = Bench(columns=4)
    bench.scheduler.add(sequence("long", [5] * 60, 6))
    bench.scheduler.add(sequence("long too", [6] * 60, 6))
    bench.run()


def test_a_sequence_that_outgrows_the_ring_comes_back_to_the_device() -> None:
    bench = Bench(columns=16, staging_columns=6)
    first = bench.hand_over("first", [2] * 40, max_tokens=8)
    second = bench.hand_over("second", [3] * 20, max_tokens=24)
    assert (bool(first.host_groups), bool(second.host_groups)) == (False, True)
    bench.run()


def test_a_move_of_a_step_that_failed_has_not_happened_and_a_drop_waits_for_it() -> None:
    bench = Bench(columns=10)
    seqs = [bench.hand_over(f"r{number}", [2, number + 3] * 4, max_tokens=24) for number in range(4)]
    plan = bench.scheduler.plan(bench.now)
    while not plan.copies:
        bench.scheduler.finish_step(plan, bench.runner.execute(plan))
        plan = bench.scheduler.plan(bench.now)
    moved = next(seq for seq in seqs if seq.key not in {item.seq.key for item in plan.items})
    before = moved.host_groups
    bench.scheduler.drop(moved.key)
    assert moved.key in bench.scheduler
    bench.scheduler.abandon_step()
    assert moved.key not in bench.scheduler
    assert moved.lease is None and moved.host_groups <= before
    bench.run()


def test_a_move_to_where_the_content_is_already_needs_no_step() -> None:
    """Two with the same tokens share what they publish: when the first one ends, its copy is on the device for free."""
    bench = Bench(columns=6, host_columns=6, staging_columns=3, max_num_seqs=1, step_s=0.03)
    for name in ("first", "second"):
        bench.scheduler.add(sequence(name, [2, 2], 12))
    for _ in range(40):
        if not (bench.scheduler.num_running or bench.scheduler.num_waiting):
            break
        plan = bench.step()
        assert not plan.is_empty, "a step of which nothing comes is never made"
    bench.run()
    assert bench.tiers.num_restores > 0
