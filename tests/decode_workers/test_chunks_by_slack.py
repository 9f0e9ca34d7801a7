"""Prompt tokens of a step: as many as everybody who decodes can bear by what it was promised.

Steps take what they cost, on a clock of the test's.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from decode_workers.offload_policy import OffloadPolicy
from decode_workers.pacing import MAX_STEPS_WITHOUT_PREFILL, LayerKvConfig
from decode_workers.scheduler import DecodeScheduler
from engine.cost_model.costs import StepCosts
from engine.cost_model.fit import scaled
from engine.cost_model.step_cost import DECODES_PART, StepCost, StepWork
from engine.cost_model.step_room import LEAST_CHUNK
from engine.drafting.drafter import Draft, DrafterName
from engine.drafting.speculation import Speculation
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, StepPlan
from tests.support.ghost_runner import GhostRunner, next_token

COST = StepCost(base_s=0.01, prefill_token_s=1e-3, prefill_pair_s=1e-7, decode_s=1e-3, context_token_s=1e-7)
BLOCK_SIZE, BOUND = 16, 4096
names = (f"s{number}" for number in itertools.count())


def seq(
    prompt_tokens: int, max_tokens: int = 10_000, *, gap_s: float | None = None, tpot_s: float | None = None
) -> Sequence:
    return Sequence(
        request_id=next(names),
        attempt=0,
        params=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
        prompt_token_ids=[2] * prompt_tokens,
        cache_salt=str(prompt_tokens),
        gap_s=gap_s,
        tpot_s=tpot_s,
    )


class Bench:
    """Decodes beside prompts. `times`: when each sequence's tokens came."""

    def __init__(
        self,
        cost: StepCost | None = COST,
        *,
        layerkv: bool = False,
        columns: int = 2000,
        speculation: Speculation | None = None,
    ) -> None:
        allocator = BlockAllocator(
            BlockPool(columns),
            layer_groups=1,
            block_size=BLOCK_SIZE,
            prefix_caching=False,
            host_pool=BlockPool(50) if layerkv else None,
        )
        self.runner = GhostRunner(allocator)
        tiers = None
        if layerkv:
            tiers = OffloadPolicy(
                allocator,
                LayerKvConfig(),
                staging_columns=10,
                block_bytes=10,
                cost=lambda: cost,
                host_bytes_per_s=lambda: 1e9,
            )
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=64,
            token_budget=BOUND + 64,
            max_model_len=columns * BLOCK_SIZE,
            eos_token_ids=frozenset(),
            tiers=tiers,
            cost=lambda: cost,
            speculation=speculation,
        )
        self.now = 0.0
        self.times: dict[Sequence, list[float]] = {}

    def decode(self, *seqs: Sequence) -> None:
        """They are handed over with their first token."""
        for new in seqs:
            self.scheduler.reserve(new)
            self.runner.receive(new)
            self.scheduler.admit(new.key, 3, self.now)
            self.times[new] = [self.now]

    def step(self, late_s: float = 0.0) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self.now += step_s(plan) + late_s
        self.finish(plan)
        return plan

    def finish(self, plan: StepPlan) -> None:
        for emission in self.scheduler.finish_step(plan, self.runner.execute(plan)):
            self.times.setdefault(emission.seq, []).append(self.now)

    def compute(self, prompt: Sequence, most_steps: int = 2000) -> list[int]:
        """All of a prompt: its tokens in each step."""
        self.scheduler.add(prompt)
        chunks: list[int] = []
        for _ in range(most_steps):
            chunks.append(chunk_of(self.step(), prompt))
            if prompt.output_token_ids:
                self.scheduler.drop(prompt.key)
                return chunks
        raise AssertionError("the prompt starves")

    def longest_gap_s(self, which: Sequence) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(self.times[which]))


class Knowing:
    """Drafts what the ghost will say."""

    name: DrafterName = "lookup"

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        token_ids: list[int] = []
        while len(token_ids) < most:
            token_ids.append(next_token([*seq.tokens(0, seq.num_tokens), *token_ids]))
        return Draft(tuple(token_ids), self.name, 1)

    def ended(self, seq: Sequence) -> None:
        pass


