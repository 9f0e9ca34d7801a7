"""The decode scheduler under everything that can come between two steps, and its rules one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_workers.scheduler import DecodeScheduler
from decode_workers.states import DecodeState, Emission
from engine.allocation import BlockAllocator
from engine.block_pool import BlockPool
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceKey, StepPlan
from engine.stopping import FinishReason, finish_reason
from tests.ghost_runner import VOCAB_SIZE, GhostRunner, next_token

EOS = frozenset({0, 1})
BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
MAX_NUM_SEQS = 4
TOKEN_BUDGET = 9

prompts = st.lists(st.integers(2, 3), min_size=1, max_size=14)
params = st.builds(
    lambda max_tokens, min_tokens, ignore_eos, stop, prompt_logprobs: SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        seed=0,
        ignore_eos=ignore_eos,
        stop_token_ids=stop,
        prompt_logprobs=prompt_logprobs,
    ),
    st.integers(1, 12),
    st.sampled_from([0, 0, 3]),
    st.booleans(),
    st.sampled_from([(), (4, 5, 6)]),
    st.sampled_from([None, None, 0]),
)
some = st.integers(0, 2**16)


@dataclasses.dataclass
class Story:
    """What must become of one sequence: its tokens are known from the start."""

    seq: Sequence
    next_index: int
    gets_prompt_logprobs: bool
    at_home: bool = True  # the scheduler has it


class DecodeMachine(RuleBasedStateMachine):
    patience = 4  # steps for each token that is left, at most

    def __init__(self) -> None:
        super().__init__()
        self.stories: dict[SequenceKey, Story] = {}
        self.plan: StepPlan | None = None
        self.ahead: StepPlan | None = None  # planned before `plan` was finished
        self.lingering: set[SequenceKey] = set()  # ended or dropped, and held for steps in flight
        self.num_requests = 0
        self.now = 0.0

    @initialize(layer_groups=st.integers(1, 2), columns=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 12))
    def set_out(self, layer_groups: int, columns: int) -> None:
        self.pool = BlockPool(columns * layer_groups)
        allocator = BlockAllocator(self.pool, layer_groups=layer_groups, block_size=BLOCK_SIZE)
        self.runner = GhostRunner(allocator)
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=MAX_NUM_SEQS,
            token_budget=TOKEN_BUDGET,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
        )

    # --- requests ---

    @rule(prompt=prompts, params=params, prior=st.integers(0, 5))
    def add(self, prompt: list[int], params: SamplingParams, prior: int) -> None:
        seq = self._sequence(prompt, params, prior)
        self.scheduler.add(seq)
        self._tell(seq)

    @rule(prompt=prompts, params=params, prior=st.integers(0, 5))
    def reserve(self, prompt: list[int], params: SamplingParams, prior: int) -> None:
        seq = self._sequence(prompt, params, prior)
        if self.scheduler.can_reserve(seq.num_tokens):
            self.scheduler.reserve(seq)
            self._tell(seq)

    @precondition(lambda self: self._reserved())
    @rule(which=some, num_more=st.integers(0, 6))
    def renew(self, which: int, num_more: int) -> None:
        """A newer attempt, to which its gateway got some more tokens."""
        old = self._pick(self._reserved(), which).seq
        seq = self._attempt_after(old, num_more)
        taken = self.scheduler.renew(old.key, seq)
        if taken:
            del self.stories[old.key]
            self._tell(seq)
        assert (old.key in self.scheduler) is not taken

    @precondition(lambda self: self._reserved())
    @rule(which=some)
    def admit(self, which: int) -> None:
        """The KV arrives. Prefill hands nothing over that ends with its first token."""
        story = self._pick(self._reserved(), which)
        seq = story.seq
        first_token = next_token(seq.tokens(0, seq.num_tokens))
        if _ends_with(seq, first_token):
            self.scheduler.drop(seq.key)
            del self.stories[seq.key]
            return
        self.runner.land(seq)
        self.scheduler.admit(seq.key, first_token)
        story.next_index += 1
        story.gets_prompt_logprobs = False

    @precondition(lambda self: self.stories)
    @rule(which=some)
    def drop(self, which: int) -> None:
        key = self._pick(list(self.stories.values()), which).seq.key
        self.scheduler.drop(key)
        in_step = any(item.seq.key == key for plan in (self.plan, self.ahead) if plan for item in plan.items)
        assert key in self.scheduler if in_step else True
        if key in self.scheduler:
            assert self.plan is not None, "nothing is in flight, so it can go at once"
            self.lingering.add(key)
        self.scheduler.drop(("never heard of", 0))
        del self.stories[key]

    # --- steps ---

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        self.now += 0.03
        plan = self.scheduler.plan(self.now)
        keys = [item.seq.key for item in plan.items]
        assert len(set(keys)) == len(keys) and set(keys) <= self.stories.keys(), "a sequence that is not there"
        assert plan.num_tokens <= TOKEN_BUDGET
        assert not any(self.scheduler.state(key) is DecodeState.RESERVED for key in keys)
        if not (plan.items or plan.copies):
            assert self._reserved() or not self.stories, "there is work, and nothing is done"
            return
        self.plan = plan

    @precondition(lambda self: self.plan is not None and self.ahead is None)
    @rule()
    def begin_ahead(self) -> None:
        """The next step, before what the one in flight brings is known."""
        self.now += 0.03
        plan = self.scheduler.plan_ahead(self.now)
        keys = [item.seq.key for item in plan.items]
        assert len(set(keys)) == len(keys) and set(keys) <= self.stories.keys(), "a sequence that is not there"
        assert plan.num_tokens <= TOKEN_BUDGET
        assert not plan.copies, "what moves has to wait"
        assert all(item.stop <= MAX_MODEL_LEN for item in plan.items)
        self.ahead = plan if plan.items else None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def finish_step(self) -> None:
        assert self.plan is not None
        plan, self.plan, self.ahead = self.plan, self.ahead, None
        lingering = set(self.lingering)
        for emission in self.scheduler.finish_step(plan, self.runner.execute(plan)):
            assert emission.seq.key not in lingering, "a token of a sequence that had ended"
            self._take(emission)
        self._check_lingering()

    @precondition(lambda self: self.plan is not None)
    @rule(lose_all=st.booleans())
    def fail_step(self, lose_all: bool) -> None:
        """Either everything it held is given up, as the worker does, or it is simply tried again. With it goes what was
        planned ahead."""
        failed = [plan for plan in (self.plan, self.ahead) if plan is not None]
        for plan in failed:
            self.plan, self.ahead = self.ahead, None
            self.scheduler.abandon_step()
            self._check_lingering()
            for item in plan.items if lose_all else ():
                if self.stories.pop(item.seq.key, None):
                    self.scheduler.drop(item.seq.key)
                    self.lingering |= {item.seq.key} if item.seq.key in self.scheduler else set()

    # --- what must hold ---

    @invariant()
    def the_pool_is_whole(self) -> None:
        self.pool.check()
        homes = {story.seq.key for story in self.stories.values()}
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(homes | self.lingering)
        assert all(key in self.scheduler for key in homes)

    @invariant()
    def tokens_stay(self) -> None:
        for story in self.stories.values():
            assert len(story.seq.output_token_ids) == story.next_index, "a token was lost or doubled"
            state = self.scheduler.state(story.seq.key)
            if state is DecodeState.RUNNING:
                assert story.seq.num_uncomputed == 1
            steps = [plan for plan in (self.plan, self.ahead) if plan is not None]
            planned = [item.num_tokens for plan in steps for item in plan.items if item.seq is story.seq]
            assert story.seq.num_computing == sum(planned)
            if state in (DecodeState.WAITING, DecodeState.RESERVED):
                assert story.seq.num_computed == 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for story in self._reserved():
            self.scheduler.drop(story.seq.key)
            del self.stories[story.seq.key]
        num_left = sum(len(s.seq.prompt_token_ids) + s.seq.params.max_tokens for s in self.stories.values())
        for _ in range(2 * self.patience * num_left + 8):
            if self.plan is None:
                self.begin_step()
            else:
                self.finish_step()
        assert not self.stories, f"{sorted(self.stories)} starve"
        assert self.scheduler.num_uncomputed_tokens == 0
        self.pool.check_idle()

    # --- helpers ---

    def _reserved(self) -> list[Story]:
        return [s for s in self.stories.values() if self.scheduler.state(s.seq.key) is DecodeState.RESERVED]

    @staticmethod
    def _pick(stories: list[Story], which: int) -> Story:
        return stories[which % len(stories)]

    def _sequence(self, prompt: list[int], params: SamplingParams, num_prior: int) -> Sequence:
        """A new request's, of which an earlier attempt may have brought some tokens."""
        self.num_requests += 1
        seq = Sequence(
            request_id=f"r{self.num_requests}", attempt=min(num_prior, 1), params=params, prompt_token_ids=prompt
        )
        return self._grown(seq, num_prior)

    def _attempt_after(self, old: Sequence, num_more: int) -> Sequence:
        seq = Sequence(
            request_id=old.request_id,
            attempt=old.attempt + 1,
            params=old.params,
            prompt_token_ids=old.prompt_token_ids,
            output_token_ids=list(old.output_token_ids),
        )
        return self._grown(seq, num_more)

    @staticmethod
    def _grown(seq: Sequence, num_more: int) -> Sequence:
        for _ in range(num_more):
            token = next_token(seq.tokens(0, seq.num_tokens))
            if _ends_with(seq, token):
                break
            seq.output_token_ids.append(token)
        seq.num_prior_output = len(seq.output_token_ids)
        return seq

    def _tell(self, seq: Sequence) -> None:
        wants = seq.wants_prompt_logprobs and len(seq.prompt_token_ids) > 1
        self.stories[seq.key] = Story(seq, len(seq.output_token_ids), wants)

    def _take(self, emission: Emission) -> None:
        story = self.stories[emission.seq.key]
        assert emission.index == story.next_index
        outputs = emission.seq.output_token_ids
        assert outputs[emission.index] == emission.token.token_id
        before = emission.seq.prompt_token_ids + outputs[: emission.index]
        assert emission.token.token_id == next_token(before)
        assert emission.finish == finish_reason(emission.seq, EOS, MAX_MODEL_LEN)
        self._take_prompt_logprobs(story, emission)
        story.next_index += 1
        if emission.finish is not None:
            del self.stories[emission.seq.key]
            if emission.seq.key in self.scheduler:
                assert self._is_in_flight(emission.seq.key), "no step holds it"
                self.lingering.add(emission.seq.key)

    @staticmethod
    def _take_prompt_logprobs(story: Story, emission: Emission) -> None:
        if not story.gets_prompt_logprobs:
            assert not emission.prompt_logprobs
            return
        story.gets_prompt_logprobs = False
        assert emission.prompt_logprobs is not None
        positions = [int(judged.logprob) for judged in emission.prompt_logprobs]
        assert positions == list(range(1, len(emission.seq.prompt_token_ids))), "each prompt token once and in order"

    def _check_lingering(self) -> None:
        """What has ended is held exactly as long as a step in flight uses it."""
        self.lingering = {key for key in self.lingering if self._is_in_flight(key)}
        assert all(self.scheduler.state(key) is DecodeState.ENDED for key in self.lingering)
        ended = [key for key in self.scheduler._entries if self.scheduler.state(key) is DecodeState.ENDED]
        assert set(ended) == self.lingering

    def _is_in_flight(self, key: SequenceKey) -> bool:
        """After a step is over."""
        return self.plan is not None and any(item.seq.key == key for item in self.plan.items)


