"""The prefill scheduler's rules, one by one."""

from __future__ import annotations

from pathlib import Path

from engine.cost_model.step_cost import StepCost
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.kv.prefix import block_hashes
from engine.model.adapters import TURN_S, AdapterPool
from engine.sequence import Sequence, SequenceKey
from kernels.adapters import Adapter, AdapterLayer
from kv_transfer.messages.requests import AdapterRef
from prefill_workers.scheduler import PrefillScheduler, moved_tokens, spread
from tests.prefill_workers.prefill_shapes import BLOCK_SIZE, TOKEN_BUDGET, host_rule, prompt_of
from tests.support.ghost_runner import GhostRunner, ghost_loading, kv_of


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
        cost: StepCost | None = None,
        longest: int = 0,
        max_waiting: int = 8,
    ) -> None:
        self.pool = BlockPool(columns * layer_groups)
        self.host_pool = BlockPool(host_columns * layer_groups) if host_columns else None
        allocator = BlockAllocator(
            self.pool, layer_groups=layer_groups, block_size=BLOCK_SIZE, host_pool=self.host_pool
        )
        self.kv: dict[tuple[str, int, int], int] = {}
        self.runner = GhostRunner(allocator, self.kv)
        self.scheduler = PrefillScheduler(
            allocator,
            token_budget=token_budget,
            max_waiting=max_waiting,
            longest=longest,
            staging_columns=staging_columns,
            host_groups=host_rule(allocator, staging_columns, rate),
            cost=lambda: cost,
        )

    def rests_in_host_memory(self, tokens: list[int]) -> None:
        """Whole blocks of these tokens, in one layer group, that the device has no more."""
        assert self.host_pool is not None
        lease = self.host_pool.lease(len(tokens) // BLOCK_SIZE)
        for position, kv in enumerate(kv_of(tokens, 0)):
            column, offset = divmod(position, BLOCK_SIZE)
            self.kv["host", lease.blocks[column], offset] = kv
        for block, prefix_hash in zip(lease.blocks, block_hashes(tokens, BLOCK_SIZE), strict=True):
            self.host_pool.publish(lease, block, (prefix_hash, 0))
        self.host_pool.release(lease)

    def step(self) -> tuple[list[tuple[str, int]], list[str]]:
        """What was computed, and whose first token came."""
        plan = self.scheduler.plan()
        first = self.scheduler.finish_step(plan, self.runner.execute(plan))
        return [(i.seq.request_id, i.num_tokens) for i in plan.items], [seq.request_id for seq, _ in first]


def _cost(base_s: float) -> StepCost:
    """A prompt token takes a second."""
    return StepCost(base_s=base_s, prefill_token_s=1.0, prefill_pair_s=0.0, decode_s=0.0, context_token_s=0.0)


def test_what_a_long_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    bench = Bench()
    for name, length in (("a", 36), ("b", 5), ("c", 9)):
        bench.scheduler.add(prompt_of(name, [ord(name)] * length))
    assert bench.scheduler.num_uncomputed_tokens == 50
    assert bench.step() == ([("a", 16)], [])
    assert bench.step() == ([("a", 16)], [])
    assert bench.step() == ([("a", 4), ("b", 5), ("c", 7)], ["a", "b"])
    assert bench.scheduler.num_uncomputed_tokens == 2
    assert bench.step() == ([("c", 2)], ["c"])


def test_prompts_share_a_step_only_up_to_where_sharing_saves_time() -> None:
    bench = Bench(cost=_cost(base_s=10.7 / 9))
    for name, length in (("a", 4), ("b", 5), ("c", 9), ("d", 17)):
        bench.scheduler.add(prompt_of(name, [ord(name)] * length))
    assert bench.step() == ([("a", 4), ("b", 5), ("c", 1)], ["a", "b"])
    assert bench.step() == ([("c", 8), ("d", 2)], ["c"])
    assert bench.step() == ([("d", 15)], ["d"])  # alone, it has the whole budget


def test_without_room_to_share_every_prompt_has_its_own_steps() -> None:
    bench = Bench(cost=_cost(base_s=0.0))
    for name, length in (("a", 20), ("b", 5)):
        bench.scheduler.add(prompt_of(name, [ord(name)] * length))
    assert [bench.step() for _ in range(3)] == [([("a", 16)], []), ([("a", 4)], ["a"]), ([("b", 5)], ["b"])]


def test_a_prompt_enters_only_when_its_turn_has_come() -> None:
    """Blocks that nothing would be computed into yet could serve others better."""
    bench = Bench()
    bench.scheduler.add(prompt_of("a", [2] * 40))
    bench.scheduler.add(prompt_of("b", [3] * 4))
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    assert bench.pool.num_held == 10


def test_a_prompt_waits_for_blocks_that_are_being_handed_over() -> None:
    bench = Bench(columns=4)
    bench.scheduler.add(prompt_of("a", [2] * 12))
    bench.scheduler.add(prompt_of("b", [3] * 8))
    assert bench.step() == ([("a", 12)], ["a"])
    assert bench.step() == ([], [])
    bench.scheduler.release(SequenceKey("a", 0))
    assert bench.step() == ([("b", 8)], ["b"])
    bench.scheduler.release(SequenceKey("b", 0))
    bench.pool.check_idle()


def test_a_cached_prefix_is_not_computed_again_unless_its_logprobs_are_wanted() -> None:
    bench = Bench()
    prompt = [2] * 11
    for name, logprobs, computed in (("a", False, 11), ("b", False, 3), ("c", True, 11)):
        bench.scheduler.add(prompt_of(name, prompt, logprobs=logprobs))
        assert bench.step() == ([(name, computed)], [name])
        bench.scheduler.release(SequenceKey(name, 0))
    bench.pool.check_idle()


def test_a_prefix_is_brought_to_the_device_however_little_room_its_length_leaves_in_the_step() -> None:
    """There is room for a token of a prompt that begins, and none for one behind so many."""
    cost = StepCost(base_s=1.0, prefill_token_s=0.5, prefill_pair_s=0.1, decode_s=0.0, context_token_s=0.0)
    bench, prompt = Bench(host_columns=20, cost=cost), [2] * 40
    bench.rests_in_host_memory(prompt[:32])
    bench.scheduler.add(prompt_of("short", [3] * 8))
    bench.scheduler.add(prompt_of("long", prompt))
    assert bench.step() == ([("short", 8), ("long", 1)], ["short"])
    assert bench.runner.num_copied_blocks == 32 // BLOCK_SIZE
    assert bench.step() == ([("long", 7)], ["long"])


def test_a_prompt_that_did_not_fit_keeps_nothing_of_its_hit() -> None:
    bench = Bench(columns=4)
    for name, token, length in (("a", 2, 8), ("b", 3, 4)):
        bench.scheduler.add(prompt_of(name, [token] * length))
    bench.step()
    big = prompt_of("c", [2] * 16)
    bench.scheduler.add(big)
    assert bench.step() == ([], [])
    assert (big.lease, big.num_cached, big.num_computed) == (None, 0, 0)
    for name in ("a", "b", "c"):
        bench.scheduler.release(SequenceKey(name, 0))
    bench.pool.check_idle()


def test_one_that_loads_keeps_its_place_and_holds_nobody_up() -> None:
    bench = Bench()
    for name, loading in (("a", True), ("b", False), ("c", False)):
        bench.scheduler.add(prompt_of(name, [ord(name)] * 10), loading=loading)
    assert bench.step() == ([("b", 10), ("c", 6)], ["b"])
    bench.scheduler.loaded(SequenceKey("a", 0))
    bench.scheduler.add(prompt_of("d", [4] * 10))
    assert bench.step() == ([("c", 4), ("a", 10), ("d", 2)], ["c", "a"])


def test_one_that_is_released_while_it_loads_is_gone() -> None:
    bench = Bench()
    bench.scheduler.add(prompt_of("a", [2] * 10), loading=True)
    bench.scheduler.release(SequenceKey("a", 0))
    bench.scheduler.loaded(SequenceKey("a", 0))
    assert (bench.scheduler.num_waiting, bench.step()) == (0, ([], []))


def test_prompts_are_admitted_by_compute_while_others_hold_the_device() -> None:
    """`a` fills the device and is being handed over; `b` is computed from host memory in the meantime."""
    bench = Bench(columns=4, layer_groups=4, host_columns=8, staging_columns=8)
    for name, length in (("a", 16), ("b", 20), ("c", 20)):
        bench.scheduler.add(prompt_of(name, [ord(name)] * length))
    assert bench.step() == ([("a", 16)], ["a"])
    assert bench.step() == ([("b", 16)], [])
    b = bench.scheduler.sequence(SequenceKey("b", 0))
    assert b is not None
    assert b.host_groups == {0, 1, 2, 3}
    assert bench.step() == ([("b", 4)], ["b"])
    assert bench.step() == ([], []), "host memory has no room for c"
    for name in ("a", "b"):
        bench.scheduler.release(SequenceKey(name, 0))
    assert bench.step() == ([("c", 16)], [])


def test_without_a_ring_prompts_wait_for_the_device() -> None:
    bench = Bench(columns=4, layer_groups=4, host_columns=8, staging_columns=0)
    for name in ("a", "b"):
        bench.scheduler.add(prompt_of(name, [ord(name)] * 16))
    assert bench.step() == ([("a", 16)], ["a"])
    assert bench.step() == ([], [])


def test_the_ring_bounds_the_host_resident_prompts_of_a_step() -> None:
    bench = Bench(columns=1, layer_groups=2, host_columns=20, staging_columns=3, token_budget=24)
    for name in ("a", "b"):
        bench.scheduler.add(prompt_of(name, [ord(name)] * 12))
    assert bench.step() == ([("a", 12)], ["a"])
    assert bench.step() == ([("b", 12)], ["b"])


def test_a_published_block_is_never_written_by_who_shares_it() -> None:
    """A hit never covers the last token, so what is computed goes to blocks of one's own."""
    bench = Bench()
    for name in ("a", "b"):
        bench.scheduler.add(prompt_of(name, [2] * 12))
        bench.step()
    a, b = (bench.scheduler.sequence(SequenceKey(name, 0)) for name in ("a", "b"))
    assert a is not None and b is not None
    assert a.block_table is not None and b.block_table is not None
    assert b.num_cached == 8
    assert (a.block_table.view == b.block_table.view).tolist() == [[True, True, False]]


def test_as_few_groups_stay_on_the_device_as_hide_the_transfer() -> None:
    """12 tokens in chunks of 7 move 12 + 7 tokens of each group; computing takes 12 s."""
    allocator = BlockAllocator(BlockPool(400), layer_groups=8, block_size=BLOCK_SIZE, host_pool=BlockPool(400))
    assert moved_tokens(12, TOKEN_BUDGET) == 19
    seq = prompt_of("a", [2] * 12)
    for rate, num_hidden in ((100.0, 8), (19 / 12 * 5.01, 5), (19 / 12 * 1.5, 1), (0.01, 1)):
        assert len(host_rule(allocator, 3, rate)(seq)) == num_hidden
    assert host_rule(allocator, 2, 100.0)(seq) == frozenset(), "longer than the ring"


def test_groups_are_spread_evenly() -> None:
    assert [sorted(spread(count, 8)) for count in (0, 1, 2, 4, 7)] == [
        [],
        [4],
        [2, 6],
        [1, 3, 5, 7],
        [0, 1, 2, 4, 5, 6, 7],
    ]
    assert all(len(spread(count, total)) == count for total in range(1, 40) for count in range(total + 1))


def test_prompts_without_a_reservation_are_computed_as_far_as_half_of_the_pool_goes() -> None:
    """And hold up nobody: others overtake, and they go on with their reservation, or as those before them leave."""
    bench = Bench(columns=40)
    half = 20 * BLOCK_SIZE
    kept, second, third = (prompt_of(name, [ord(name)] * (half - 9)) for name in "abc")
    for seq in (kept, second, third):
        bench.scheduler.add(seq, is_reserved=False)
    bench.scheduler.add(prompt_of("d", [3] * 5))
    order = []
    while (step := bench.step())[0]:
        order += step[1]
    assert order == ["a", "d"]
    bench.scheduler.reserved(second.key)
    while (step := bench.step())[0]:
        order += step[1]
    assert order == ["a", "d", "b"]
    bench.scheduler.release(kept.key)
    while (step := bench.step())[0]:
        order += step[1]
    assert order == ["a", "d", "b", "c"]
    bench.scheduler.release(second.key)
    bench.scheduler.add(prompt_of("e", [4] * (half + 1)), is_reserved=False)
    assert bench.step() == ([], []), "it is too long to be kept"


def test_what_is_kept_leaves_room_for_the_longest_prompt_that_decode_holds_blocks_for() -> None:
    """Or these would wait for the kept ones' blocks, and those for the room that decode holds for these."""
    bench = Bench(columns=40, longest=25 * BLOCK_SIZE)
    for name in "ab":
        bench.scheduler.add(prompt_of(name, [ord(name)] * (9 * BLOCK_SIZE)), is_reserved=False)
    bench.scheduler.add(prompt_of("long", [3] * (25 * BLOCK_SIZE)))
    order = []
    while (step := bench.step())[0]:
        order += step[1]
    assert order == ["a", "long"]


def test_short_prompts_are_kept_by_the_whole_columns_that_they_hold() -> None:
    bench = Bench(columns=40, longest=25 * BLOCK_SIZE, max_waiting=41)
    for number in range(40):
        bench.scheduler.add(prompt_of(f"short{number}", [2]), is_reserved=False)
    bench.scheduler.add(prompt_of("long", [3] * (25 * BLOCK_SIZE)))
    order = []
    while (step := bench.step())[0]:
        order += step[1]
    assert order == [*(f"short{number}" for number in range(15)), "long"]


def test_a_prompt_comes_to_its_adapter_s_turn_however_many_want_another() -> None:
    """There is room for one adapter, and three prompts of another one are there before each step."""
    bench, pool, now, num_loads = (
        Bench(),
        AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 0), 1),
        0.0,
        0,
    )

    def come(name: str, adapter: str) -> None:
        seq = prompt_of(name, [ord("a")] * 20)
        seq.adapter, seq.accepted_at = pool.want(adapter, Path(adapter)), now
        bench.scheduler.add(seq)

    step_s, computed = TURN_S / 20, list[str]()
    for number in range(80):
        while bench.scheduler.num_held - ("prompt" not in computed and number > 1) < 3:
            come(f"{number} {bench.scheduler.num_held}", "theirs")
        if number == 1:
            come("prompt", "its own")
        while (slot := pool.next_load(bench.scheduler.adapter_users(), now)) is not None:
            num_loads += 1
            pool.has_loaded(slot, pool.load(slot.digest, slot.folder), now)
        _, first = bench.step()
        for name in first:
            bench.scheduler.release(SequenceKey(name, 0))
        computed += first
        now += step_s
    assert "prompt" in computed and num_loads == 3
    assert 15 < computed.index("prompt") < len(computed) / 2, "theirs had turns before it, and after"


async def test_hundreds_whose_adapter_finds_no_place_are_turned_away_together() -> None:
    """Each that leaves has the worker look again who may go on."""
    bench, pool, told = (
        Bench(),
        AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 0), 1),
        list[str](),
    )

    def come(name: str, adapter: str) -> None:
        seq = prompt_of(name, [ord("a")] * 20)
        seq.adapter = loading.want(AdapterRef(name=adapter, digest=adapter, folder=adapter))
        bench.scheduler.add(seq)

    def leave(seq: Sequence, retry_after_s: float) -> None:
        told.append(seq.request_id)
        bench.scheduler.release(seq.key)
        loading.retry()

    loading = ghost_loading(pool, bench.scheduler.adapter_users, leave, wait_s=0.0)
    come("runs", "theirs")
    slot = pool.next_load(bench.scheduler.adapter_users(), 0.0)
    assert slot is not None
    pool.has_loaded(slot, pool.load(slot.digest, slot.folder), 0.0)
    names = [str(number) for number in range(1_000)]
    for name in names:
        come(name, "its own")
    loading.retry()
    assert told == names
    assert bench.scheduler.num_held == 1
    await loading.close()
