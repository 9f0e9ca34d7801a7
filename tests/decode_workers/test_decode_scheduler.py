"""The decode scheduler under everything that can come between two steps."""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_workers.scheduler import DecodeScheduler, DecodeState, Emission
from engine.cost_model.costs import StepCosts
from engine.cost_model.step_cost import StepCost
from engine.drafting.drafter import Draft, DrafterName
from engine.drafting.speculation import Speculation
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, SequenceKey, StepPlan, finish_reason
from kv_transfer.worker.sequences import NUM_ALONE
from tests.support.ghost_runner import VOCAB_SIZE, GhostRunner, chain_of, next_token
from tests.support.thoroughness import examples

EOS = frozenset({0, 1})
BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
MAX_NUM_SEQS = 4
TOKEN_BUDGET = 9
NO_COST = StepCost(base_s=0.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_s=0.0, context_token_s=0.0)

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
first_parts = st.sampled_from([0, 0, 1, 4, 7])  # tokens of a split prompt that another worker computes
num_alone = st.sampled_from([0, 0, NUM_ALONE])  # of a request that made a worker fail, perhaps
some = st.integers(0, 2**16)


class Guesser:
    """Right as often as not: of its drafts, now all are, now none, now the first ones."""

    name: DrafterName = "lookup"

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        state = chain_of(seq.tokens(0, seq.num_tokens))
        num_right, num_drafts = state // 5 % (most + 1), 1 + state // 11 % most
        token_ids: list[int] = []
        while len(token_ids) < num_drafts:
            right = next_token([*seq.tokens(0, seq.num_tokens), *token_ids])
            token_ids.append(right if len(token_ids) < num_right else (right + 1) % VOCAB_SIZE)
        return Draft(tuple(token_ids), self.name, 1)

    def ended(self, seq: Sequence) -> None:
        pass


def guesses(num_drafts: int) -> Speculation | None:
    """So many, by a `Guesser`, in every step that may have some; 0: none at all."""
    return Speculation([Guesser()], StepCosts(NO_COST), fixed=num_drafts) if num_drafts else None


@dataclasses.dataclass
class Story:
    """What must become of one sequence: its tokens are known from the start."""

    seq: Sequence
    next_index: int
    gets_prompt_logprobs: bool
    at_home: bool = True  # the scheduler has it
    hands_over: bool = False