def _ends_with(seq: Sequence, token: int) -> bool:
    longer = dataclasses.replace(seq, output_token_ids=[*seq.output_token_ids, token])
    return finish_reason(longer, EOS, MAX_MODEL_LEN) is not None


TestDecodeScheduler = DecodeMachine.TestCase
TestDecodeScheduler.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


# --- rules, one by one ---


class Bench:
    """A scheduler on ghost KV, stepped by hand."""

    def __init__(self, columns: int = 40, *, max_num_seqs: int = 8, token_budget: int = 32) -> None:
        self.pool = BlockPool(columns)
        allocator = BlockAllocator(self.pool, layer_groups=1, block_size=BLOCK_SIZE)
        self.runner = GhostRunner(allocator)
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=columns * BLOCK_SIZE,
            eos_token_ids=EOS,
        )

    def step(self) -> list[Emission]:
        plan = self.scheduler.plan()
        return self.scheduler.finish_step(plan, self.runner.execute(plan))

    def run(self, max_steps: int = 500) -> list[Emission]:
        emissions = []
        for _ in range(max_steps):
            emissions += self.step()
            if not (self.scheduler.num_running or self.scheduler.num_waiting):
                self.pool.check_idle()
                return emissions
        raise AssertionError("sequences starve")


def _seq(name: str, prompt: list[int], output: list[int] | None = None, **wishes: object) -> Sequence:
    wishes = {"max_tokens": 8, "seed": 0, "ignore_eos": True} | wishes
    return Sequence(
        request_id=name,
        attempt=0,
        params=SamplingParams(**wishes),  # type: ignore[arg-type]
        prompt_token_ids=prompt,
        output_token_ids=list(output or []),
        num_prior_output=len(output or []),
    )


