"""What a worker knows of its own steps' cost: nothing at first, then a seed, and from then on a fit to its steps.

The seed is a calibration where there was one, else an estimate brought to the speed of the first steps. The step
loop reports each step; schedulers, LayerKV and the worker's snapshots ask.

What drafts add is learnt apart (`RowCosts`): little while the weights are what a step waits for, much where products
are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from engine.cost_model.fit import TELLING_STEPS, StepCostFit, StepKind, fit_steps, kind_of, scaled
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import ASSUMED_PREFILL_TOKENS_PER_S, StepCost, StepWork, margin_of

# Enough that one which pays for what libraries make once is seen through, too few to tell much more than the speed.
_SCALING_STEPS = TELLING_STEPS - 1
# Learnt from together: a step leaves nothing of the fit in the processor's caches, so that the first one after it costs
# ten times as much as the next.
_STEPS_AT_ONCE = 16
# Of drafts, as `RowCosts` has them.
_RATE: Final = 0.1  # of the newest step in the means, once there were as many
_HELD_UP: Final = 1.5  # times what a step without drafts was to take: one that took longer was held up
_ASSUMED: Final = 64.0  # that what is assumed counts as, in squares of drafts from their mean: four steps with 4 more
_KNOWN: Final = 2048.0  # likewise, that all steps so far count as at most
_ANCHOR: Final = 4.0  # steps without drafts that a line through those with drafts begins at
_PRIOR_STEPS: Final = 4  # that nothing is known of what a first draft costs counts as
_MOST: Final = 4.0  # times what a prompt's token costs: a draft that takes longer was held up by something else
_FORGOTTEN: Final = 0.9998  # of what a draft is held to cost, after each step without any: it is tried again


class StepCosts:
    """What steps of one model on one device cost. Of `estimate` only the proportions count."""

    def __init__(self, estimate: StepCost) -> None:
        self.estimate = estimate
        self._first: list[tuple[StepWork, float]] = []
        self.is_seeded = False  # steps to come refine what is known already
        self._seed_error = estimate.relative_error
        self._learnt: StepCostFit | None = None
        self._unlearnt: list[tuple[StepWork, float]] = []
        self._cautious: StepCost | None = None
        self._recent: StepCost | None = None
        self.rows = RowCosts()

    def seed(self, cost: StepCost) -> None:
        """Begin with what was measured."""
        self._learnt, self._seed_error, self.is_seeded = StepCostFit(cost), cost.relative_error, True
        self._cautious = self._recent = None
        self._unlearnt.clear()

    def observe(self, work: StepWork, seconds: float) -> None:
        """Take in a step that was computed. One without tokens says nothing and is ignored."""
        if not (work.prefill_tokens or work.decodes):
            return
        cost = self.recent_cost()
        if cost is not None and work.decodes and not work.prefill_tokens:
            self.rows.observe(work.decodes, work.drafts, seconds, cost.step_s(work), cost.prefill_token_s)
        if work.drafts:
            return
        if self.is_seeded:
            self._unlearnt.append((work, seconds))
            if len(self._unlearnt) == _STEPS_AT_ONCE:
                self._learn()
        else:
            self._first.append((work, seconds))
            self._learnt = StepCostFit(fit_steps(self.estimate, self._first))
            self._cautious = self._recent = None
            self.is_seeded = len(self._first) == _SCALING_STEPS

    @property
    def _fit(self) -> StepCostFit | None:
        """The fit to every step so far."""
        self._learn()
        return self._learnt

    def _learn(self) -> None:
        if self._learnt is not None and self._unlearnt:
            for work, seconds in self._unlearnt:
                self._learnt.observe(work, seconds)
            self._unlearnt.clear()
            self._cautious = self._recent = None

    def recent_cost(self) -> StepCost | None:
        """The cost as of the steps that were learnt from last, and cheap: who drafts asks it in each step. None as long
        as nothing was measured."""
        if self._recent is None and self._learnt is not None:
            self._recent = self._learnt.cost()
        return self._recent

    def cost(self) -> StepCost | None:
        """The cost by every step so far. None as long as nothing was measured."""
        fit = self._fit
        return None if fit is None else fit.cost()

    def stretch(self, kind: StepKind) -> float:
        """See `StepCostFit`."""
        fit = self._fit
        return 1.0 if fit is None else fit.stretch(kind)

    def noise(self, kind: StepKind) -> StepNoise:
        """See `StepCostFit`."""
        fit = self._fit
        return StepNoise() if fit is None else fit.noise(kind)

    def predicted_s(self, work: StepWork) -> float | None:
        """Seconds that a step of this work will take, with what the latest steps of its kind took beyond their cost.
        None: too little is known, or it has no tokens."""
        cost = self.cost() if self.is_seeded and (work.prefill_tokens or work.decodes) else None
        if cost is None:
            return None
        drafts_s = self.rows.extra_s(work.decodes, work.drafts, cost.prefill_token_s)
        return cost.step_s(work) * max(1.0, self.stretch(kind_of(work))) + drafts_s

    def prefill_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Predicted seconds for computing so many prompt tokens in chunks, with nothing else in their steps.

        Workers ask before they load a prefix or move layers to host memory, which has to be faster than computing. As
        long as nothing was measured, a speed is assumed.
        """
        cost = self.cost()
        if cost is None:
            return num_tokens / ASSUMED_PREFILL_TOKENS_PER_S
        return cost.prefill_s(num_tokens, 0.0, chunk_tokens) * max(1.0, self.stretch("prefill"))

    def cautious_cost(self) -> StepCost | None:
        """What nearly all steps with prompt tokens stay below: schedulers size these steps by it, each time.

        None as long as nothing was measured. As of the steps that were learnt from last.
        """
        if self._cautious is None and self._learnt is not None:
            error = self._learnt.error("prefill")
            margin = margin_of(self._seed_error if error is None else error)
            stretch = max(1.0, self._learnt.stretch("prefill"))
            self._cautious = replace(scaled(self._learnt.cost(), stretch * margin), margin=margin)
        return self._cautious

    def error(self, kind: StepKind) -> float:
        """Median of |actual / predicted - 1| over the latest steps of a kind; the seed's own without any."""
        fit = self._fit
        error = None if fit is None else fit.error(kind)
        return self._seed_error if error is None else error


