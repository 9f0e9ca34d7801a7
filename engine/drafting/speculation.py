"""Which sequences of a step are drafted for, by whom, and how much: as many tokens a second as can be had.

The decode scheduler asks it in each step, and tells it what became of the drafts. It learns how often each drafter is
right, of each sequence and of all, and what rows cost beside the step (`RowCosts`). A slot, which is
the n-th draft of a sequence, is filled with the probability that it and all before it are right; slots are taken in
falling order while that brings more tokens a second (Liu et al., "TurboSpec", arXiv:2406.14066). Beside prompts a draft
takes the time of a prompt's token, and is worth it where a token takes longer in a step of decodes alone. Where drafts
do not pay, one is tried now and then, for a small part of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from engine.cost_model.costs import StepCosts
from engine.cost_model.step_cost import StepCost, StepWork
from engine.drafting.drafter import Draft, Drafter, DrafterName, DraftingCost
from engine.drafting.lookup import HistoryDrafter, LookupDrafter, PredictionDrafter
from engine.sampling.grammar import GrammarMasks
from engine.sequence import ScheduledSequence, Sequence, StepOutput, StepPlan

MOST_DRAFTS: Final = 15
"""Of a sequence in a step."""
MOST_SLOTS: Final = 64
"""In a step: beyond, rows cost what prompts' do."""
_SELDOM: Final = 0.02
"""A slot less likely right is not considered: where drafts are wrong, weighing them would cost more than they bring."""
_TRIED: Final = 0.003
"""Of the time of steps, what goes into drafts that are not expected to pay."""
_ASSUMED: Final[dict[DrafterName, float]] = {
    "prediction": 0.7,
    "grammar": 0.9,
    "lookup": 0.4,
    "history": 0.4,
    "model": 0.6,
    "heads": 0.5,
}
_PRIOR, _KEPT, _KEPT_OF_ALL = 8.0, 0.95, 0.99
"""What is known of all counts as so many drafts of one sequence; of older drafts, what counts beside a newer one."""
_PLAIN_EVERY: Final = 64
"""Steps without prompts of which one has no drafts, whatever they bring: beside those it shows what they cost."""
_KEPT_OF_STEPS: Final = 0.98
"""Of what steps brought their sequences, what counts beside the next step."""
_WORTH: Final = 1.05
"""Times as many tokens a second, to be worth drafting: those that are taken look better than they are."""
_VAIN, _SELDOMEST = 3, 16
"""Steps for which drafts are asked for in vain, before there are steps in between: 1, 2, 4, and so on, to that many."""
_DONE_AFTER: Final = 2.0
"""Times that asking takes, to have gained nothing: drafts are verified and told of, too."""
_NEW: Final = 8
"""Times that a sequence is asked for in any case: what others copied in vain says nothing of what it copies."""
_LIKELY: Final = 0.6
"""Right so often: no other drafter is asked."""
_BEHIND: Final = 2.0
"""Times that a token counts whose sequence is late."""


class GrammarDrafter:
    """Drafts what a sequence's grammar leaves: where all that may come next begins with the same text, that text, such
    as names of properties and what stands between values.

    How it is cut into tokens is the model's own to choose, so these are drafts as any others: of the tokens that the
    tokenizer makes of it, which models nearly always write. `masks`: the sampler's, which must not be at work
    meanwhile."""

    name: DrafterName = "grammar"

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        token_ids = self._masks.forced_tokens(seq)[:most]
        return Draft(token_ids, self.name, 0) if token_ids else None

    def ended(self, seq: Sequence) -> None:
        pass  # the state of its grammar goes with it


def drafters_of(
    names: Iterable[DrafterName], masks: GrammarMasks | None = None, draft_model: Drafter | None = None
) -> list[Drafter]:
    """`masks` None: nothing is sampled by a grammar. `draft_model`, or heads; None: there is neither."""
    makers: dict[DrafterName, Callable[[], Drafter]] = {
        "prediction": PredictionDrafter,
        "lookup": LookupDrafter,
        "history": HistoryDrafter,
    }
    if masks is not None:
        makers["grammar"] = lambda: GrammarDrafter(masks)
    if draft_model is not None:
        makers[draft_model.name] = lambda: draft_model
    return [makers[name]() for name in names if name in makers]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """`drafters` in the order in which they are asked; `model` and `heads` only where they are loaded. `fixed`: so many
    drafts for everyone who may have some, whenever there are some, for experiments; None: as it pays."""

    drafters: tuple[DrafterName, ...] = ("prediction", "grammar", "lookup", "history", "model", "heads")
    fixed: int | None = None