def step_s(plan: StepPlan) -> float:
    return COST.step_s(StepWork.of_plan(plan))


def chunk_of(plan: StepPlan, prompt: Sequence) -> int:
    return sum(item.num_tokens for item in plan.items if item.seq is prompt)


@pytest.mark.parametrize("layerkv", [False, True])
def test_the_tightest_promise_sizes_the_step(layerkv: bool) -> None:
    """Of two classes in one batch the one with the shorter gap; when it has gone, the other."""
    bench = Bench(layerkv=layerkv)
    tight, loose = seq(50, 40, gap_s=0.1), seq(50, gap_s=0.25)
    bench.decode(tight, loose)
    chunks = bench.compute(seq(8000))
    assert 0.08 < bench.longest_gap_s(tight) <= 0.1
    assert 0.2 < bench.longest_gap_s(loose) <= 0.25
    beside_both = [chunk for chunk in chunks[:30] if chunk]
    assert len(beside_both) == 30, "the prompt is computed in each step"
    assert max(chunks[45:]) > 1.5 * max(beside_both)


def test_chunks_shrink_as_the_context_grows() -> None:
    """A step costs time, not tokens: behind 6,000 tokens each one takes longer."""
    bench = Bench()
    stream = seq(50, gap_s=0.1)
    bench.decode(stream)
    chunks = bench.compute(seq(6000))
    assert bench.longest_gap_s(stream) <= 0.1
    assert chunks[-2] < 0.7 * chunks[0]


def test_several_prompts_share_the_time() -> None:
    bench = Bench()
    stream = seq(50, gap_s=0.2)
    bench.decode(stream)
    prompts = [seq(60), seq(60), seq(500)]
    for prompt in prompts:
        bench.scheduler.add(prompt)
    plan = bench.step()
    assert [chunk_of(plan, prompt) for prompt in prompts[:2]] == [60, 60]
    assert chunk_of(plan, prompts[2]) >= LEAST_CHUNK
    assert bench.longest_gap_s(stream) <= 0.2


def test_what_was_saved_up_by_the_mean_is_spent_and_no_more() -> None:
    """By a TPOT alone a step may be as long as all tokens so far came early, and the mean is kept at each token."""
    bench = Bench()
    stream = seq(50, tpot_s=0.05)
    bench.decode(stream)
    for _ in range(10):
        bench.step()
    bench.compute(seq(2000))
    times = bench.times[stream]
    assert bench.longest_gap_s(stream) > 0.2, "what ten quick tokens left"
    means = [(at - times[0]) / number for number, at in enumerate(times) if number]
    assert max(means) <= 0.05
    assert means[-2] > 0.045, "and all of it went to the prompt"


