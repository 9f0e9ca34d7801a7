"""Admission: what becomes of a request: placed now, kept waiting, or told when to come back.

The entry of a decision (see the package). `Admission` takes a request through filter, score and pick, books what was
picked, and decides what happens to those for whom nothing good was found: they wait, fairly between tenants
(`TenantShares`), or hear when to come back (`RetryAfterCalendar`). The clock is passed in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from cluster.scheduler.block_index import PrefixReach
from cluster.scheduler.placement.estimates import Attainment
from cluster.scheduler.placement.filter import Filtered, filter_workers, may_ever_fit
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import (
    Action,
    Candidates,
    Decision,
    bind,
    first_good_s,
    pick,
    place_anyway,
    predict_later,
)
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.retry_after import (
    CONTESTED_SHARE,
    LATER_S,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    RetryAfterCalendar,
)
from kv_transfer.messages.scheduling import NO_TARGET, Place

FULL_LACK_AT: Final = 0.3  # of the requests turned away lately: capacity lacks, see `Admission`
_OUTPUT_WEIGHT: Final = 2.0  # a token that is put out costs a tenant as much as two of the prompt

Prefixes = Callable[[bytes], Mapping[str, PrefixReach]]


class AdmissionOutcome(Enum):
    PLACED = "it runs where the decision says"
    WAITING = "it is looked at again then, and answered by its deadline"
    REJECTED = "it should come back after that time; without one, never"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """A request is turned away where more than `max_queued_tokens` prompt tokens wait before it.

    `max_wait_s`: nobody waits longer, and those with a TTFT target only as long as it can be met.
    `max_contenders`: so many with targets wait at once. Few, because who is kept waiting with targets is placed in the
    end, in time or not, so that whoever is turned away hears it at once.
    `slo_traffic_s`: where nobody who could meet targets has asked for so long or is there, requests without are placed
    at once, to be done soonest. What there is to tune about Retry-After is in `retry_after`."""

    max_queued_tokens: int = 131_072
    max_waiting: int = 1000
    max_contenders: int = 1
    max_wait_s: float = 60.0
    slo_traffic_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    outcome: AdmissionOutcome
    decision: Decision
    until: float | None = None
    retry_after_s: float | None = None

    @classmethod
    def rejected(cls, decision: Decision, come_back_s: float) -> Verdict:
        """`come_back_s`: from now until there may be room; a client is told neither a moment nor a day."""
        told_s = min(max(MIN_RETRY_AFTER_S, come_back_s), MAX_RETRY_AFTER_S)
        return cls(outcome=AdmissionOutcome.REJECTED, decision=decision, retry_after_s=told_s)

    def __str__(self) -> str:
        until = "" if self.until is None else f" (until {self.until:.3f} s)"
        retry = "" if self.retry_after_s is None else f" (retry after {self.retry_after_s:.3f} s)"
        return f"{self.outcome.name}: {self.outcome.value}{until}{retry}\n{self.decision}"


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A request that will be placed a little later. `try_at`: before, another look is useless; `latest_start`: of its
    prompt's computation, to meet its target; by `deadline` it is placed or not."""

    query: Place
    arrived_at: float  # at its gateway
    came_at: float
    try_at: float
    latest_start: float
    deadline: float