class _Source(NamedTuple):
    drafter: DrafterName
    closeness: int  # by how much of the text matched before: 0 to 3

    @classmethod
    def of(cls, draft: Draft) -> _Source:
        return cls(draft.drafter, min(draft.num_matched.bit_length(), 3))


@dataclass(slots=True)
class _Acceptance:
    """The share of drafts that were right among those whose predecessors were, with older ones counting less."""

    right: float = 0.0
    wrong: float = 0.0

    def note(self, num_right: int, was_wrong: bool, kept: float) -> None:
        self.right = self.right * kept + num_right
        self.wrong = self.wrong * kept + was_wrong

    def rate(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.right + self.wrong + weight)


@dataclass(slots=True)
class DraftCounts:
    """Tokens, of one drafter."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _State:
    """What is known of one sequence's drafts."""

    acceptances: dict[_Source, _Acceptance] = field(default_factory=dict)
    best_rate: float = 1.0  # of all that drafts of it were from so far
    draft: Draft | None = None  # in the step in flight
    tried_in: int = 0  # the step in which a draft was last tried without hope
    num_asked: int = 0  # times, up to `_NEW`, but for tries
    may_have_drafts: bool = True


class Candidate(NamedTuple):
    """A sequence that decodes in the step. `most`: drafts that it has room for. `is_late`: by what it was promised."""

    seq: Sequence
    most: int
    is_late: bool = False


