"""A drafter that is a model: a smaller one, of the same vocabulary, on the device of the one that it drafts for.

It draws its drafts as the sampler would draw tokens: with the sequence's parameters, and the noise of its seed and of
their positions. So a draft is right where both models' opinions lead to the same token under the same noise, which is
more often than by draws of its own (Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative
Decoding", arXiv:2408.07978).

Its KV lies in blocks of its own and never leaves its worker: what it lacks of a sequence, be it new here, preempted,
recovered or just told that drafts were wrong, it computes when it is to draw for it next, a part in each step where
that is much. One forward pass draws a draft for all of a step's sequences. How many are worth their passes, says
`engine.drafting.speculation`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from engine.cost_model.step_cost import StepWork
from engine.drafting.drafter import Draft, DrafterName, DraftFiller, DraftingCost
from engine.kv.allocation import BlockAllocator
from engine.sequence import UNDRAWN, ScheduledSequence, Sequence, StepPlan, finish_reason

if TYPE_CHECKING:
    from engine.sampling.grammar import GrammarMasks
    from engine.steps.loading import LoadedModel  # which makes one of these

CATCH_UP_TOKENS: Final = 256
"""Of prompts and the like that a step computes before it draws, in the mean: beyond, others would wait for it."""
_FEW: Final = 16
"""Tokens of a sequence that are computed in any case: as many as a step may have brought."""
_SPREAD_MOST: Final = 64
"""Tokens to come over which it is spread what catching up costs: sequences end, nobody knows when."""


@dataclass(slots=True)
class _Follower:
    """`seq`: a sequence as the drafting model has it, whose last tokens may be drafts. Of its output `num_known` tokens
    are certain."""

    seq: Sequence
    num_known: int

    def catch_up_with(self, seq: Sequence) -> None:
        """What was drafted and is not so is forgotten, and with it its KV, which is written again."""
        ours, known = self.seq.output_token_ids, seq.output_token_ids
        num_same = self.num_known
        while num_same < min(len(ours), len(known)) and ours[num_same] == known[num_same]:
            num_same += 1
        ours[num_same:] = known[num_same:]
        self.num_known = len(known)
        num_valid = min(len(seq.prompt_token_ids) + num_same, seq.num_tokens - 1)  # the last one's logits are needed
        self.seq.num_computed = min(self.seq.num_computed, num_valid)

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(self.seq.output_token_ids[self.num_known :])


class DraftModel:
    """`model` drafts. `propose` is called between steps, `draw` while one is computed, wherever that is.
    `eos_token_ids` are the other model's: nothing is drafted after what ends a sequence.
    """

    name: DrafterName = "model"

    def __init__(self, model: LoadedModel, eos_token_ids: frozenset[int]) -> None:
        self.model = model
        self._allocator = BlockAllocator(
            model.block_pool,
            layer_groups=model.layout.num_layer_groups,
            block_size=model.layout.block_size,
            prefix_caching=model.prefix_caching,
        )
        self._eos_token_ids = eos_token_ids
        self._followers: OrderedDict[Sequence, _Follower] = OrderedDict()  # first those not drawn for the longest
        self._proposed: WeakSet[Sequence] = WeakSet()  # of others nothing is drawn, so nothing is here
        self._ended: list[Sequence] = []  # whose blocks a step may use still
        self.draw = DraftFiller("the draft model", self._draw)

    @property
    def masks(self) -> GrammarMasks | None:
        """By which it draws where a sequence follows a grammar."""
        return self.model.runner.sampler.masks

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        """Drafts to be drawn by the step, and what that will take."""
        self._release_ended()
        most = min(most, self.model.max_model_len - seq.num_tokens)
        if most < 1 or not self.draw.may_plan(seq):
            return None
        self._proposed.add(seq)
        return Draft((UNDRAWN,) * most, self.name, 0, self._drawing(seq))

    def ended(self, seq: Sequence) -> None:
        """Free a sequence's blocks once no step can use them."""
        if seq in self._proposed:
            self._proposed.remove(seq)
            self._ended.append(seq)

    def check_idle(self) -> None:
        """Raises AssertionError if a sequence that has ended holds blocks still."""
        self._release_ended()
        assert not self._followers, f"{len(self._followers)} sequences are drafted for"
        self._allocator.pool.check_idle()

    def _drawing(self, seq: Sequence) -> DraftingCost:
        cost = self.model.costs.recent_cost()
        if cost is None:
            return DraftingCost(0.0, 0.0)  # the first one shows it
        follower = self._followers.get(seq)
        num_lacking = seq.num_tokens - 1 - (0 if follower is None else follower.seq.num_computed)
        before_s, spread = 0.0, 1
        if num_lacking > _FEW:
            before_s = cost.prefill_s(min(num_lacking, CATCH_UP_TOKENS))
            num_left = min(seq.params.max_tokens - seq.num_output_tokens, _SPREAD_MOST)
            spread = max(num_left * CATCH_UP_TOKENS // max(num_lacking, CATCH_UP_TOKENS), 1)
        each_s = cost.step_s(StepWork(decodes=1, context_tokens=seq.num_tokens)) - cost.step_s(StepWork())
        return DraftingCost(cost.step_s(StepWork()), each_s, before_s, spread)

    def _draw(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Draw so many drafts of each sequence; fewer where one ends it, none where it is not caught up with yet.

        Also of those that have ended since the step was planned: the next proposal takes back what they are given here.
        """
        followers = [self._follow(seq) for seq in wanted]
        items, num_left = [], CATCH_UP_TOKENS
        for follower, (seq, count) in zip(followers, wanted.items(), strict=True):
            num_lacking = follower.seq.num_uncomputed
            num_tokens = num_lacking if num_lacking <= _FEW else min(num_lacking, num_left)
            if num_tokens and self._make_room(follower.seq, seq.num_tokens + count - 1, wanted):
                items.append(ScheduledSequence(follower.seq, num_tokens))
                num_left -= min(num_tokens, num_left)
        self._pass(items)
        for item in items:
            self._allocator.publish(item.seq)  # now, without drafts: those may not stay
        for number in range(1, max(wanted.values())):
            self._pass(
                [
                    ScheduledSequence(follower.seq, 1)
                    for follower, count in zip(followers, wanted.values(), strict=True)
                    if len(follower.drafts) == number < count and not finish_reason(follower.seq, self._eos_token_ids)
                ]
            )
        return {seq: follower.drafts for seq, follower in zip(wanted, followers, strict=True)}

    def _pass(self, items: list[ScheduledSequence]) -> None:
        """One forward pass; those whose last token is in it have another one after it."""
        if not items:
            return
        began = time.perf_counter()
        output = self.model.runner.execute(StepPlan(tuple(items)))
        self.model.costs.observe(_work(items), time.perf_counter() - began)
        for item, sampled in zip(items, output.sampled, strict=True):
            item.seq.num_computed += item.num_tokens
            if sampled is not None:
                item.seq.output_token_ids.append(sampled.token_id)

    def _follow(self, seq: Sequence) -> _Follower:
        follower = self._followers.get(seq)
        if follower is None:
            ours = Sequence(
                request_id=seq.request_id,
                attempt=seq.attempt,
                params=replace(seq.params, logprobs=None, prompt_logprobs=None),
                prompt_token_ids=seq.prompt_token_ids,
                output_token_ids=list(seq.output_token_ids),
                cache_salt=seq.cache_salt,
            )
            self._allocator.open(ours, use_cache=True)
            follower = self._followers[seq] = _Follower(ours, len(seq.output_token_ids))
        else:
            follower.catch_up_with(seq)
            self._followers.move_to_end(seq)
        return follower

    def _make_room(self, ours: Sequence, num_tokens: int, wanted: Collection[Sequence]) -> bool:
        """Make room for a sequence, if need be from those that were not drawn for the longest: they are computed again
        when they are."""
        while not self._allocator.grow(ours, num_tokens):
            idle = next((seq for seq in self._followers if seq not in wanted), None)
            if idle is None:
                return False
            self._release(idle)
        return True

    def _release_ended(self) -> None:
        while self._ended:
            self._release(self._ended.pop())

    def _release(self, seq: Sequence) -> None:
        if (follower := self._followers.pop(seq, None)) is not None:
            self._allocator.release(follower.seq)


def _work(items: list[ScheduledSequence]) -> StepWork:
    """What a pass computes: the few tokens that a step has brought cost what decoding ones do."""
    work = StepWork()
    for item in items:
        if item.num_tokens > _FEW:
            work = work.plus_prefill(item.num_tokens, item.start)
        else:
            work += StepWork(decodes=item.num_tokens, context_tokens=item.num_tokens * item.stop)
    return work