class Admission:
    """Decides whether a request is placed, waits or is rejected. The `GlobalScheduler` asks for each request, and again
    for those who wait. `prefixes`: what workers hold of a prompt, by worker. `attainment`, to read: how many are
    served, of all and of those whose floor is kept."""

    def __init__(self, ledger: Ledger, prefixes: Prefixes, policy: DecisionPolicy, rules: AdmissionPolicy) -> None:
        self._ledger = ledger
        self._prefixes = prefixes
        self._policy = policy
        self._idle_policy = replace(policy, batch_queue_s=float("inf"), batch_slo_loss=float("inf"))
        self._rules = rules
        self._waiting: dict[str, _Waiting] = {}
        self._shares = TenantShares()
        self._calendar = RetryAfterCalendar()
        self._slo_traffic_until = float("-inf")
        self.attainment = Attainment()

    def ask(self, query: Place, now: float) -> Verdict:
        """Decide, and book or remember what was decided. Asked again for a request that waits, it is decided anew."""
        self._waiting.pop(query.request_id, None)
        self._shares.ask(query.tenant, now)
        verdict = self._judge(query, now, now)
        self._learn(query, verdict)
        if verdict.decision.rows and query.ttft_s is not None:
            self._ledger.demand.observe(verdict.decision.best.computing_s)
        return verdict

    def move(self, query: Place, now: float) -> Decision | None:
        """Book a request that is held up where it is on the workers that it would go to now. It does not count as
        served again before its gateway asks where its next attempt goes. None, and nothing has changed: who would
        decode it is excluded, or has no room for it, as predicted and as it reported last."""
        found = filter_workers(self._ledger, self._policy, query, self._prefixes(query.prefix_hashes), now)
        decision, candidates = pick(self._ledger, self._policy, query, found, now)
        if candidates is None or decision.action is not Action.PLACE:
            return None
        decode = decision.best.decode
        if decode in query.exclude or self._ledger.free_tokens(decode) <= query.num_tokens:
            return None
        if candidates.predicted.forecast.room_s[candidates.order[0]] > self._policy.max_room_s:
            return None
        self._ledger.ended(query.request_id, now)
        bind(self._ledger, decision)
        return decision

    def ask_again(self, now: float) -> list[Verdict]:
        """Look again at those who wait and are due; returns only what is news: placed, or rejected."""
        verdicts = []
        due = [waiting for waiting in self._waiting.values() if min(waiting.try_at, waiting.deadline) <= now]
        for waiting in self._in_turn(due, now):
            del self._waiting[waiting.query.request_id]
            query = replace(waiting.query, waited_s=now - waiting.arrived_at)
            verdict = self._judge(query, now, waiting.came_at)
            if verdict.outcome is not AdmissionOutcome.WAITING:
                self._learn(query, verdict)
                verdicts.append(verdict)
        return verdicts

    def next_at(self) -> float | None:
        """The time at which `ask_again` has something to do; None: nothing by itself."""
        return min((min(waiting.try_at, waiting.deadline) for waiting in self._waiting.values()), default=None)

    def wake(self, now: float, count: int) -> None:
        """Room may have come before it was expected: `ask_again` looks at so many of those who wait, too."""
        for waiting in self._in_turn(self._waiting.values(), now)[:count]:
            waiting.try_at = min(now, waiting.try_at)

    def gone(self, request_id: str) -> None:
        """The client of a request that waits is gone. Unknown ids are fine."""
        self._waiting.pop(request_id, None)

    def _in_turn(self, waiting: Iterable[_Waiting], now: float) -> list[_Waiting]:
        """First who has targets, then whose tenant is not ahead, then the least slack."""
        ahead = {tenant: self._is_ahead(tenant, now) for tenant in {w.query.tenant for w in waiting}}

        def turn(w: _Waiting) -> tuple[bool, bool, float, float, str]:
            return not w.query.has_targets, ahead[w.query.tenant], w.latest_start, w.came_at, w.query.request_id

        return sorted(waiting, key=turn)

    def _judge(self, query: Place, now: float, came_at: float) -> Verdict:
        found = filter_workers(self._ledger, self._policy, query, self._prefixes(query.prefix_hashes), now)
        share = self._share(query, now)
        if _is_unattainable(query, found):
            decision, candidates = self._pick(_without_targets(query), found, now)
        else:
            decision, candidates = self._pick(query, found, now, share)
            if query.has_targets:
                self._slo_traffic_until = now + self._rules.slo_traffic_s
            if query.is_pooled and query.has_targets and decision.action is Action.DEFER:
                # A client sends many inputs at once, which make each other late; were one refused, all would fail.
                decision, candidates = self._pick(_without_targets(query), found, now)
        if decision.action is Action.PLACE:
            return self._place(decision, now)
        if candidates is None:
            if not may_ever_fit(self._ledger, query, now):
                return Verdict(outcome=AdmissionOutcome.REJECTED, decision=decision)
            expected_at = self._ledger.decode_expected_at(now)
            return Verdict.rejected(decision, expected_at - now if expected_at < math.inf else 0.0)
        return self._wait_or_reject(decision, candidates, now, came_at, share)

    def _learn(self, query: Place, verdict: Verdict) -> None:
        """What became of a request that could be in time."""
        asked = verdict.decision.query  # without targets, where these are unattainable
        if (
            asked.has_targets
            and query.attempt == 0
            and verdict.decision.rows
            and verdict.outcome is not AdmissionOutcome.WAITING
        ):
            in_time = verdict.decision.best.slo_probability if verdict.outcome is AdmissionOutcome.PLACED else 0.0
            self.attainment.observe(self._groups(query), in_time)

    def _share(self, query: Place, now: float) -> float:
        """See `DecisionPolicy.admits`: whole while nobody is turned away, since nobody needs the room then; whole for
        those whose length or tenant is below its floor, and for who comes back when told to, whoever its tenant is:
        else what it was told does not hold. Another tenant's that is ahead of one which falls short have none."""
        kept, is_back = 0.0, self._calendar.match(query.question, now)
        if is_back or any(self.attainment.is_below_floor(group) for group in self._groups(query)):
            pass
        elif self._is_ahead(query.tenant, now):
            kept = 1.0
        elif self._calendar.is_due(now):
            kept = self._calendar.return_rate
        return 1.0 - kept * self._lack() * (1.0 - CONTESTED_SHARE)

    def _is_ahead(self, tenant: str, now: float) -> bool:
        """Whether it was served more than another one of which too little is served: the others want for nothing."""
        return self._shares.is_ahead(tenant, now, self.attainment.falls_short)

    def _groups(self, query: Place) -> list[Hashable]:
        """The groups that a request belongs to, of which none is to be served much less than the others."""
        return [_length_class(query), query.tenant] if len(self._shares) > 1 else [_length_class(query)]

    def _lack(self) -> float:
        """How much capacity lacks: from 0, it suffices, to 1, so many are turned away that others' room is kept and
        prices are full."""
        return min(1.0, (1.0 - self.attainment.overall) / FULL_LACK_AT)

    def _pick(
        self, query: Place, found: Filtered, now: float, share: float = 1.0
    ) -> tuple[Decision, Candidates | None]:
        goes_at_once = not query.has_targets and self._has_no_slo_traffic(now)
        policy = self._idle_policy if goes_at_once else self._policy
        decision, candidates = pick(self._ledger, policy, query, found, now, share=share)
        # Where nothing runs, time improves nothing; and a wrong cost model would never be put right.
        goes_anyway = goes_at_once or query.attempt > 0 or self._ledger.is_idle
        if decision.action is Action.DEFER and goes_anyway:
            decision = place_anyway(decision)
        return decision, candidates

    def _has_no_slo_traffic(self, now: float) -> bool:
        """Whether there is nobody to keep room for."""
        return now >= self._slo_traffic_until and not self._ledger.table.has_targets()

    def _place(self, decision: Decision, now: float) -> Verdict:
        """Book what was decided. Behind too long a queue it is turned away, unless it has begun already."""
        query, computing = decision.query, decision.best.computing
        excess = self._ledger.queued_tokens(computing) - self._rules.max_queued_tokens
        if excess > 0 and query.attempt == 0:
            later_s = self._ledger.table.cost(self._ledger.table.row(computing)).prefill_s(excess)
            return Verdict.rejected(decision, self._ledger.or_joined(now + later_s, now) - now)
        bind(self._ledger, decision)
        self._calendar.served(query.question, now, told_apart=query.has_name)
        self._calendar.placed(self._work_s(decision))
        expected = self._ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        self._shares.serve(query.tenant, decision.uncached_tokens, expected)
        return Verdict(outcome=AdmissionOutcome.PLACED, decision=decision)

    def _wait_or_reject(
        self, decision: Decision, candidates: Candidates, now: float, came_at: float, share: float
    ) -> Verdict:
        query = decision.query
        arrived_at = now - query.waited_s
        latest_start = arrived_at + query.ttft_target_s - decision.best.prefill_s
        deadline = min(came_at + self._rules.max_wait_s, latest_start)
        later = predict_later(self._ledger, query, candidates, now)
        if now < deadline and self._may_wait(query):
            within_s = deadline - now if query.has_targets else NO_TARGET
            wait_s = first_good_s(
                self._ledger, self._policy, query, later, query.waited_s, share=share, within_s=within_s
            )
            if wait_s is not None:
                until = min(now + wait_s, deadline)
                self._waiting[query.request_id] = _Waiting(
                    query=query,
                    arrived_at=arrived_at,
                    came_at=came_at,
                    try_at=until,
                    latest_start=latest_start,
                    deadline=deadline,
                )
                return Verdict(outcome=AdmissionOutcome.WAITING, decision=decision, until=until)
        if (query.has_targets or query.is_pooled) and came_at < now and decision.best.ttft_s < NO_TARGET:
            return self._place(place_anyway(decision), now)
        comes_then = -np.array(LATER_S)[:, None]
        retry_s = first_good_s(self._ledger, self._policy, query, later, comes_then, share=share)
        retry_at = self._ledger.or_joined(now + (LATER_S[-1] if retry_s is None else retry_s), now)
        if query.has_targets:
            free_at = self._ledger.table.free_at(decision.best.computing)
            retry_at = self._calendar.reserve(
                *(query.question, retry_at, self._work_s(decision), free_at, now),
                told_apart=query.has_name,
                num_workers=self._ledger.table.num_taking,
            )
        return Verdict.rejected(decision, retry_at - now)

    def _work_s(self, decision: Decision) -> float:
        """Seconds of workers' time that the request takes: the prompt's, and what its tokens add to the steps of those
        who decode beside it."""
        query, best, table = decision.query, decision.best, self._ledger.table
        cost = table.cost(table.row(best.decode))
        num_output = self._ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        token_s = cost.decode_s + cost.context_token_s * (query.num_tokens + num_output / 2)
        return best.computing_s + num_output * token_s

    def _may_wait(self, query: Place) -> bool:
        num_contenders = sum(waiting.query.has_targets for waiting in self._waiting.values())
        if query.has_targets and num_contenders >= self._rules.max_contenders:
            return False
        return len(self._waiting) < self._rules.max_waiting