class Speculation:
    """Decides, for one worker, which sequences have drafts in a step, and how many. `fixed` as in
    `SpeculationConfig`."""

    def __init__(self, drafters: list[Drafter], costs: StepCosts, *, fixed: int | None = None) -> None:
        self.drafters = drafters
        self._costs = costs
        self._fixed = fixed
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()
        self._of_all: dict[_Source, _Acceptance] = {}
        self._step = 0
        self._is_counted = False  # the next one that will have been computed, as it was planned here
        self.is_resting = False  # the step planned last has no drafts for its turn
        self._tried_s = 0.0  # that may be spent on trying
        self._dearest_s = 0.0  # what the next try takes
        self._plain_s = self._try_s = 0.0  # of the plan before: a step without drafts, and what a try took
        self._num_vain = self._asks_from = 0  # plans in a row for which all asking was in vain; the step of the next
        self._num_tokens = self._num_steps = 0.0  # of decoding sequences lately, a step of each
        self.drawing_s = 0.0  # predicted, of what was planned last
        self._stretched = 0.0  # the same steps, each so many times as its drafts made it longer
        self.counts: dict[DrafterName, DraftCounts] = {drafter.name: DraftCounts() for drafter in drafters}

    @classmethod
    def of(
        cls,
        config: SpeculationConfig,
        costs: StepCosts,
        masks: GrammarMasks | None = None,
        draft_model: Drafter | None = None,
    ) -> Speculation:
        return cls(drafters_of(config.drafters, masks, draft_model), costs, fixed=config.fixed)

    def skips(self, seqs: Iterable[Sequence]) -> bool:
        """Whether there is nothing to plan for a step in which these decode: who asked in vain pauses, and nobody is
        new, nor to be tried. Then the step is counted here."""
        step, tried_s = self._step + 1, self._tried_s + _TRIED * self._plain_s
        if step >= self._asks_from or step % _PLAIN_EVERY == 0 or tried_s >= self._try_s:
            return False
        for seq in seqs:
            state = self._states.get(seq)
            if state is None or state.num_asked < _NEW:
                return False
        self._step, self._tried_s = step, tried_s
        self._is_counted, self.is_resting, self.drawing_s = True, False, 0.0
        return True

    def plan(
        self,
        candidates: list[Candidate],
        work: StepWork,
        *,
        most: int,
        longest_s: float = math.inf,
        beside_prompts: bool = False,
    ) -> dict[Sequence, tuple[int, ...]]:
        """Plan at most `most` drafts for a step that has, beside them, the `work` of these sequences' next tokens, and
        perhaps chunks of prompts; none by which it lasts longer than `longest_s` without the prompts."""
        self._step += 1
        self._is_counted = True
        self.is_resting = self._fixed is None and not beside_prompts and self._step % _PLAIN_EVERY == 0
        self.drawing_s = 0.0
        if self._fixed is not None:
            return self._begin(self._fixed_drafts(candidates, self._fixed, most))
        cost = self._costs.recent_cost()
        if cost is None or not candidates or self.is_resting:
            return {}
        plain_s = self._costs.rows.plain_s(work.decodes, cost.step_s(work))
        if not plain_s > 0.0:
            return {}

        def extra_s(num_drafts: int) -> float:
            return self._rows_s(cost, work, num_drafts, beside_prompts)

        least = len(candidates) * (extra_s(2) - extra_s(1)) / plain_s  # of a slot, to be worth its row
        is_asking = self._step >= self._asks_from
        began = time.perf_counter()
        drafts: dict[Sequence, Draft] = {}
        slots: list[tuple[float, int]] = []
        hopeless: list[Candidate] = []
        num_asked = 0
        for index, candidate in enumerate(candidates):
            room = min(candidate.most, MOST_DRAFTS)
            if room <= 0:
                continue
            weight = _BEHIND if candidate.is_late else 1.0
            state = self._state(candidate.seq)
            is_new = state.num_asked < _NEW
            state.num_asked += is_new
            if not (is_asking or is_new) or state.best_rate * weight < least:
                hopeless.append(candidate)
                continue
            num_asked += 1
            draft = self._propose(candidate.seq, room, plain_s)
            if draft is None:
                continue
            drafts[candidate.seq] = draft
            rate = self._rate(state, _Source.of(draft))
            slots += [(weight * probability, index) for probability in _likely(rate, len(draft.token_ids))]
        slots.sort(reverse=True)
        num_slots = max(min(most, MOST_SLOTS, len(slots)), 0)
        bill = _Bill(extra_s, {index: drafts[candidates[index].seq].drawing for _, index in slots[:num_slots]})
        counts = _worth(slots[:num_slots], len(candidates), plain_s, longest_s, bill)
        kept = {candidates[index].seq: _first(drafts[candidates[index].seq], count) for index, count in counts.items()}
        num_kept = sum(counts.values())
        gain_s = sum(chance for chance, _ in slots[:num_kept]) * plain_s / len(candidates) - extra_s(num_kept)
        if kept and gain_s > _DONE_AFTER * (time.perf_counter() - began):
            self._num_vain = self._asks_from = 0
        elif is_asking and num_asked:
            self._num_vain = min(self._num_vain + 1, _VAIN + _SELDOMEST.bit_length())
            self._asks_from = self._step + 1 + min(2**self._num_vain >> _VAIN, _SELDOMEST)
        self._plain_s, self._try_s = plain_s, max(extra_s(1), self._dearest_s)
        self._tried_s += _TRIED * plain_s
        if not kept and most > 0 and plain_s + extra_s(1) <= longest_s:
            kept = self._try(hopeless, drafts, extra_s(1), plain_s, longest_s)
            if kept and not is_asking:  # there is something to copy, or to draw, again
                self._asks_from = 0
        return self._begin(kept)

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> DrafterName:
        """Learn how many of the drafts of `seq` in the step that is over were right; returns whose they were."""
        state = self._state(seq)
        assert state.draft is not None, f"nothing was drafted for {seq.request_id}"
        draft, state.draft = state.draft, None
        was_wrong = num_accepted < num_drafts
        source = _Source.of(draft)
        state.acceptances.setdefault(source, _Acceptance()).note(num_accepted, was_wrong, _KEPT)
        self._of_all.setdefault(source, _Acceptance()).note(num_accepted, was_wrong, _KEPT_OF_ALL)
        state.best_rate = max(self._rate(state, known) for known in state.acceptances)
        if seq.params.grammar is not None:  # what it forces may be yet to come
            state.best_rate = max(state.best_rate, self._rate(state, _Source("grammar", 0)))
        counts = self.counts[draft.drafter]
        counts.drafted += num_drafts
        counts.accepted += num_accepted
        return draft.drafter

    def failed(self, items: Iterable[ScheduledSequence]) -> None:
        """Their step failed, perhaps as a grammar became too complex behind a draft: it makes no others fail."""
        for item in items:
            if item.drafts and item.seq.params.grammar is not None:
                self._state(item.seq).may_have_drafts = False

    def computed(self, plan: StepPlan, output: StepOutput) -> None:
        """A step is over, with drafts or without."""
        self._step += not self._is_counted  # one that was planned ahead
        self._is_counted = False
        decoding = [index for index, item in enumerate(plan.items) if item.num_tokens == 1 and item.samples]
        brought = sum(1 + len(output.following.get(index, ())) for index in decoding)
        if decoding:
            self._num_tokens = self._num_tokens * _KEPT_OF_STEPS + brought
            self._num_steps = self._num_steps * _KEPT_OF_STEPS + len(decoding)
            stretch = self._stretch(plan, output.drawing_s)
            self._stretched = self._stretched * _KEPT_OF_STEPS + len(decoding) * stretch

    @property
    def tokens_per_step(self) -> float:
        """How many tokens a decoding sequence had of each of its steps lately, in the mean."""
        return self._num_tokens / self._num_steps if self._num_steps else 1.0

    @property
    def drafts_stretch(self) -> float:
        """How many times as long these steps took as they would have without drafts, in the mean."""
        return self._stretched / self._num_steps if self._num_steps else 1.0

    def _stretch(self, plan: StepPlan, drawing_s: float) -> float:
        """How many times as long as its decodes alone these took with their drafts."""
        num_drafts = sum(len(item.drafts) for item in plan.items)
        cost = self._costs.recent_cost() if num_drafts or drawing_s else None
        if cost is None:
            return 1.0
        work = StepWork.of_plan(plan)
        decodes = StepWork(decodes=work.decodes, context_tokens=work.context_tokens)
        extra_s = drawing_s + self._rows_s(cost, decodes, num_drafts, work.prefill_tokens > 0)
        return 1.0 + extra_s / cost.step_s(decodes)

    def _rows_s(self, cost: StepCost, work: StepWork, num_drafts: int, beside_prompts: bool) -> float:
        """Seconds that the rows of so many drafts add to a step with the decodes of `work`, and perhaps prompts."""
        if beside_prompts:
            num_cached = work.context_tokens / work.decodes
            return num_drafts * (cost.prefill_token_s + cost.prefill_pair_s * num_cached)
        return self._costs.rows.extra_s(work.decodes, num_drafts, cost.prefill_token_s)

    def ended(self, seq: Sequence) -> None:
        """`seq` generates no more here."""
        self._states.pop(seq, None)
        for drafter in self.drafters:
            drafter.ended(seq)

    def _fixed_drafts(self, candidates: list[Candidate], each: int, most: int) -> dict[Sequence, Draft]:
        drafts = {}
        for candidate in candidates:
            room = min(each, candidate.most, most)
            draft = self._propose(candidate.seq, room) if room > 0 else None
            if draft is not None:
                drafts[candidate.seq] = draft
                most -= len(draft.token_ids)
        return drafts

    def _state(self, seq: Sequence) -> _State:
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(tried_in=self._step)
        return state

    def _propose(self, seq: Sequence, most: int, plain_s: float = math.inf) -> Draft | None:
        """The draft to be checked, of those that the drafters propose: the one that is most likely right. One that has
        yet to be drawn must be the likelier by as much as drawing takes of `plain_s`, a step without drafts. Behind a
        drafter that is right often enough nobody is asked."""
        state = self._state(seq)
        best: Draft | None = None
        best_worth = -math.inf
        for drafter in self.drafters if state.may_have_drafts else ():
            draft = drafter.propose(seq, most)
            if draft is None or not draft.token_ids:
                continue
            rate = self._rate(state, _Source.of(draft))
            drawing_s = 0.0 if draft.drawing is None else draft.drawing.pass_s + draft.drawing.once_s
            worth = rate - drawing_s / plain_s
            if worth > best_worth:
                best, best_worth = draft, worth
            if rate >= _LIKELY:
                break
        return best

    def _rate(self, state: _State, source: _Source) -> float:
        of_all = self._of_all.get(source, _Acceptance()).rate(_ASSUMED[source.drafter], _PRIOR)
        return state.acceptances.get(source, _Acceptance()).rate(of_all, _PRIOR)

    def _try(
        self,
        hopeless: list[Candidate],
        drafts: dict[Sequence, Draft],
        row_s: float,
        plain_s: float,
        longest_s: float,
    ) -> dict[Sequence, Draft]:
        """One draft of whoever has waited longest for a try, if there is one, where the time for that has come
        together."""
        self._tried_s = min(self._tried_s, max(row_s, self._dearest_s, _TRIED * plain_s))
        if self._tried_s < max(row_s, self._dearest_s):
            return {}
        waiting = [candidate.seq for candidate in hopeless] + list(drafts)
        if not waiting:
            return {}
        seq = min(waiting, key=lambda seq: self._state(seq).tried_in)
        draft = drafts.get(seq) or self._propose(seq, 1, plain_s)
        bill = _Bill(lambda count: count * row_s, {0: None if draft is None else draft.drawing})
        bill.add(0)
        self._dearest_s = bill.now_s  # to be waited for, where it is to be drawn
        if draft is not None and self._tried_s < bill.now_s:
            return {}
        self._state(seq).tried_in = self._step
        if draft is None or plain_s + bill.now_s > longest_s:
            return {}
        self._tried_s -= bill.now_s
        self._dearest_s = 0.0
        return {seq: _first(draft, 1)}

    def _begin(self, drafts: dict[Sequence, Draft]) -> dict[Sequence, tuple[int, ...]]:
        bill = _Bill(lambda count: 0.0, {index: draft.drawing for index, draft in enumerate(drafts.values())})
        for index, (seq, draft) in enumerate(drafts.items()):
            self._state(seq).draft = draft
            for _ in () if draft.drawing is None else draft.token_ids:
                bill.add(index)
        self.drawing_s = bill.now_s
        return {seq: draft.token_ids for seq, draft in drafts.items()}