class DecodeMachine(RuleBasedStateMachine):
    patience = 4  # steps for each token that is left, at most

    def __init__(self) -> None:
        super().__init__()
        self.stories: dict[SequenceKey, Story] = {}
        self.plan: StepPlan | None = None
        self.ahead: StepPlan | None = None  # planned before `plan` was finished
        self.lingering: set[SequenceKey] = set()  # ended or dropped, and held for steps in flight or hand-offs
        self.sources: set[SequenceKey] = set()  # that a hand-off reads, or will
        self.num_requests = 0
        self.now = 0.0

    @initialize(
        layer_groups=st.integers(1, 2),
        columns=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 12),
        num_drafts=st.sampled_from([0, 1, 3, 8]),
    )
    def set_out(self, layer_groups: int, columns: int, num_drafts: int) -> None:
        self.pool = BlockPool(columns * layer_groups)
        allocator = BlockAllocator(self.pool, layer_groups=layer_groups, block_size=BLOCK_SIZE)
        self.runner = GhostRunner(allocator)
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=MAX_NUM_SEQS,
            token_budget=TOKEN_BUDGET,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
            speculation=guesses(num_drafts),
        )

    # --- requests ---

    @rule(
        prompt=prompts,
        params=params,
        prior=st.integers(0, 5),
        hands_over=st.sampled_from([False, False, True]),
        num_alone=num_alone,
    )
    def add(self, prompt: list[int], params: SamplingParams, prior: int, hands_over: bool, num_alone: int) -> None:
        seq = self._sequence(prompt, params, prior, num_alone)
        self.scheduler.add(seq, hands_over=hands_over)
        self._tell(seq)
        self.stories[seq.key].hands_over = hands_over
        if hands_over:
            self.sources.add(seq.key)

    @precondition(lambda self: self.sources)
    @rule(which=some)
    def release(self, which: int) -> None:
        """Its hand-off is over, in whatever way, at any moment."""
        key = sorted(self.sources)[which % len(self.sources)]
        self.sources.remove(key)
        self.scheduler.release(key)
        self.stories.pop(key, None)
        self.lingering |= {key} & {key for key in [key] if key in self.scheduler}
        self._check_lingering(between_steps=False)
        self.scheduler.release(SequenceKey("never heard of", 0))

    @rule(prompt=prompts, params=params, prior=st.integers(0, 5), num_alone=num_alone, first_part=first_parts)
    def reserve(self, prompt: list[int], params: SamplingParams, prior: int, num_alone: int, first_part: int) -> None:
        seq = _split(self._sequence(prompt, params, prior, num_alone), first_part)
        if self.scheduler.can_reserve(seq.num_tokens):
            self.scheduler.reserve(seq)
            self._tell(seq)

    @precondition(lambda self: self._reserved())
    @rule(which=some, num_more=st.integers(0, 6), first_part=first_parts)
    def renew(self, which: int, num_more: int, first_part: int) -> None:
        """A newer attempt, to which its gateway got some more tokens."""
        old = self._pick(self._reserved(), which).seq
        seq = _split(self._attempt_after(old, num_more), first_part)
        taken = self.scheduler.renew(old.key, seq)
        if taken:
            del self.stories[old.key]
            self._tell(seq)
        assert (old.key in self.scheduler) is not taken

    @precondition(lambda self: self._reserved())
    @rule(which=some)
    def admit(self, which: int) -> None:
        """The KV arrives, or its first part. Prefill hands nothing over that ends with its first token."""
        story = self._pick(self._reserved(), which)
        seq = story.seq
        if seq.num_received:
            self.runner.receive(seq)
            self.scheduler.admit(seq.key, None)
            return
        first_token = next_token(seq.tokens(0, seq.num_tokens))
        if _ends_with(seq, first_token):
            self.scheduler.drop(seq.key)
            del self.stories[seq.key]
            return
        self.runner.receive(seq)
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
            assert self.plan is not None or key in self.sources, "nothing is in flight, so it can go at once"
            self.lingering.add(key)
        self.scheduler.drop(SequenceKey("never heard of", 0))
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
        assert len(keys) == 1 or not any(item.seq.num_alone for item in plan.items), "a suspect's step is shared"
        if plan.is_empty:
            assert self._reserved() or self.sources or not self.stories, "there is work, and nothing is done"
            for seq in self.scheduler.stuck():
                assert self._reserved() and seq.key in self.sources
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
        assert not any(item.seq.num_alone for item in plan.items), "a suspect's steps are known before they begin"
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
    @rule(then=st.sampled_from(["lose all", "try again", "suspect all"]))
    def fail_step(self, then: str) -> None:
        """Everything it held is given up, or it is simply tried again, or each on its own, as the worker does. With it
        goes what was planned ahead."""
        failed = [plan for plan in (self.plan, self.ahead) if plan is not None]
        for plan in failed:
            self.plan, self.ahead = self.ahead, None
            self.scheduler.abandon_step()
            self._check_lingering()
            if then == "suspect all" and plan is failed[0]:
                self.scheduler.suspect(plan, None)
            for item in plan.items if then == "lose all" else ():
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
            if state in (DecodeState.RUNNING, DecodeState.HANDING_OVER):
                assert story.seq.num_uncomputed == 1
                assert story.hands_over is (state is DecodeState.HANDING_OVER)
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
            for key in sorted(self.sources):
                if self.scheduler.state(key) in (DecodeState.HANDING_OVER, DecodeState.ENDED):
                    self.sources.remove(key)
                    self.scheduler.release(key)
                    self.stories.pop(key, None)
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

    def _sequence(self, prompt: list[int], params: SamplingParams, num_prior: int, num_alone: int = 0) -> Sequence:
        """A new request's, of which an earlier attempt may have brought some tokens."""
        self.num_requests += 1
        seq = Sequence(
            request_id=f"r{self.num_requests}",
            attempt=min(num_prior, 1),
            params=params,
            prompt_token_ids=prompt,
            num_alone=num_alone,
            tpot_s=1.0 if self.num_requests % 2 else None,  # beside prompts nobody else has drafts
        )
        return self._grown(seq, num_prior)

    def _attempt_after(self, old: Sequence, num_more: int) -> Sequence:
        seq = Sequence(
            request_id=old.request_id,
            attempt=old.attempt + 1,
            params=old.params,
            prompt_token_ids=old.prompt_token_ids,
            output_token_ids=list(old.output_token_ids),
            tpot_s=old.tpot_s,
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
        longest = None if story.hands_over else MAX_MODEL_LEN
        then = dataclasses.replace(emission.seq, output_token_ids=outputs[: emission.index + 1])
        assert emission.finish == finish_reason(then, EOS, longest)
        assert not story.hands_over or emission.index == emission.seq.num_prior_output, "the others come elsewhere"
        self._take_prompt_logprobs(story, emission)
        story.next_index += 1
        if emission.finish is not None:
            del self.stories[emission.seq.key]
            if emission.seq.key in self.scheduler:
                assert self._is_held(emission.seq.key), "nothing holds it"
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

    def _check_lingering(self, between_steps: bool = True) -> None:
        """What has ended is held exactly as long as a step in flight uses it, or a hand-off."""
        held = {key for key in self.lingering if self._is_held(key)}
        self.lingering = held if between_steps else {key for key in self.lingering if key in self.scheduler}
        assert held <= self.lingering
        assert all(self.scheduler.state(key) is DecodeState.ENDED for key in self.lingering)
        assert not any(self.scheduler.state(key) is DecodeState.ENDED for key in self.stories)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.stories.keys() | self.lingering)

    def _is_held(self, key: SequenceKey) -> bool:
        """After a step is over."""
        in_step = self.plan is not None and any(item.seq.key == key for item in self.plan.items)
        return in_step or key in self.sources


def _split(seq: Sequence, first_part: int) -> Sequence:
    """With a first part that another worker computes, where that leaves something to compute here."""
    if first_part < seq.num_tokens and not seq.wants_prompt_logprobs:
        seq.num_received = first_part
    return seq


def _ends_with(seq: Sequence, token: int) -> bool:
    longer = dataclasses.replace(seq, output_token_ids=[*seq.output_token_ids, token])
    return finish_reason(longer, EOS, MAX_MODEL_LEN) is not None


TestDecodeScheduler = DecodeMachine.TestCase
TestDecodeScheduler.settings = settings(max_examples=examples(300), stateful_step_count=50, deadline=None)
