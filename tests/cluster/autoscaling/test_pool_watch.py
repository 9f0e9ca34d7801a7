"""What pool sizing goes by, and the orders that come of it: over real placements, and budgets that really burn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.autoscaling.controller import Autoscaler, ModelExchange
from cluster.autoscaling.demand import BurnAlerts, DemandMonitor
from cluster.autoscaling.sizing import PoolAdvice, PoolRules, PoolSizer, PoolsPlan
from cluster.config.build_scheduler import pools_plan
from cluster.config.load import load_config
from cluster.scheduler.block_index import BlockIndex
from cluster.scheduler.placement.admission import Admission, AdmissionOutcome, AdmissionPolicy, Verdict
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.slo.classes import SloClass, SloConfig
from cluster.slo.report import Served, SloOutcome, SloReport
from cluster.slo.tracker import SloTracker
from engine.cost_model.step_cost import StepWork
from kv_transfer.messages.fields import Role
from kv_transfer.messages.scheduling import Place, Queued, Unplaceable
from kv_transfer.messages.workers import ChangeRole, PoolTarget
from tests.cluster.scheduler.placement.placement_world import COST, book, costed_snapshot, decoding, ledger_of, query_of
from tests.cluster.scheduler.scheduler_world import measured, place
from tests.support.clusters.worker_reports import worker_info, worker_snapshot

SLO = SloConfig(
    classes=(SloClass(name="chat", ttft_s=2.0, tpot_s=0.05, gap_s=0.2, share=0.9), SloClass(name="batch")),
    default="chat",
)
SCALING = PoolRules(max_workers=8)
FIXED = PoolRules(min_workers=0, max_workers=8, scales=False)
NO_POOL = PoolRules(min_workers=0, initial=0, max_workers=0, scales=False)


class Door:
    """Asks the real admission, and lets the watch hear of it."""

    def __init__(self, ledger: Ledger, watch: DemandMonitor) -> None:
        self._admission = Admission(ledger, BlockIndex().longest_prefix, DecisionPolicy(), AdmissionPolicy())
        self._watch = watch

    def ask(self, query: Place, now: float) -> Verdict:
        verdict = self._admission.ask(query, now)
        self._watch.asked(query, verdict, now, False)
        return verdict


def tracker(now_s: float = 0.0) -> SloTracker:
    return SloTracker(SLO, now_s=now_s)


def test_demand_is_what_is_asked_for_whether_or_not_it_is_served() -> None:
    """Prompts of 1.01 s, three per second, on one prefill worker: first they fit, then they are turned away."""
    ledger = ledger_of("p1", "d1")
    watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    door = Door(ledger, watch)
    outcomes = [door.ask(query_of(f"r{i}"), i / 3).outcome for i in range(300)]
    assert AdmissionOutcome.PLACED in outcomes and AdmissionOutcome.REJECTED in outcomes
    prefill, decode = watch.views(100.0, BurnAlerts())
    assert prefill.demand + decode.demand > 2.5  # some prompts are computed by the decode worker
    assert (prefill.live, decode.live) == (1, 1)


def test_a_prompt_is_as_much_work_as_its_step_takes() -> None:
    """With the pairs of its tokens, and none with tokens that are not there."""
    works = []
    for cost in (COST, replace(COST, prefill_pair_s=1e-6)):
        ledger = ledger_of("p1", "d1", cost=cost)
        watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
        assert Door(ledger, watch).ask(query_of("r"), 0.0).decision.best.prefill == "p1"
        works.append((watch.forecasts(0.1)[0], cost.step_s(StepWork.of_prefill(1000))))
    (plain, plain_s), (paired, paired_s) = works
    assert paired / plain == pytest.approx(paired_s / plain_s, rel=0.01)
    assert paired_s > 1.4 * plain_s


def test_a_client_that_comes_back_when_it_was_told_to_asks_for_nothing_new() -> None:
    ledger = ledger_of("p1", "d1")
    watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    door = Door(ledger, watch)
    queries = [query_of(f"r{i}", prefix_hashes=bytes([i]) * 16) for i in range(20)]  # far too many at once
    verdicts = [door.ask(query, 0.0) for query in queries]
    told = [
        (q, v.retry_after_s) for q, v in zip(queries, verdicts, strict=True) if v.outcome is AdmissionOutcome.REJECTED
    ]
    assert len(told) > 10
    alike = queries[-1]
    before = demand(watch, 0.1)
    door.ask(replace(alike, request_id="alike"), 0.1)  # of somebody else: nobody was asked to come back so soon
    grown = demand(watch, 0.1) - before
    assert grown == pytest.approx(before / 20, rel=0.2)
    for query, retry_after_s in told:
        assert retry_after_s is not None
        now = max(1.0, retry_after_s)
        before = demand(watch, now)
        door.ask(replace(query, request_id=f"{query.request_id} again"), now)
        assert demand(watch, now) == before


@pytest.mark.parametrize(("late_s", "is_new"), [(59.0, False), (61.0, True)])
def test_a_client_may_be_late_for_a_minute(late_s: float, is_new: bool) -> None:
    ledger = ledger_of("p1", "d1")
    watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    door = Door(ledger, watch)
    for name, prefill in (("queued", "p1"), ("local", None)):
        book(ledger, name, prefill=prefill, prefill_s=60.0)
    query = query_of("r", prefix_hashes=b"q" * 16)
    retry_after_s = door.ask(query, 0.0).retry_after_s
    assert retry_after_s is not None
    now = retry_after_s + late_s
    before = demand(watch, now)
    door.ask(replace(query, request_id="again"), now)
    assert (demand(watch, now) > before) == is_new


def test_a_client_that_is_turned_away_after_it_waited_and_comes_back_asks_for_nothing_new() -> None:
    scheduler = measured("p1", "d1", admission=AdmissionPolicy(max_wait_s=5.0))
    watch = DemandMonitor(scheduler.ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    scheduler.on_verdict = watch.asked
    now, grew = 0.0, []
    for visit in range(4):
        for name, prefill in (("queued", "p1"), ("local", None)):
            book(scheduler.ledger, name, now, prefill=prefill, prefill_s=60.0)
        before = demand(watch, now)
        batch = place(f"batch-{visit}", num_tokens=3000, prefix_hashes=b"q" * 16)
        assert isinstance(scheduler.place(batch, now), Queued)
        grew.append(demand(watch, now) > before)
        now += 5.0
        before = demand(watch, now)
        (refused,) = scheduler.answers(now)
        assert isinstance(refused, Unplaceable) and refused.retry_after_s is not None
        assert demand(watch, now) == before
        now += refused.retry_after_s
    assert grew == [True, False, False, False]


@pytest.mark.parametrize("told_s", [90.0, 1.0])
def test_a_client_that_asks_again_and_again_orders_workers_for_three_at_most(told_s: float) -> None:
    def advised(queries: list[Place]) -> tuple[float, PoolAdvice | None]:
        """All of them are refused, evenly over 20 s."""
        ledger, plan = ledger_of("p1", "d1"), PoolsPlan(prefill=SCALING, decode=SCALING)
        book(ledger, "queued", prefill_s=60.0)
        book(ledger, "local", prefill=None, prefill_s=60.0)
        watch, sizer = DemandMonitor(ledger, plan, 0.0), PoolSizer(plan, 0.0)
        door = Door(ledger, watch)
        for number, query in enumerate(queries):
            now = 20.0 * number / len(queries)
            ledger.joins_at = now + told_s
            assert door.ask(query, now).outcome is AdmissionOutcome.REJECTED
        return demand(watch, 20.0), sizer.advise(20.0, *watch.views(20.0, BurnAlerts()))

    alike = [query_of(f"poll{number}", prefix_hashes=b"q" * 16) for number in range(200)]
    others = [query_of(f"r{number}", prefix_hashes=bytes([number]) * 16) for number in range(40)]
    polled, advice = advised(alike)
    three, advice_for_three = advised(others[:3])
    assert polled <= 1.1 * three
    assert advice == advice_for_three
    many, advice_for_many = advised(others)
    assert many > 5 * three and advice_for_many != advice


def test_all_choices_of_a_request_ask_for_something() -> None:
    """They ask the same, and are on their way before any is refused."""
    ledger = ledger_of("p1", "d1")
    book(ledger, "queued", prefill_s=60.0)
    book(ledger, "local", prefill=None, prefill_s=60.0)
    watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    door = Door(ledger, watch)
    demands = []
    for choice in range(20):
        now = 0.02 + choice / 1000
        query = query_of(f"r-{choice}", prefix_hashes=b"q" * 16, waited_s=now)
        assert door.ask(query, now).outcome is AdmissionOutcome.REJECTED
        demands.append(demand(watch, 1.0))
    assert demands == pytest.approx([(choice + 1) * demands[0] for choice in range(20)], rel=0.3)


def test_a_pace_that_no_worker_could_keep_orders_none() -> None:
    """Neither by those who ask for it nor by those who decode and were promised it elsewhere."""
    plan, demands = PoolsPlan(prefill=SCALING, decode=SCALING), []
    for tpot_s in (0.001, None):
        ledger = ledger_of("p1", "d1")
        watch = DemandMonitor(ledger, plan, 0.0)
        door = Door(ledger, watch)
        for number in range(20):
            door.ask(query_of(f"r{number}", ttft_s=None, tpot_s=tpot_s), 10.0)
        for number in range(20):
            decoding(ledger, f"standing-{number}", 10.0, ttft_s=None, tpot_s=tpot_s)
        demands.append((watch.forecasts(20.0), watch.views(200.0, BurnAlerts())[1].demand))
    assert demands[0] == demands[1]


def demand(watch: DemandMonitor, now: float) -> float:
    """Of both pools."""
    return sum(watch.forecasts(now))


def test_later_attempts_and_unknown_workers_ask_for_nothing() -> None:
    ledger = ledger_of("p1", "d1")
    watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    door = Door(ledger, watch)
    door.ask(query_of("r", attempt=1), 1.0)
    empty = Door(Ledger(), watch)
    empty.ask(query_of("s"), 1.0)
    assert watch.views(1.0, BurnAlerts())[0].demand == 0.0


def test_sequences_that_run_longer_than_expected_hold_their_worker() -> None:
    ledger = ledger_of("p1", "d1")
    watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    door = Door(ledger, watch)
    for i in range(10):
        door.ask(query_of(f"r{i}", tpot_s=0.05, ttft_s=60.0), 0.0)
        ledger.first_token(f"r{i}", 0.0)
    demands = [watch.views(float(second), BurnAlerts())[1].demand for second in range(300)]
    # A step of 20 such sequences takes 50 ms: ten of them are half a worker, when their arrival is long forgotten.
    assert demands[-1] == pytest.approx(10 * 0.00205 / 0.04, rel=0.1)


def ended(
    news: SloReport, count: int, ending: SloOutcome, *, ttft_s: float = 0.1, tpot_s: float = 0.01, gap_s: float = 0.01
) -> None:
    served = Served(slo=SLO.classes[0], model="m")
    is_served = ending is SloOutcome.FINISHED
    for _ in range(count):
        news.ended(
            served,
            ending,
            e2e_s=5.0,
            ttft_s=ttft_s if is_served else None,
            tpot_s=tpot_s if is_served else None,
            gap_p99_s=gap_s if is_served else None,
        )


@pytest.mark.parametrize(
    ("ending", "times", "expected"),
    [
        (SloOutcome.FINISHED, {"ttft_s": 9.0}, BurnAlerts(ttft=True)),
        (SloOutcome.FINISHED, {"tpot_s": 9.0}, BurnAlerts(tpot=True)),
        (SloOutcome.FINISHED, {"gap_s": 9.0}, BurnAlerts(tpot=True)),
        (SloOutcome.FINISHED, {"tpot_s": 9.0, "gap_s": 9.0}, BurnAlerts(tpot=True)),
        (SloOutcome.REJECTED, {}, BurnAlerts(other=True)),
    ],
)
def test_whose_budget_burns(ending: SloOutcome, times: dict[str, float], expected: BurnAlerts) -> None:
    news, slo = SloReport(), tracker()
    ended(news, 17, SloOutcome.FINISHED)
    ended(news, 3, ending, **times)  # 15 % where 10 % are allowed
    slo.absorb(1.0, news)
    assert BurnAlerts.of(slo.totals(1.0)) == expected
    assert BurnAlerts.of(slo.totals(200.0)) == BurnAlerts()  # over, says the short window


def test_two_misses_are_chance() -> None:
    news, slo = SloReport(), tracker()
    ended(news, 2, SloOutcome.FINISHED, ttft_s=9.0)
    slo.absorb(1.0, news)
    assert BurnAlerts.of(slo.totals(1.0)) == BurnAlerts()


def test_rejections_are_blamed_on_the_busier_pool() -> None:
    ledger = ledger_of("p1", "p2", "d1")
    watch = DemandMonitor(ledger, PoolsPlan(prefill=SCALING, decode=SCALING), 0.0)
    door = Door(ledger, watch)
    for i in range(30):
        door.ask(query_of(f"r{i}", max_new_tokens=2, waited_s=float(i)), float(i))
    prefill, decode = watch.views(30.0, BurnAlerts(other=True))
    assert (prefill.burns, decode.burns) == (True, False)


@pytest.mark.parametrize(("prefill", "blamed"), [(SCALING, (True, False)), (NO_POOL, (True, True))])
def test_late_first_tokens_are_blamed_on_whoever_computes_prompts(
    prefill: PoolRules, blamed: tuple[bool, bool]
) -> None:
    watch = DemandMonitor(ledger_of("d1", "d2"), PoolsPlan(prefill=prefill, decode=SCALING), 0.0)
    assert tuple(view.burns for view in watch.views(1.0, BurnAlerts(ttft=True))) == blamed
    assert tuple(view.burns for view in watch.views(1.0, BurnAlerts())) == (False, False)


def test_a_pool_that_does_both_grows_when_first_tokens_are_late() -> None:
    ledger, slo = ledger_of("d1", "d2"), tracker()
    sizing = Autoscaler(ledger, PoolsPlan(prefill=NO_POOL, decode=replace(SCALING, initial=2)), slo, 0.0)
    door = Door(ledger, sizing.watch)
    for second in range(120):
        now = float(second)
        door.ask(query_of(f"r{second}", max_new_tokens=2), now)  # of a second's work, so half of the time is unused
        ledger.first_token(f"r{second}", now)
        ledger.ended(f"r{second}", now)
        news = SloReport()
        ended(news, 3, SloOutcome.FINISHED)
        ended(news, 1, SloOutcome.FINISHED, ttft_s=9.0)
        slo.absorb(now, news)
        list(sizing.orders(now + 0.5))
    assert sizing.targets == {"prefill": 0, "decode": 3}


# --- orders ---


def keeper(ledger: Ledger, plan: PoolsPlan) -> Autoscaler:
    return Autoscaler(ledger, plan, tracker(), 0.0)


def targets(keeper: Autoscaler, now: float) -> dict[str, int]:
    return {w: order.num_workers for w, order in keeper.orders(now) if isinstance(order, PoolTarget)}


def test_every_worker_hears_how_many_its_pool_should_have() -> None:
    ledger = ledger_of("p1", "d1", "d2")
    sizing = keeper(ledger, PoolsPlan(prefill=SCALING, decode=SCALING))
    assert targets(sizing, 1.0) == {}  # it only listens yet
    door = Door(ledger, sizing.watch)
    for i in range(60):
        door.ask(query_of(f"r{i}", ttft_s=None, tpot_s=None, max_new_tokens=2), i / 2)
    assert sizing.orders is not None
    heard = targets(sizing, 30.0)
    assert heard["p1"] >= 2 and heard["d1"] == heard["d2"] == 2


def test_pools_of_fixed_size_hear_nothing() -> None:
    ledger = ledger_of("p1", "d1")
    assert targets(keeper(ledger, PoolsPlan(prefill=FIXED, decode=SCALING)), 10.0) == {"d1": 1}


def test_a_worker_counts_where_it_works_and_is_kept_where_it_was_started() -> None:
    """Of three decode workers one was started for prefill: Serve should have two for prefill, and two for decode."""
    ledger = ledger_of("p1", "d1", "d2")
    ledger.register(replace(worker_info("d3"), home="prefill"), costed_snapshot("d3"), 0.0)
    rules = PoolRules(initial=1, max_workers=8)
    sizing = keeper(ledger, PoolsPlan(prefill=rules, decode=replace(rules, initial=3)))
    assert targets(sizing, 10.0) == {"p1": 2, "d3": 2, "d1": 2, "d2": 2}
    ledger.heartbeat(worker_snapshot("d3", 2, draining=True), 11.0)
    assert targets(sizing, 11.0) == {"p1": 2, "d3": 2, "d1": 2, "d2": 2}, "it is sick, and p1 is not to stop for it"
    ledger.heartbeat(worker_snapshot("d3", 3, draining=True, stopping=True), 12.0)
    assert targets(sizing, 12.0) == {"p1": 1, "d3": 1, "d1": 3, "d2": 3}, "whoever comes for it is for decode"


def test_the_worker_with_least_to_lose_changes_its_role_and_serve_is_told_of_no_change() -> None:
    ledger = Ledger()
    for pid, worker_id in enumerate(("p1", "d1", "d2", "d3")):
        ledger.register(worker_info(worker_id, pid=pid, models=["another"]), costed_snapshot(worker_id), 0.0)
    rules = PoolRules(max_workers=8)
    plan = PoolsPlan(prefill=rules, decode=replace(rules, initial=3), flips=True, flip_hold_s=2.0)
    sizing = keeper(ledger, plan)
    ledger.heartbeat(worker_snapshot("d1", 2, num_running=1), 5.0)
    ledger.heartbeat(worker_snapshot("d3", 2, num_running=2), 5.0)
    for second in range(20):
        list(sizing.orders(float(second)))
    door = Door(ledger, sizing.watch)
    for i in range(40):
        door.ask(query_of(f"r{i}", num_tokens=600, max_new_tokens=2, ttft_s=90.0, waited_s=20.0), 20.0)
    first, second_time = list(sizing.orders(20.0)), list(sizing.orders(20.0))
    assert [(w, order.role) for w, order in first if isinstance(order, ChangeRole)] == [("d2", "prefill")]
    assert not [order for _, order in second_time if isinstance(order, ChangeRole)]  # once is enough
    assert sizing.advice is not None and sizing.advice.num_decode == 2
    during = targets(sizing, 21.0)
    assert during["d1"] == 3  # as Serve has it
    assert sizing.spared(9.0, "another") is None, "it may be the one that changes its role"
    ledger.unregister("d2", 22.0)
    assert targets(sizing, 22.0)["d1"] == 3
    ledger.register(replace(worker_info("p2"), home="decode", pid=2), costed_snapshot("p2"), 23.0)
    assert targets(sizing, 23.0)["d1"] == 3


def test_a_worker_that_may_not_change_its_role_is_not_waited_for() -> None:
    ledger = Ledger()
    for pid, worker_id in enumerate(("p1", "d1", "d2", "d3")):
        ledger.register(worker_info(worker_id, pid=pid), costed_snapshot(worker_id), 0.0)
    plan = PoolsPlan(prefill=FIXED, decode=FIXED, flips=True, flip_hold_s=2.0)
    sizing = keeper(ledger, plan)

    def flips(now: float) -> list[str]:
        return [worker_id for worker_id, order in sizing.orders(now) if isinstance(order, ChangeRole)]

    assert not any(flips(float(second)) for second in range(20))
    door = Door(ledger, sizing.watch)
    for i in range(40):
        door.ask(query_of(f"r{i}", num_tokens=600, max_new_tokens=2, ttft_s=90.0, waited_s=20.0), 20.0)
    assert flips(20.0) == ["d1"]
    assert flips(21.0) == [] and sizing.lacking() is None, "one is about to come"
    sizing.refused("d1")
    assert flips(22.0) == []
    lacks = sizing.lacking()
    assert lacks is not None and lacks[0] == "prefill"


def test_where_a_worker_may_not_change_its_role_serve_stops_nobody() -> None:
    ledger = Ledger()
    for pid, worker_id in enumerate(("p1", "d1", "d2", "d3")):
        ledger.register(worker_info(worker_id, pid=pid), costed_snapshot(worker_id), 0.0)
    rules = PoolRules(max_workers=8)
    sizing = keeper(ledger, PoolsPlan(prefill=rules, decode=replace(rules, initial=3), flips=True, flip_hold_s=2.0))
    for second in range(20):
        list(sizing.orders(float(second)))
    door = Door(ledger, sizing.watch)
    for i in range(40):
        door.ask(query_of(f"r{i}", num_tokens=600, max_new_tokens=2, ttft_s=90.0, waited_s=20.0), 20.0)
    assert targets(sizing, 20.0) == {"p1": 1, "d1": 3, "d2": 3, "d3": 3}
    assert sizing.advice is not None and sizing.advice.flip == "prefill"
    sizing.refused("d1")
    assert targets(sizing, 21.0) == {"p1": 2, "d1": 3, "d2": 3, "d3": 3}, "it is still one too few for prefill"


def test_a_worker_goes_to_the_model_that_lacks_one_and_nobody_else_before_it_is_there() -> None:
    """From the one that could do without it, the one with least to lose; never to and fro."""
    ledgers = {"a": Ledger(), "b": Ledger()}
    for pid, (model, worker_id) in enumerate([("a", "d1"), ("b", "d2"), ("b", "d3"), ("b", "d4")]):
        info = worker_info(worker_id, pid=pid, model=model, models=["b" if model == "a" else "a"])
        ledgers[model].register(info, costed_snapshot(worker_id), 0.0)
    ledgers["b"].heartbeat(worker_snapshot("d2", 2, num_running=1), 1.0)
    plan = PoolsPlan(prefill=replace(FIXED, initial=0, max_workers=0), decode=FIXED, flip_hold_s=5.0)
    sizing = {model: keeper(ledger, plan) for model, ledger in ledgers.items()}
    exchange = ModelExchange(sizing)

    def orders(now: float) -> list[tuple[str, str, str]]:
        assert not any(order for each in sizing.values() for order in each.orders(now)), "these pools are of fixed size"
        workers = [worker for ledger in ledgers.values() for worker in ledger.workers()]
        found = list(exchange.orders(workers, now))
        return [(name, order.role, order.model) for name, order in found if isinstance(order, ChangeRole)]

    assert [orders(float(second)) for second in range(20)] == [[]] * 20, "nobody asks for anything"
    door = Door(ledgers["a"], sizing["a"].watch)
    for i in range(60):
        door.ask(query_of(f"r{i}", num_tokens=600, max_new_tokens=2, ttft_s=90.0, waited_s=20.0), 20.0)
    assert orders(20.0) == [("d3", "decode", "a")]
    exchange.refused("another")
    assert orders(20.5) == []
    exchange.refused("d3")  # it may not go
    assert orders(21.0) == [("d3", "decode", "a")], "nobody is waited for"
    assert orders(21.0) == [], "it is under way"
    left = ledgers["b"].info("d3")
    ledgers["b"].unregister("d3", 22.0)
    assert orders(22.0) == []
    ledgers["a"].register(replace(left, worker_id="d3.1", model="a", models=["b"]), costed_snapshot("d3.1"), 23.0)
    assert orders(24.0) in ([], [("d4", "decode", "a")]), "the next one, if one more is still too few"
    left = ledgers["b"].info("d4")
    ledgers["b"].unregister("d4", 25.0)
    ledgers["a"].register(replace(left, worker_id="d4.1", model="a", models=["b"]), costed_snapshot("d4.1"), 25.0)
    assert [orders(float(second)) for second in range(150, 200)] == [[]] * 50, "the last one of a model stays"


def test_nobody_is_taken_from_another_model_while_one_of_its_own_changes_its_role() -> None:
    """It counts in neither pool until it is back, which is no reason to have two more."""
    ledgers = {"a": Ledger(), "b": Ledger()}
    for pid, (model, worker_id) in enumerate([("a", "p1"), ("a", "d1"), ("a", "d2"), ("b", "d3"), ("b", "d4")]):
        info = worker_info(worker_id, pid=pid, model=model, models=["b" if model == "a" else "a"])
        ledgers[model].register(info, costed_snapshot(worker_id), 0.0)
    alone = PoolsPlan(prefill=replace(FIXED, initial=0, max_workers=0), decode=FIXED, flip_hold_s=5.0)
    plans = {"a": PoolsPlan(prefill=FIXED, decode=FIXED, flips=True, flip_hold_s=5.0), "b": alone}
    sizing = {model: keeper(ledger, plans[model]) for model, ledger in ledgers.items()}
    exchange, door = ModelExchange(sizing), Door(ledgers["a"], sizing["a"].watch)

    def orders(now: float) -> list[tuple[str, str]]:
        own = [order for each in sizing.values() for order in each.orders(now)]
        workers = [worker for ledger in ledgers.values() for worker in ledger.workers()]
        found = [*own, *exchange.orders(workers, now)]
        return [(order.role, order.model) for _, order in found if isinstance(order, ChangeRole)]

    assert [orders(float(second)) for second in range(20)] == [[]] * 20
    for i in range(40):
        door.ask(query_of(f"r{i}", num_tokens=600, max_new_tokens=2, ttft_s=90.0, waited_s=20.0), 20.0)
    assert orders(20.0) == [("prefill", "")]
    left = ledgers["a"].info("d1")
    ledgers["a"].heartbeat(worker_snapshot("d1", 2, draining=True), 20.5)
    assert orders(21.0) == []
    ledgers["a"].unregister("d1", 22.0)
    assert orders(22.0) == []
    ledgers["a"].register(replace(left, worker_id="p1.1", role="prefill", home="decode"), costed_snapshot("p1.1"), 23.0)
    assert orders(24.0) == []


def test_after_a_worker_that_does_not_come_back_with_its_new_model_nobody_goes_for_ten_minutes() -> None:
    """It may still load a large one, or never can: then each one more would be lost, too."""
    ledgers = {"a": Ledger(), "b": Ledger()}
    for pid, (model, worker_id) in enumerate([("a", "d1"), ("b", "d2"), ("b", "d3"), ("b", "d4")]):
        info = worker_info(worker_id, pid=pid, model=model, models=["b" if model == "a" else "a"])
        ledgers[model].register(info, costed_snapshot(worker_id), 0.0)
    plan = PoolsPlan(prefill=replace(FIXED, initial=0, max_workers=0), decode=FIXED, flip_hold_s=5.0)
    sizing = {model: keeper(ledger, plan) for model, ledger in ledgers.items()}
    exchange, door = ModelExchange(sizing), Door(ledgers["a"], sizing["a"].watch)
    ordered: list[tuple[int, str]] = []
    for second in range(0, 700, 5):
        for i in range(2):
            door.ask(query_of(f"r{second}-{i}", num_tokens=2400, max_new_tokens=2, ttft_s=90.0), float(second))
        for each in sizing.values():
            assert not list(each.orders(float(second)))
        workers = [worker for ledger in ledgers.values() for worker in ledger.workers()]
        for worker_id, _ in exchange.orders(workers, float(second)):
            ordered.append((second, worker_id))
            ledgers["b"].unregister(worker_id, float(second))
    (first, _), (second_time, _) = ordered
    assert second_time - first > 600


def two_models(num_of_b: int) -> tuple[dict[str, Ledger], Callable[[int, int, int], list[str]]]:
    """Decode workers `d1` and `d2` of model `a`, and the following ones of `b`; and what asks so many requests of so
    many tokens of `a` in a second, and tells whom the exchange then orders to another model."""
    ledgers, initial = {"a": Ledger(), "b": Ledger()}, {"a": 2, "b": num_of_b}
    for pid, model in enumerate(model for model, number in initial.items() for _ in range(number)):
        info = worker_info(f"d{pid + 1}", pid=pid, model=model, models=["b" if model == "a" else "a"])
        ledgers[model].register(info, costed_snapshot(info.worker_id), 0.0)
    sizing = {
        model: keeper(
            ledger,
            PoolsPlan(prefill=replace(FIXED, initial=0, max_workers=0), decode=replace(FIXED, initial=initial[model])),
        )
        for model, ledger in ledgers.items()
    }
    exchange, door = ModelExchange(sizing), Door(ledgers["a"], sizing["a"].watch)

    def orders(second: int, num_requests: int, num_tokens: int) -> list[str]:
        for i in range(num_requests):
            door.ask(query_of(f"r{second}-{i}", num_tokens=num_tokens, max_new_tokens=2, ttft_s=None), float(second))
            ledgers["a"].ended(f"r{second}-{i}", float(second))
        assert not any(order for each in sizing.values() for order in each.orders(float(second)))
        workers = [worker for ledger in ledgers.values() for worker in ledger.workers()]
        return [worker_id for worker_id, _ in exchange.orders(workers, float(second))]

    return ledgers, orders


@pytest.mark.parametrize("leaves", ["dies", "drains"])
def test_nobody_is_taken_from_another_model_while_serve_replaces_a_worker(leaves: str) -> None:
    """It may take as long to load as one of the other model; where nobody comes, ten minutes pass."""
    ledgers, ordered = two_models(3)

    def orders(second: int) -> list[str]:
        return ordered(second, 1, 4500)  # every five seconds: so much work as keeps one busy, and not two

    assert [found for second in (*range(0, 95, 5), 99) for found in orders(second)] == [], "two are enough"
    if leaves == "dies":
        ledgers["a"].unregister("d2", 100.0)
    else:
        ledgers["a"].heartbeat(worker_snapshot("d2", 2, draining=True), 100.0)
    assert [found for second in (*range(100, 695, 5), 699) for found in orders(second)] == []
    assert orders(700) == ["d3"]


def test_who_dies_while_another_changes_its_model_has_ten_minutes_from_then_on() -> None:
    """The change may have taken nearly as long itself, in which nobody looked."""
    ledgers, ordered = two_models(4)

    def orders(second: int) -> list[str]:
        return ordered(second, 6, 6000)  # more than there will ever be workers for

    assert [found for second in range(0, 100, 10) for found in orders(second)] == ["d3"]
    left = ledgers["b"].info("d3")
    ledgers["b"].unregister("d3", 100.0)
    ledgers["a"].unregister("d2", 500.0)
    assert [found for second in range(100, 580, 10) for found in orders(second)] == []
    came = replace(left, worker_id="d3.1", model="a", models=["b"], home_model="b")
    ledgers["a"].register(came, costed_snapshot("d3.1"), 580.0)
    assert [found for second in range(580, 1180, 10) for found in orders(second)] == []
    assert orders(1190) == ["d4"]
    left = ledgers["b"].info("d4")
    ledgers["b"].unregister("d4", 1200.0)
    came = replace(left, worker_id="d4.1", model="a", models=["b"], home_model="b")
    ledgers["a"].register(came, costed_snapshot("d4.1"), 1210.0)
    assert orders(1220) == ["d5"]  # for who has been missing all along nobody waits once more


def test_whom_another_model_has_lent_goes_back_before_anybody_else() -> None:
    """Serve replaces a worker that dies where it was started: the last worker of a model must be its own."""
    ledger = Ledger()
    for pid, (worker_id, home_model) in enumerate([("d1", "a"), ("d2", "b"), ("d3", None)]):
        info = worker_info(worker_id, pid=pid, model="a", home_model=home_model, models=["b"])
        ledger.register(info, costed_snapshot(worker_id), 0.0)
    ledger.heartbeat(worker_snapshot("d2", 2, num_running=1), 1.0)
    plan = PoolsPlan(prefill=replace(FIXED, initial=0, max_workers=0), decode=FIXED, flip_hold_s=5.0)
    sizing = keeper(ledger, plan)
    for second in range(20):
        assert not list(sizing.orders(float(second)))
    lent = sizing.spared(0.5, "b")
    assert lent is not None and lent.worker_id == "d2"


def test_a_worker_of_another_model_s_pool_counts_where_it_works() -> None:
    ledger = ledger_of("p1", "d1")
    guest = worker_info("d2", model="model", home="prefill", home_model="another", models=["another"])
    ledger.register(guest, costed_snapshot("d2"), 0.0)
    sizing = keeper(ledger, PoolsPlan(prefill=FIXED, decode=FIXED))
    assert not list(sizing.orders(10.0))
    assert sizing.targets == {"prefill": 1, "decode": 2}


def test_a_worker_of_another_model_s_pool_is_not_told_how_many_this_one_should_have() -> None:
    """Serve would take it for what the pool should have in which the worker was started."""
    ledger = ledger_of("p1", "d1")
    guest = worker_info("d2", model="model", home_model="another", models=["another"])
    ledger.register(guest, costed_snapshot("d2"), 0.0)
    assert targets(keeper(ledger, PoolsPlan(prefill=SCALING, decode=SCALING)), 10.0).keys() == {"p1", "d1"}


# --- settings ---


def plan_of(tree: dict[str, object]) -> PoolsPlan | None:
    return pools_plan(load_config(tree))


def test_settings_become_rules() -> None:
    scaling = {"max_replicas": 4, "target_utilisation": 0.5, "start_s": 7.0, "downscale_delay_s": 9.0}
    plan = plan_of({"prefill": {"replicas": 2, "autoscaling": scaling}})
    assert plan is not None
    expected = PoolRules(initial=2, max_workers=4, target=0.5, start_s=7.0, hold_s=9.0)
    assert plan.prefill == expected and not plan.decode.scales and not plan.flips


def test_without_pools_to_size_there_is_no_plan() -> None:
    assert plan_of({}) is None
    flips = plan_of({"scheduler": {"role_flips": True}})
    assert flips is not None and flips.flips and not flips.prefill.scales


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_colocated_pool_has_no_prefill(role: Role) -> None:
    plan = plan_of({"prefill": {"replicas": 0}, "decode": {"autoscaling": {"max_replicas": 3}}})
    assert plan is not None and plan.prefill.max_workers == 0 and plan.decode.max_workers == 3