class RowCosts:
    """Seconds that drafts add to a step, by the step's decodes, in sizes that double.

    Learnt from steps without prompts. `engine.drafting.speculation` asks how many drafts are worth their time."""

    def __init__(self) -> None:
        self._by_size: dict[int, _DraftsCost] = {}

    def extra_s(self, num_decodes: float, num_drafts: float, prefill_token_s: float) -> float:
        """Seconds that so many drafts add to a step. `prefill_token_s`: what a token of a prompt costs, which is what
        is assumed at first."""
        if not num_drafts:
            return 0.0
        known = self._known(_size(num_decodes))
        return num_drafts * prefill_token_s if known is None else known.extra_s(num_drafts)

    def observe(
        self, num_decodes: float, num_drafts: float, seconds: float, fit_s: float, prefill_token_s: float
    ) -> None:
        """A step without prompts took so many seconds. `fit_s`: what the fit to all steps says, without drafts."""
        size = _size(num_decodes)
        if size not in self._by_size:
            known = self._known(size)
            self._by_size[size] = _DraftsCost(_ASSUMED * (prefill_token_s if known is None else known.each_s))
        self._by_size[size].observe(num_drafts, seconds, fit_s, _MOST * prefill_token_s)

    def plain_s(self, num_decodes: float, fit_s: float) -> float:
        """Seconds that steps of so many decodes took lately without drafts; `fit_s` where there were none."""
        known = self._by_size.get(_size(num_decodes))
        return fit_s if known is None or not known.num_plain else known.plain_s

    def _known(self, size: int) -> _DraftsCost | None:
        """A size of which nothing is known yet is taken to be as the next smaller one."""
        sizes = [other for other in self._by_size if other <= size]
        return self._by_size[max(sizes)] if sizes else None


@dataclass(slots=True)
class _DraftsCost:
    """What the first draft costs, for which rows may make another tile, and what each does: a line through late steps
    with drafts, by moments about their means, above those without. The fit to all steps is only asked before there were
    some of these: for as many decodes it may be off by as much as all the drafts of a step cost, and it moves."""

    products: float  # of drafts and seconds
    squares: float = _ASSUMED  # of drafts
    plain_s: float = 0.0  # of a step without drafts
    drafts: float = 0.0  # of a step with some
    beyond_s: float = 0.0  # likewise, beyond one without
    num_plain: int = 0
    num_drafted: int = 0

    @property
    def each_s(self) -> float:
        # No drafts cost nothing: where all steps had about as many, that tells more than what they differ in.
        products = self.products + _ANCHOR * self.drafts * self.beyond_s
        return max(products / (self.squares + _ANCHOR * self.drafts**2), 0.0)

    def extra_s(self, num_drafts: float) -> float:
        first_s = self.beyond_s - self.each_s * self.drafts
        known = self.num_drafted / (self.num_drafted + _PRIOR_STEPS)
        return max(known * first_s + self.each_s * num_drafts, 0.0)

    def observe(self, num_drafts: float, seconds: float, fit_s: float, most_s: float) -> None:
        """`most_s`: beyond that, for each draft, a step was held up by something else."""
        plain_s = self.plain_s if self.num_plain else fit_s
        if not num_drafts:
            self.num_plain += 1
            # Clipped, or drafts would seem free after one that was held up, for as long as few steps have none.
            more_s = min(seconds, _HELD_UP * max(plain_s, fit_s)) - self.plain_s
            self.plain_s += max(_RATE, 1.0 / self.num_plain) * more_s
            if self.num_drafted:  # what is assumed is not forgotten, or drafts would be free before there was one
                self.products, self.beyond_s = self.products * _FORGOTTEN, self.beyond_s * _FORGOTTEN
            return
        self.num_drafted += 1
        rate = max(_RATE, 1.0 / self.num_drafted)
        more_drafts = num_drafts - self.drafts
        more_s = seconds - plain_s - self.beyond_s
        most_s *= max(abs(more_drafts), 4.0)
        more_s = min(max(more_s, -most_s), most_s)
        self.products += (1.0 - rate) * more_drafts * more_s
        self.squares += (1.0 - rate) * more_drafts**2
        self.drafts += rate * more_drafts
        self.beyond_s += rate * more_s
        kept = min(_KNOWN / self.squares, 1.0)
        self.products, self.squares = self.products * kept, self.squares * kept


def _size(num_decodes: float) -> int:
    return (int(num_decodes) - 1).bit_length()