class _Bill:
    """Seconds that slots add to a step, as they are added one by one: of their rows, and of drawing by index, where
    that is to be. `now_s`: in this step; `due_s`: what counts against its tokens, where some of it serves later ones.
    """

    def __init__(self, rows_s: Callable[[int], float], drawings: Mapping[int, DraftingCost | None]) -> None:
        self._rows_s = rows_s
        self._drawings = drawings
        self._num_rows = self._num_passes = 0
        self._drawn: dict[int, int] = {}  # slots of each index
        self._now_s = self._due_s = 0.0  # of drawing

    def add(self, index: int) -> None:
        self._num_rows += 1
        drawing = self._drawings[index]
        if drawing is None:
            return
        added_s = drawing.each_s + (0.0 if self._drawn else drawing.once_s)
        count = self._drawn[index] = self._drawn.get(index, 0) + 1
        if count > self._num_passes:
            self._num_passes = count
            added_s += drawing.pass_s
        self._now_s += added_s + (drawing.before_s if count == 1 else 0.0)
        self._due_s += added_s + (drawing.before_s / drawing.spread if count == 1 else 0.0)

    @property
    def now_s(self) -> float:
        return self._rows_s(self._num_rows) + self._now_s

    @property
    def due_s(self) -> float:
        return self._rows_s(self._num_rows) + self._due_s


def _likely(rate: float, num_drafts: int) -> Iterator[float]:
    """The probability of each draft, if those before it were right so often, up to the first that seldom is."""
    probability = rate
    for _ in range(num_drafts):
        if probability < _SELDOM:
            return
        yield probability
        probability *= rate


def _worth(
    slots: list[tuple[float, int]], num_decodes: int, plain_s: float, longest_s: float, bill: _Bill
) -> dict[int, int]:
    """How many slots of each index bring the most tokens a second, of `slots` in falling order, in a step of
    `longest_s` at most. Those of an index fall, so its first ones do."""
    tokens, best, best_count = float(num_decodes), _WORTH * num_decodes / plain_s, 0
    for count, (probability, index) in enumerate(slots, 1):
        tokens += probability
        bill.add(index)
        rate = tokens / (plain_s + bill.due_s)
        if rate > best and plain_s + bill.now_s <= longest_s:
            best, best_count = rate, count
    counts: dict[int, int] = {}
    for _, index in slots[:best_count]:
        counts[index] = counts.get(index, 0) + 1
    return counts


def _first(draft: Draft, count: int) -> Draft:
    return draft if count >= len(draft.token_ids) else replace(draft, token_ids=draft.token_ids[:count])