def _expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def _prompt_with(wanted: Callable[[list[int]], bool]) -> list[int]:
    """A prompt whose continuation is of some kind."""
    return next(prompt for n in range(5000) if wanted(_expected(prompt := [2, n % 19 + 2, n // 19 + 2], 8)))


ENDS_AT_2 = _prompt_with(lambda out: [token in EOS for token in out[:3]] == [False, False, True])
TWO_ENDS = _prompt_with(lambda out: [token in EOS for token in out[:5]] == [False, True, False, False, True])


def _end(**wishes: object) -> tuple[int, FinishReason | None]:
    bench = Bench()
    bench.scheduler.add(_seq("r", **({"prompt": ENDS_AT_2} | wishes)))  # type: ignore[arg-type]
    last = bench.run()[-1]
    return last.index + 1, last.finish


def test_end_of_sequence_ends_unless_it_is_to_be_ignored() -> None:
    assert _end(ignore_eos=False) == (3, "stop")
    assert _end(ignore_eos=True) == (8, "length")


def test_end_of_sequence_counts_from_min_tokens_on() -> None:
    assert _end(prompt=TWO_ENDS, ignore_eos=False) == (2, "stop")
    assert _end(prompt=TWO_ENDS, ignore_eos=False, min_tokens=2) == (2, "stop")
    assert _end(prompt=TWO_ENDS, ignore_eos=False, min_tokens=3) == (5, "stop")


def test_stop_tokens_end_even_where_end_of_sequence_is_ignored() -> None:
    outputs = _expected(ENDS_AT_2, 8)
    assert _end(stop_token_ids=(outputs[2],)) == (3, "stop")
    first = outputs.index(outputs[4])
    assert _end(stop_token_ids=(outputs[4],)) == (first + 1, "stop")
    assert _end(stop_token_ids=(VOCAB_SIZE + 5,)) == (8, "length")


def test_stop_wins_over_length_on_the_last_token() -> None:
    assert _end(ignore_eos=False, max_tokens=3) == (3, "stop")
    assert _end(ignore_eos=False, max_tokens=2) == (2, "length")


def test_the_model_s_length_ends_a_sequence() -> None:
    bench = Bench(columns=3)
    bench.scheduler.add(_seq("r", [2] * 7, max_tokens=100))
    last = bench.run()[-1]
    assert (last.seq.num_tokens, last.finish) == (12, "length")


def test_a_recovered_request_goes_on_where_it_stopped() -> None:
    """Its earlier tokens count for `max_tokens` and `min_tokens`, and are not put out again."""
    bench = Bench()
    outputs = _expected([2, 3, 4], 8)
    bench.scheduler.add(_seq("r", [2, 3, 4], outputs[:5], prompt_logprobs=0))
    emissions = bench.run()
    assert [e.index for e in emissions] == [5, 6, 7]
    assert [e.token.token_id for e in emissions] == outputs[5:]
    assert emissions[-1].finish == "length"
    assert all(e.prompt_logprobs is None for e in emissions), "they went out with the very first token"


def test_prompt_logprobs_over_several_chunks_come_whole_with_the_first_token() -> None:
    bench = Bench(token_budget=5)
    bench.scheduler.add(_seq("r", [2, 3] * 9, prompt_logprobs=0))
    emissions = bench.run()
    assert emissions[0].prompt_logprobs is not None
    assert [int(p.logprob) for p in emissions[0].prompt_logprobs] == list(range(1, 18))
    assert all(e.prompt_logprobs is None for e in emissions[1:])


def test_prompt_logprobs_are_computed_where_the_prompt_is_cached() -> None:
    bench = Bench()
    for name in ("first", "second"):
        bench.scheduler.add(_seq(name, [2, 3] * 9, prompt_logprobs=0))
        logprobs = bench.run()[0].prompt_logprobs
        assert logprobs is not None
        assert len(logprobs) == 17


def test_preemption_takes_the_youngest_and_loses_no_token() -> None:
    bench = Bench(columns=10)
    for number in range(4):
        bench.scheduler.add(_seq(f"r{number}", [2, 3, number + 4] * 3, max_tokens=12, prompt_logprobs=0))
    emissions = bench.run()
    assert bench.scheduler.num_preemptions > 0
    ends = [e.seq.request_id for e in emissions if e.finish]
    assert ends == ["r0", "r1", "r2", "r3"], "the older ones are never held up by younger ones"
    for number in range(4):
        mine = [e for e in emissions if e.seq.request_id == f"r{number}"]
        assert [e.index for e in mine] == list(range(12))
        assert [e.token.token_id for e in mine] == _expected([2, 3, number + 4] * 3, 12)
        assert [e.prompt_logprobs is not None for e in mine] == [True] + [False] * 11


def test_the_youngest_is_preempted_and_comes_back_before_those_who_wait() -> None:
    bench = Bench(columns=9, max_num_seqs=3)
    for name in ("old", "middle", "young", "newcomer"):
        bench.scheduler.add(_seq(name, [ord(name[0])] * 8, max_tokens=12))
    seen: list[list[str]] = []
    while "newcomer" not in {name for names in seen for name in names}:
        plan = bench.scheduler.plan()
        seen.append([item.seq.request_id for item in plan.items])
        bench.scheduler.finish_step(plan, bench.runner.execute(plan))
    preempted = seen.index(["old", "middle"])
    returned = next(n for n in range(preempted, len(seen)) if "young" in seen[n])
    assert all("newcomer" not in names for names in seen[:returned])
    bench.run()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    bench = Bench(columns=10)
    first, second = _seq("old", [2] * 12, max_tokens=16), _seq("young", [3] * 12, max_tokens=16)
    bench.scheduler.add(first)
    bench.scheduler.add(second)
    bench.run()
    assert bench.scheduler.num_preemptions == 1
    assert second.num_cached >= 4


def test_no_reservation_while_a_preempted_sequence_waits() -> None:
    bench = Bench(columns=10)
    for name in ("old", "young"):
        bench.scheduler.add(_seq(name, [ord(name[0])] * 12, max_tokens=16))
    while not bench.scheduler.num_waiting or bench.scheduler.num_preemptions == 0:
        bench.step()
    assert bench.pool.num_available >= 2
    assert not bench.scheduler.can_reserve(1)
    bench.run()
    assert bench.scheduler.can_reserve(1)


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    bench = Bench(token_budget=6)
    bench.scheduler.add(_seq("short", [2, 3], max_tokens=20))
    bench.step()
    bench.scheduler.add(_seq("long", [4] * 40, max_tokens=2))
    for _ in range(7):
        plan = bench.scheduler.plan()
        assert [(i.seq.request_id, i.num_tokens) for i in plan.items] == [("short", 1), ("long", 5)]
        assert [e.seq.request_id for e in bench.scheduler.finish_step(plan, bench.runner.execute(plan))] == ["short"]


def test_at_most_max_num_seqs_run() -> None:
    bench = Bench(max_num_seqs=3)
    for number in range(7):
        bench.scheduler.add(_seq(f"r{number}", [2, number]))
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (3, 4)
    assert not bench.scheduler.can_reserve(1)
    bench.run()


def test_a_sequence_is_handed_over_renewed_and_admitted() -> None:
    bench = Bench()
    reserved = _seq("r", [2, 3, 4, 5, 6])
    bench.scheduler.reserve(reserved)
    newer = dataclasses.replace(_seq("r", [2, 3, 4, 5, 6], _expected([2, 3, 4, 5, 6], 4)), attempt=1)
    lease = reserved.lease
    assert bench.scheduler.renew(reserved.key, newer)
    assert newer.lease is lease and reserved.lease is None
    assert reserved.key not in bench.scheduler
    bench.runner.land(newer)
    bench.scheduler.admit(newer.key, _expected([2, 3, 4, 5, 6], 5)[4])
    emissions = bench.run()
    assert [e.token.token_id for e in emissions] == _expected([2, 3, 4, 5, 6], 8)[5:]
    assert [e.index for e in emissions] == [5, 6, 7]


def test_a_renewal_that_does_not_fit_changes_nothing() -> None:
    bench = Bench(columns=3)
    reserved = _seq("r", [2, 3, 4])
    bench.scheduler.reserve(reserved)
    newer = dataclasses.replace(_seq("r", [2, 3, 4], [5] * 10), attempt=1)
    assert not bench.scheduler.renew(reserved.key, newer)
    assert bench.scheduler.state(reserved.key) is DecodeState.RESERVED
    assert newer.lease is None
    bench.scheduler.drop(reserved.key)
    bench.pool.check_idle()


@pytest.mark.parametrize("keeps", ["doomed", "alive"])
def test_blocks_of_a_step_in_flight_are_freed_only_after_it(keeps: str) -> None:
    bench = Bench()
    seq = _seq("r", [2, 3, 4])
    bench.scheduler.add(seq)
    plan = bench.scheduler.plan()
    if keeps == "doomed":
        bench.scheduler.drop(seq.key)
        assert seq.key in bench.scheduler
    assert bench.pool.num_held == 1
    emissions = bench.scheduler.finish_step(plan, bench.runner.execute(plan))
    assert bool(emissions) is (keeps == "alive")
    assert bench.pool.num_held == int(keeps == "alive")