def test_tokens_that_are_guessed_beside_a_prompt_leave_it_longer_steps() -> None:
    """With three right drafts a step may last four times as long for the same mean, in time at each token."""
    ends_at: dict[bool, float] = {}
    for guesses in (False, True):
        costs = StepCosts(COST)
        costs.seed(COST)
        speculation = Speculation([Knowing()], costs, fixed=3) if guesses else None
        bench = Bench(speculation=speculation)
        stream, prompt = seq(50, tpot_s=0.02), seq(2000)
        bench.decode(stream)
        chunks = bench.compute(prompt)
        ends_at[guesses] = bench.now
        times = bench.times[stream]
        means = [(at - times[0]) / number for number, at in enumerate(times) if number]
        assert max(means) <= 0.02
        if speculation is not None:
            assert sorted(filter(None, chunks))[len(chunks) // 2] > 50
            assert 1.0 < speculation.drafts_stretch < 1.5, "three more tokens beside a step of eleven"
            assert speculation.tokens_per_step == pytest.approx(4.0, rel=0.01)
    assert ends_at[True] < 0.6 * ends_at[False]


def test_drafts_take_the_room_of_prompts_and_no_more() -> None:
    costs = StepCosts(COST)
    costs.seed(COST)
    bench = Bench(speculation=Speculation([Knowing()], costs, fixed=15))
    stream, prompt = seq(50, tpot_s=0.1), seq(3000)
    bench.decode(stream)
    bench.scheduler.add(prompt)
    plan = bench.step()
    assert len(plan.items[0].drafts) > 10 and chunk_of(plan, prompt) >= LEAST_CHUNK
    assert 0.09 < step_s(plan) <= 0.095


def test_drafts_leave_prompts_half_of_the_time() -> None:
    """Also those of so many streams that theirs alone would fill the time that is promised."""
    chunks: dict[bool, int] = {}
    for guesses in (False, True):
        costs = StepCosts(COST)
        costs.seed(COST)
        knowing = Knowing()
        knowing.name = "grammar"  # who is taken to be right mostly
        bench = Bench(speculation=Speculation([knowing], costs) if guesses else None)
        streams, prompt = [seq(50, tpot_s=0.07) for _ in range(16)], seq(3000)
        bench.decode(*streams)
        bench.scheduler.add(prompt)
        plan = bench.step()
        chunks[guesses] = chunk_of(plan, prompt)
        assert any(item.drafts for item in plan.items) is guesses
    assert chunks[True] >= 0.45 * chunks[False] > LEAST_CHUNK


@pytest.mark.parametrize("gap_s", [0.1, None])
def test_drafts_take_no_time_of_prompts_where_they_lengthen_no_step(gap_s: float | None) -> None:
    """Under a gap, and with nothing promised, a step lasts no longer for the tokens that it brings: without prompts
    there are drafts, and beside one only those of whom a mean was promised."""
    chunks: dict[bool, list[int]] = {}
    for guesses in (False, True):
        costs = StepCosts(COST)
        costs.seed(COST)
        bench = Bench(speculation=Speculation([Knowing()], costs, fixed=3) if guesses else None)
        streams, prompt = [seq(50, gap_s=gap_s) for _ in range(4)], seq(1000)
        bench.decode(*streams)
        assert all(len(item.drafts) == (3 if guesses else 0) for item in bench.step().items)
        chunks[guesses] = bench.compute(prompt)
        assert all(len(item.drafts) == (3 if guesses else 0) for item in bench.step().items)
    assert chunks[True] == chunks[False]
    with_mean = seq(50, tpot_s=0.2)
    bench.decode(with_mean)
    bench.scheduler.add(seq(1000))
    assert [item.seq for item in bench.step().items if item.drafts] == [with_mean]


def test_where_steps_overlap_the_one_without_drafts_is_not_the_first_of_many() -> None:
    costs = StepCosts(COST)
    costs.seed(COST)
    bench = Bench(speculation=Speculation([Knowing()], costs))
    bench.decode(seq(50))
    num_drafts = []
    for _ in range(66):
        plan = bench.scheduler.plan(bench.now)
        assert bench.scheduler.plan_ahead(bench.now).is_empty, "the next one has to know its tokens"
        bench.now += step_s(plan)
        bench.finish(plan)
        num_drafts.append(len(plan.items[0].drafts))
    assert [number for number, count in enumerate(num_drafts, 1) if not count] == [64]


def test_a_late_stream_catches_up_and_does_not_stop_prompts() -> None:
    bench = Bench()
    stream = seq(50, tpot_s=0.1)
    bench.decode(stream)
    bench.step(late_s=0.6)
    chunks = bench.compute(seq(600))
    assert all(chunks), "steps of half of its time per token leave some for prompts"
    assert max(chunks[:8]) <= 36
    times = bench.times[stream]
    assert bench.now - times[0] <= 0.1 * (len(times) - 1), "it is in time again"


def test_a_gap_that_is_late_already_costs_prompts_nothing() -> None:
    bench = Bench()
    stream, prompt = seq(50, gap_s=0.1), seq(500)
    bench.decode(stream)
    bench.now += 0.5
    bench.scheduler.add(prompt)
    assert chunk_of(bench.step(), prompt) > 50


def test_who_could_not_be_in_time_without_prompts_either_holds_nobody_up() -> None:
    hopeless = [seq(50, gap_s=0.01), seq(50, tpot_s=0.01)]
    bench = Bench()
    bench.decode(*hopeless)
    beside_hopeless = bench.compute(seq(1000))
    other = Bench()
    other.decode(seq(50), seq(50))
    assert beside_hopeless == other.compute(seq(1000))


def test_with_nothing_promised_a_step_is_as_long_as_pays() -> None:
    bench = Bench()
    bench.decode(seq(50), seq(50))
    prompt = seq(4000)
    bench.scheduler.add(prompt)
    plan = bench.step()
    decodes_s = COST.step_s(StepWork(decodes=2, context_tokens=102))
    assert step_s(plan) == pytest.approx(decodes_s / DECODES_PART, rel=0.1)


def test_a_prompt_alone_has_the_bound() -> None:
    bench = Bench()
    chunks = bench.compute(seq(10_000))
    assert chunks[0] >= BOUND
    assert sum(chunks) == 10_000


def test_as_long_as_no_cost_is_known_the_bound_decides() -> None:
    bench = Bench(cost=None)
    bench.decode(seq(50, gap_s=0.1))
    prompt = seq(10_000)
    bench.scheduler.add(prompt)
    assert chunk_of(bench.step(), prompt) >= BOUND - 1


def test_a_prompt_gets_a_chunk_now_and_then_however_little_time_there_is() -> None:
    """Decodes alone take nearly all of the gap that was promised: 32 of them 0.042 s, of 0.95 * 0.05 s."""
    bench = Bench()
    streams = [seq(50, gap_s=0.0485) for _ in range(32)]
    bench.decode(*streams)
    chunks = bench.compute(seq(150))
    waits = [len(list(group)) for is_idle, group in itertools.groupby(chunks, lambda chunk: chunk == 0) if is_idle]
    assert waits
    assert max(waits) == MAX_STEPS_WITHOUT_PREFILL
    assert min(chunk for chunk in chunks[:-1] if chunk) >= LEAST_CHUNK
    dear = Bench(dataclasses.replace(COST, prefill_base_s=0.05))  # which any step with prompts takes beside
    dear.decode(*(seq(50, gap_s=0.0485) for _ in range(32)))
    assert min(chunk for chunk in dear.compute(seq(150))[:-1] if chunk) > 30, "what it pays for is used"


@pytest.mark.parametrize("has_company", [False, True], ids=["alone", "beside another prompt"])
def test_so_does_a_prompt_that_shares_no_step(has_company: bool) -> None:
    """It may be what makes workers fail: its steps are nobody else's from the first chunk on."""
    bench = Bench()
    bench.decode(*(seq(50, gap_s=0.0485) for _ in range(32)))
    suspect = seq(150)
    suspect.num_alone = 2
    prompts = [suspect, seq(150)] if has_company else [suspect]
    for prompt in prompts:
        bench.scheduler.add(prompt)
    chunks: list[list[int]] = [[] for _ in prompts]
    while not all(prompt.output_token_ids for prompt in prompts):
        plan = bench.step()
        assert len(plan.items) == 1 or not any(item.seq.num_alone for item in plan.items), "its step is shared"
        for prompt, of_prompt in zip(prompts, chunks, strict=True):
            if not prompt.output_token_ids:
                of_prompt.append(chunk_of(plan, prompt))
                waits = [
                    len(list(group)) for is_idle, group in itertools.groupby(of_prompt, lambda c: not c) if is_idle
                ]
                assert max(waits, default=0) <= MAX_STEPS_WITHOUT_PREFILL + 2, "it starves"  # others may be first
    assert max(map(len, chunks)) > 2 * MAX_STEPS_WITHOUT_PREFILL, "there was time for more"


def test_with_and_without_layerkv_steps_are_the_same() -> None:
    def story(layerkv: bool) -> list[int]:
        bench = Bench(layerkv=layerkv)
        bench.decode(seq(50, 60, gap_s=0.1), seq(70, tpot_s=0.05), seq(20))
        chunks = bench.compute(seq(3000))
        bench.decode(seq(50, gap_s=0.06))
        return chunks + bench.compute(seq(2000))

    assert story(layerkv=True) == story(layerkv=False)


def test_who_is_about_to_decode_waits_no_longer_than_its_gap() -> None:
    """Handed over while a step computes, it has its next token with the one after that."""
    bench = Bench()
    coming, prompt = seq(50, gap_s=0.1), seq(3000)
    bench.scheduler.reserve(coming)
    bench.scheduler.add(prompt)
    plan = bench.scheduler.plan(bench.now)
    assert step_s(plan) > 0.07
    bench.runner.receive(coming)
    bench.scheduler.admit(coming.key, 3, bench.now)
    bench.times[coming] = [bench.now]
    bench.now += step_s(plan)
    bench.finish(plan)
    bench.step()
    assert bench.longest_gap_s(coming) <= 0.1


def test_where_there_is_no_other_step_prompts_do_not_wait_for_who_is_about_to_decode() -> None:
    """Any step with prompts takes longer than its gap bears. It may come in seconds, and until then nobody counts how
    long prompts wait; nor is it for lack of memory that they do."""
    bench = Bench(dataclasses.replace(COST, prefill_base_s=0.05))
    coming, prompt = seq(50, gap_s=0.06), seq(30)
    bench.scheduler.reserve(coming)
    bench.scheduler.add(prompt, hands_over=True)
    assert chunk_of(bench.step(), prompt) >= LEAST_CHUNK
    assert not bench.scheduler.stuck()


def test_a_first_token_in_flight_has_a_next_one_in_time() -> None:
    """With steps that overlap it is in none of the next one, which is planned before it is known."""
    bench = Bench()
    short = seq(60, gap_s=0.2)
    bench.scheduler.add(short)
    plan = bench.scheduler.plan(bench.now)
    bench.scheduler.add(seq(3000))
    for _ in range(2):
        ahead = bench.scheduler.plan_ahead(bench.now)
        assert ahead.items
        bench.now += step_s(plan)
        bench.finish(plan)
        plan = ahead
    bench.now += step_s(plan)
    bench.finish(plan)
    assert len(bench.times[short]) == 2
    assert 0.1 < bench.longest_gap_s(short) <= 0.2


def test_a_step_planned_ahead_counts_what_the_one_in_flight_still_takes() -> None:
    """Who is in the step in flight has its next gap from that one's end on; who is not waits for both."""
    gaps_s = {}
    for is_in_flight in (True, False):
        bench = Bench()
        stream = seq(50, gap_s=0.3)
        if is_in_flight:
            bench.decode(stream)
        prompt = seq(120)
        bench.scheduler.add(prompt)
        plan = bench.scheduler.plan(bench.now)
        if not is_in_flight:
            bench.decode(stream)
        bench.scheduler.add(seq(3000))
        ahead = bench.scheduler.plan_ahead(bench.now)
        assert any(item.seq is stream for item in ahead.items)
        bench.now += step_s(plan)
        bench.finish(plan)
        bench.now += step_s(ahead)
        bench.finish(ahead)
        gaps_s[is_in_flight] = bench.longest_gap_s(stream)
        assert step_s(plan) > 0.1
        assert 0.2 < gaps_s[is_in_flight] <= 0.3


def test_a_mean_that_careful_steps_would_miss_and_usual_ones_keep_is_kept() -> None:
    """Steps are planned by what nearly all stay below. By that a crowd would be late without prompts, too; in the mean
    it is not, and it stays in time beside a prompt, which has a chunk at least now and then."""
    careful = dataclasses.replace(scaled(COST, 1.3), margin=1.3)
    bench = Bench(careful)
    crowd = [seq(50, tpot_s=0.025) for _ in range(11)]
    bench.decode(*crowd)
    assert step_s(bench.step()) < 0.025 < careful.step_s(StepWork(decodes=11, context_tokens=11 * 51))
    for _ in range(20):
        bench.step()
    assert len(list(filter(None, bench.compute(seq(300))))) > 1
    for stream in crowd:
        times = bench.times[stream]
        assert times[-1] - times[0] <= 0.025 * (len(times) - 1)