class TenantShares:
    """Tells who has had more than its share: tokens served per tenant (cf. the virtual token counter of
    arXiv:2401.00588).

    A tenant that comes back after a pause is lifted to the least served of those who were there, so that nobody saves
    up. `quantum`: tokens that a tenant may be ahead; `active_s`: so long after a request a tenant still counts.
    """

    def __init__(self, quantum: float = 20_000.0, active_s: float = 30.0, max_tenants: int = 10_000) -> None:
        self._quantum = quantum
        self._active_s = active_s
        self._max_tenants = max_tenants
        self._served: OrderedDict[str, float] = OrderedDict()  # least recently heard of first
        self._asked_at: dict[str, float] = {}

    def __len__(self) -> int:
        """Tenants that are remembered."""
        assert len(self._served) == len(self._asked_at), "a tenant is half forgotten"
        return len(self._served)

    def ask(self, tenant: str, now: float) -> None:
        """The tenant wants something."""
        if now - self._asked_at.get(tenant, float("-inf")) > self._active_s:
            least = self._least_served(now)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._asked_at[tenant] = now
        self._served.move_to_end(tenant)
        while len(self._served) > self._max_tenants:
            gone, _ = self._served.popitem(last=False)
            del self._asked_at[gone]

    def serve(self, tenant: str, prompt_tokens: float, output_tokens: float) -> None:
        if tenant in self._served:
            self._served[tenant] += prompt_tokens + _OUTPUT_WEIGHT * output_tokens

    def is_ahead(self, tenant: str, now: float, falls_short: Callable[[str], bool] = lambda tenant: True) -> bool:
        """Whether it was served more than another tenant that wants something too, and that `falls_short`."""
        served = self._served.get(tenant, 0.0)
        return any(served - self._served[other] > self._quantum and falls_short(other) for other in self._active(now))

    def _least_served(self, now: float) -> float:
        return min((self._served[tenant] for tenant in self._active(now)), default=0.0)

    def _active(self, now: float) -> Iterator[str]:
        for tenant in reversed(self._served):
            if now - self._asked_at[tenant] > self._active_s:
                return
            yield tenant


def _length_class(query: Place) -> Hashable:
    """Prompts of one class differ by less than a fifth: else its shorter half, which is placed more easily, keeps all
    of it above its floor."""
    return int(4 * math.log2(max(1, query.num_tokens)))


def _without_targets(query: Place) -> Place:
    return replace(query, ttft_s=None, tpot_s=None, gap_s=None)


def _is_unattainable(query: Place, found: Filtered) -> bool:
    """Late also with no other prompt before it: it is lost for goodput, so it gets what others leave. What was begun
    already goes on as it was. Those who decode beside it count as well: did it wait for a worker where nobody decodes,
    it would lose minutes instead of the little that they take (docs/log/goodput.md)."""
    pace_s = min(query.tpot_target_s, query.gap_target_s)
    is_late = query.ttft_target_s < found.shortest_s or pace_s < found.shortest_tpot_s
    return query.attempt == 0 and found.shortest_s < NO_TARGET and is_late
