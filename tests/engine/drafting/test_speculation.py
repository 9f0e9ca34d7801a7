"""How much is drafted, by what was right and what rows cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from engine.cost_model.costs import RowCosts, StepCosts
from engine.cost_model.step_cost import StepCost, StepWork
from engine.drafting.drafter import Draft, DrafterName, DraftingCost
from engine.drafting.speculation import Candidate, Speculation
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence

COST = StepCost(base_s=0.008, prefill_token_s=4e-4, prefill_pair_s=0.0, decode_s=2e-4, context_token_s=0.0)
ROW_S = 4e-4


@dataclass
class Repeating:
    """As many drafts as may be; how many are right, the test says."""

    name: DrafterName = "prediction"
    num_asked: int = 0
    drawing: DraftingCost | None = None
    silent: bool = False

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        self.num_asked += 1
        if self.silent:
            return None
        return Draft((5,) * most, self.name, 2, self.drawing)

    def ended(self, seq: Sequence) -> None:
        pass


class Workbench:
    """Sequences that decode together; of each draft, the first `right` of every sequence are."""

    def __init__(self, num_seqs: int, *, free_rows: int = 12) -> None:
        self.costs = StepCosts(COST)
        self.costs.seed(COST)
        self.drafter = Repeating()
        self.speculation = Speculation([self.drafter], self.costs)
        self.seqs = [
            Sequence(request_id=str(n), attempt=0, params=SamplingParams(max_tokens=9, seed=0), prompt_token_ids=[1])
            for n in range(num_seqs)
        ]
        self.free_rows = free_rows
        self.num_tokens, self.seconds = 0, 0.0

    def step(self, right: dict[int, int] | int, *, late: frozenset[int] = frozenset(), most: int = 64) -> list[int]:
        """How much is drafted for each."""
        work = StepWork(decodes=len(self.seqs))
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if not self.speculation.skips(self.seqs):
            candidates = [Candidate(seq, 15, n in late) for n, seq in enumerate(self.seqs)]
            drafts = self.speculation.plan(candidates, work, most=most)
        work.drafts = sum(map(len, drafts.values()))
        rows = len(self.seqs) + work.drafts
        seconds = COST.step_s(work) + ROW_S * (max(0, rows - self.free_rows) - max(0, len(self.seqs) - self.free_rows))
        self.costs.observe(work, seconds)
        for n, seq in enumerate(self.seqs):
            if seq in drafts:
                wanted = right if isinstance(right, int) else right.get(n, 0)
                num_right = min(wanted, len(drafts[seq]))
                self.speculation.verified(seq, len(drafts[seq]), num_right)
                self.num_tokens += num_right
            self.num_tokens += 1
        self.seconds += seconds
        return [len(drafts.get(seq, ())) for seq in self.seqs]

    def ask_in_vain(self, num_steps: int) -> None:
        self.drafter.silent = True
        for _ in range(num_steps):
            self.step(0)
        self.drafter.silent = False

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def test_what_drawing_will_take_is_told_of_what_was_planned() -> None:
    bench = Workbench(2)
    bench.speculation = Speculation([bench.drafter], bench.costs, fixed=3)
    bench.drafter.drawing = DraftingCost(pass_s=0.01, each_s=0.001, before_s=0.3)
    bench.step(3)
    assert bench.speculation.drawing_s == pytest.approx(3 * 0.01 + 2 * (3 * 0.001 + 0.3))
    bench.drafter.drawing = None
    bench.step(3)
    assert bench.speculation.drawing_s == 0.0


def test_right_drafts_are_drafted_as_far_as_rows_are_free() -> None:
    bench = Workbench(1)
    for _ in range(200):
        drafted = bench.step(15)
    assert drafted[0] >= 11
    assert bench.tokens_per_s > 8 / COST.step_s(StepWork(decodes=1))


@pytest.mark.parametrize("num_seqs", [1, 8, 32])
def test_an_adversary_costs_little(num_seqs: int) -> None:
    bench = Workbench(num_seqs)
    for _ in range(400):
        bench.step(0)
    plain_s = COST.step_s(StepWork(decodes=num_seqs))
    assert bench.tokens_per_s > 0.97 * num_seqs / plain_s


def test_whoever_is_right_again_is_found_out() -> None:
    bench = Workbench(8, free_rows=4)
    for _ in range(300):
        bench.step(0)
    assert sum(bench.step(0)) <= 1
    for _ in range(3000):
        bench.step({0: 15})
    assert bench.step({0: 15})[0] > 3


def test_who_is_late_comes_first() -> None:
    bench = Workbench(2, free_rows=4)
    for _ in range(100):
        bench.step(2)
    drafted = bench.step(2, late=frozenset({1}), most=3)
    assert drafted[1] > drafted[0]
    assert sum(drafted) <= 3


def test_no_step_is_longer_than_promised_gaps_bear() -> None:
    bench = Workbench(4, free_rows=1)
    for _ in range(100):
        bench.step(15)
    work = StepWork(decodes=4)
    candidates = [Candidate(seq, 15) for seq in bench.seqs]
    free = bench.speculation.plan(candidates, work, most=64)
    num_free = sum(map(len, free.values()))
    plain_s = COST.step_s(work)
    bound = bench.speculation.plan(candidates, work, most=64, longest_s=plain_s + 4.5 * ROW_S)
    assert 1 <= sum(map(len, bound.values())) <= 6 < num_free
    assert bench.speculation.plan(candidates, work, most=64, longest_s=plain_s) == {}


def test_beside_prompts_a_draft_costs_a_prompts_token_whatever_rows_were_seen_to_cost() -> None:
    bench = Workbench(1, free_rows=100)
    for turn in range(400):
        bench.step(turn % 2)  # every other one is right, and rows are free
    work, candidates = StepWork(decodes=1), [Candidate(bench.seqs[0], 15)]
    alone = bench.speculation.plan(candidates, work, most=64)
    beside = bench.speculation.plan(candidates, work, most=64, beside_prompts=True)
    assert 1 <= sum(map(len, beside.values())) < sum(map(len, alone.values()))


def test_beside_prompts_each_draft_reads_what_is_before_it_anew() -> None:
    bench = Workbench(1, free_rows=100)
    bench.costs.seed(replace(COST, prefill_pair_s=4e-6))
    for _ in range(100):
        bench.step(15)
    work, candidates = StepWork(decodes=1, context_tokens=1_000), [Candidate(bench.seqs[0], 15)]
    cost = bench.costs.recent_cost()
    assert cost is not None
    longest_s = cost.step_s(work) + 4.5 * (cost.prefill_token_s + 1_000 * cost.prefill_pair_s)
    drafts = bench.speculation.plan(candidates, work, most=64, longest_s=longest_s, beside_prompts=True)
    assert [len(drafts[seq]) for seq in bench.seqs] == [4]


@pytest.mark.parametrize(("pass_s", "num_drafts"), [(0.0005, range(3, 16)), (0.003, range(1, 3)), (0.02, range(1))])
def test_what_is_drawn_has_to_bring_more_than_it_takes(pass_s: float, num_drafts: range) -> None:
    """Steps take 8 ms; of three drafts two are right."""
    bench = Workbench(1)
    bench.drafter.drawing = DraftingCost(pass_s, 0.0)
    drafted = [bench.step({0: 2 if n % 2 else 1})[0] for n in range(1200)]
    assert sorted(drafted)[600] in num_drafts
    assert sum(map(bool, drafted)) > 0, "it is tried now and then"
    assert pass_s < 0.02 or sum(drafted) * pass_s < 0.01 * len(drafted) * COST.step_s(StepWork(decodes=1))


def test_a_pass_is_for_all_who_are_drawn_for() -> None:
    drafted = {}
    for num_seqs in (1, 12):
        bench = Workbench(num_seqs, free_rows=100)
        for _ in range(20):  # rows are free
            bench.costs.rows.observe(num_seqs, num_seqs, 0.01, 0.01, ROW_S)
        bench.drafter.drawing = DraftingCost(0.0, 0.0)
        for _ in range(50):  # and drafts are right
            bench.step(15)
        bench.drafter.drawing = DraftingCost(0.009, 0.0)
        drafted[num_seqs] = sum(sum(bench.step(15)) for _ in range(100)) / num_seqs
    assert drafted[12] > 50 > drafted[1]


def test_what_is_lacked_is_no_longer_than_gaps_bear_and_counts_little_by_little() -> None:
    bench = Workbench(1)
    work, candidates = StepWork(decodes=1), [Candidate(bench.seqs[0], 15)]
    bench.drafter.drawing = DraftingCost(0.0005, 0.0, before_s=0.1, spread=1)
    assert bench.speculation.plan(candidates, work, most=64) == {}, "one token is not worth 100 ms"
    bench.drafter.drawing = DraftingCost(0.0005, 0.0, before_s=0.1, spread=100)
    assert bench.speculation.plan(candidates, work, most=64, longest_s=0.1) == {}
    assert bench.speculation.plan(candidates, work, most=64, longest_s=0.2) != {}


def test_copies_come_before_what_is_to_be_drawn() -> None:
    bench = Workbench(1)
    drawn = Repeating("model", drawing=DraftingCost(0.004, 0.0))
    bench.speculation = Speculation([bench.drafter, drawn], bench.costs)
    for _ in range(20):
        bench.step(15)
    assert drawn.num_asked == 0 and bench.drafter.num_asked > 0


def test_nothing_is_drafted_before_steps_cost_something() -> None:
    bench = Workbench(1)
    bench.costs = StepCosts(COST)
    speculation = Speculation([bench.drafter], bench.costs)
    assert speculation.plan([Candidate(bench.seqs[0], 15)], StepWork(decodes=1), most=64) == {}


def test_a_fixed_number_is_drafted_whatever_comes_of_it() -> None:
    bench = Workbench(3)
    bench.speculation = Speculation([bench.drafter], bench.costs, fixed=2)
    assert [bench.step(0) for _ in range(50)][-1] == [2, 2, 2]
    assert bench.step(0, most=3) == [2, 1, 0]


def test_rows_cost_what_they_were_seen_to_by_size() -> None:
    rows = RowCosts()
    assert rows.extra_s(1, 0, 1.0) == 0.0
    assert rows.extra_s(1, 3, 1.0) == 3.0, "what as many tokens of a prompt would"
    for turn in range(600):
        for num_decodes, first_s, each_s in ((1, 0.0, 0.1), (8, 2.0, 0.5)):
            num_drafts = turn % 9
            plain_s = 0.7 * num_decodes  # the fit is off, for all such steps
            seconds = plain_s + (first_s + num_drafts * each_s if num_drafts else 0.0)
            rows.observe(num_decodes, num_drafts, seconds, 4.0, 1.0)
    assert rows.extra_s(1, 3, 1.0) == pytest.approx(0.3, rel=0.3)
    assert rows.extra_s(8, 6, 1.0) == pytest.approx(5.0, rel=0.1)
    assert rows.extra_s(8, 1, 1.0) == pytest.approx(2.5, rel=0.2), "the first one costs more"
    assert rows.extra_s(30, 6, 1.0) == rows.extra_s(8, 6, 1.0), "as in the next smaller size that is known"
    assert rows.plain_s(7, 4.0) == pytest.approx(0.7 * 8)
    rows.observe(1, 3, 1e6, 4.0, 1.0)
    assert rows.extra_s(1, 3, 1.0) < 2.0, "one step that was held up"


def test_of_steps_with_as_many_drafts_each_has_its_share() -> None:
    """What differs between them is noise, which must not make the first draft as dear as all of them."""
    rows = RowCosts()
    for turn in range(200):
        num_drafts = 60 + turn % 4
        rows.observe(8, num_drafts, 10.0 + 20.0 - 0.1 * (turn % 4), 10.0, 1.0)
        rows.observe(8, 0, 10.0, 10.0, 1.0)
    assert rows.extra_s(8, 1, 1.0) < 4.0
    assert rows.extra_s(8, 60, 1.0) == pytest.approx(20.0, rel=0.1)


def test_what_costs_are_is_forgotten_where_nothing_is_drafted() -> None:
    rows = RowCosts()
    for _ in range(15_000):
        rows.observe(1, 0, 10.0, 10.0, 1.0)
    assert rows.extra_s(1, 2, 1.0) == pytest.approx(2.0), "what is assumed is not"
    for _ in range(50):
        rows.observe(1, 2, 19.0, 10.0, 1.0)
    assert rows.extra_s(1, 2, 1.0) > 5.0
    for _ in range(15_000):
        rows.observe(1, 0, 10.0, 10.0, 1.0)
    assert rows.extra_s(1, 2, 1.0) < 1.0


def test_drafts_are_not_free_since_a_step_without_any_was_held_up() -> None:
    costs = StepCosts(COST)
    costs.seed(COST)
    plain_s = COST.step_s(StepWork(decodes=1))
    for turn in range(400):
        costs.observe(StepWork(decodes=1, drafts=turn % 4), plain_s + turn % 4 * ROW_S)
    before_s = costs.rows.extra_s(1, 3, ROW_S)
    costs.observe(StepWork(decodes=1), 1.0)
    for _ in range(30):
        costs.observe(StepWork(decodes=1, drafts=3), plain_s + 3 * ROW_S)
    assert costs.rows.extra_s(1, 3, ROW_S) > 0.5 * before_s


def test_who_asks_in_vain_asks_less_often() -> None:
    bench = Workbench(4, free_rows=4)
    for _ in range(100):
        bench.step(2)
    before = bench.drafter.num_asked
    bench.ask_in_vain(200)
    assert bench.drafter.num_asked - before < 300, "of 800"
    assert sum(sum(bench.step(2)) for _ in range(40)) > 20, "and sees when there is something again"


def test_a_newcomer_is_asked_for_at_once_whoever_asked_in_vain_before() -> None:
    bench = Workbench(1)
    bench.ask_in_vain(100)
    bench.seqs = Workbench(1).seqs
    assert bench.step(15)[0] > 1, "more than a try"


def test_a_try_that_finds_something_ends_a_pause_of_asking() -> None:
    bench = Workbench(1)
    bench.ask_in_vain(100)
    assert bench.step(15)[0] == 1, "a try: nobody is asked yet"
    assert bench.step(15)[0] > 1
