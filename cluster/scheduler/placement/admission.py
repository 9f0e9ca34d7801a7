"""In, later, or no: what becomes of a request, fair between tenants, and honest about when to come back.

Wires decision, outlook, waiting room, shares and promises together over one ledger. The clock is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from cluster.scheduler.block_index import PrefixReach
from cluster.scheduler.placement.candidates import Candidates
from cluster.scheduler.placement.decision import Action, Decision, anyway, book, decide
from cluster.scheduler.placement.fairness import TenantShares
from cluster.scheduler.placement.later import Outlook
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.query import NO_TARGET, Query
from cluster.scheduler.placement.retry_after import Promises
from cluster.scheduler.placement.survey import Survey, could_ever, survey
from cluster.scheduler.placement.wait_queue import Waiting, WaitingRoom

MIN_RETRY_AFTER_S: Final = 1.0

Prefixes = Callable[[bytes], Mapping[str, PrefixReach]]


class Outcome(Enum):
    PLACED = "it runs where the decision says"
    WAITING = "it is looked at again at `until`, and answered by its deadline"
    REJECTED = "it should come back after `retry_after_s`; where that is None, never"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """`contested_share`: what the share of a request (see `DecisionPolicy.admits`) is while others are to be served
    first: its tenant is ahead of another, or clients that were promised room may be back (the fewer do come back, the
    less is kept for them). `promised_crowding`: what is left of the policy's `crowding_cost` for clients that come back
    when they were asked to. `max_wait_s`: nobody waits longer, and those with a TTFT target only as long as it can be
    met.
    `max_contenders`: so many with targets wait at once. Few, because who is kept waiting with targets is placed in the
    end, in time or not, so that whoever is turned away hears it at once.
    `calm_s`: where nobody who could meet targets has asked for so long or is there, requests without are placed at
    once, to be done soonest."""

    contested_share: float = 0.5
    promised_crowding: float = 0.0
    max_waiting: int = 1000
    max_contenders: int = 1
    max_wait_s: float = 60.0
    calm_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    outcome: Outcome
    decision: Decision
    until: float | None = None
    retry_after_s: float | None = None

    def __str__(self) -> str:
        times = f" (until {self.until}, retry after {self.retry_after_s} s)"
        return f"{self.outcome.name}: {self.outcome.value}{times}\n{self.decision}"


class Admission:
    """`prefixes`: what workers hold of a prompt."""

    def __init__(self, ledger: Ledger, prefixes: Prefixes, policy: DecisionPolicy, rules: AdmissionPolicy) -> None:
        self._ledger = ledger
        self._prefixes = prefixes
        self._policy = policy
        self._calm_policy = replace(policy, batch_queue_s=float("inf"), batch_harm=float("inf"))
        self._promised_policy = replace(policy, crowding_cost=rules.promised_crowding * policy.crowding_cost)
        self._rules = rules
        self._room = WaitingRoom(self._rules.max_waiting)
        self._shares = TenantShares()
        self._promises = Promises()
        self._contended_until = float("-inf")

    def ask(self, query: Query, now: float) -> Verdict:
        """Decide, and book or remember what was decided. Asked again for a request that waits, it is decided anew."""
        self._room.remove(query.request_id)
        self._shares.ask(query.tenant, now)
        verdict = self._judge(query, now, now)
        if verdict.decision.rows and query.ttft_s < NO_TARGET:
            self._ledger.demand.observe(verdict.decision.best.prefill_s, query.ttft_s)
        return verdict

    def again(self, now: float) -> list[Verdict]:
        """Look again at those who wait and are due; returns only what is news: placed, or rejected."""
        verdicts = []
        for waiting in self._room.due(now, lambda tenant: self._shares.is_ahead(tenant, now)):
            self._room.remove(waiting.query.request_id)
            verdict = self._judge(waiting.query, now, waiting.came_at)
            if verdict.outcome is not Outcome.WAITING:
                verdicts.append(verdict)
        return verdicts

    def next_at(self) -> float | None:
        """When `again` has something to do."""
        return self._room.next_at()

    def wake(self, now: float, count: int) -> None:
        """Room may have come before it was expected: `again` looks at so many of those who wait, too."""
        self._room.hurry(now, count, lambda tenant: self._shares.is_ahead(tenant, now))

    def gone(self, request_id: str) -> None:
        """The client of a request that waits is gone. Unknown ids are fine."""
        self._room.remove(request_id)

    def _judge(self, query: Query, now: float, came_at: float) -> Verdict:
        surveyed = survey(self._ledger, self._policy, query, self._prefixes(query.prefix_hashes), now)
        share = self._share(query, now)
        if _is_hopeless(query, surveyed):
            decision, found = self._decide(replace(query, ttft_s=NO_TARGET, tpot_s=NO_TARGET), surveyed, now)
        else:
            decision, found = self._decide(query, surveyed, now, share)
            if query.has_targets:
                self._contended_until = now + self._rules.calm_s
        if decision.action is Action.PLACE:
            self._place(decision, now)
            return Verdict(outcome=Outcome.PLACED, decision=decision)
        if found is None:
            come_back = MIN_RETRY_AFTER_S if could_ever(self._ledger.table, query) else None
            return Verdict(outcome=Outcome.REJECTED, decision=decision, retry_after_s=come_back)
        return self._wait_or_reject(decision, found, now, came_at, share)

    def _share(self, query: Query, now: float) -> float:
        if self._shares.is_ahead(query.tenant, now):
            return self._rules.contested_share
        if self._promises.is_due(now) and not self._promises.redeem(query.question, now):
            return 1.0 - self._promises.returning * (1.0 - self._rules.contested_share)
        return 1.0

    def _decide(
        self, query: Query, surveyed: Survey, now: float, share: float = 1.0
    ) -> tuple[Decision, Candidates | None]:
        is_free = not query.has_targets and self._is_calm(now)
        policy = self._calm_policy if is_free else self._policy_for(query, now)
        decision, found = decide(self._ledger, policy, query, surveyed, now, share=share)
        # Where nothing runs, time improves nothing; and a wrong cost model would never be put right.
        goes_anyway = is_free or query.attempt > 0 or self._ledger.table.is_idle()
        if decision.action is Action.DEFER and goes_anyway:
            decision = anyway(decision)
        return decision, found

    def _policy_for(self, query: Query, now: float) -> DecisionPolicy:
        return self._promised_policy if self._promises.redeem(query.question, now) else self._policy

    def _is_calm(self, now: float) -> bool:
        """Whether there is nobody to keep room for."""
        return now >= self._contended_until and not self._ledger.table.has_targets()

    def _place(self, decision: Decision, now: float) -> None:
        query = decision.query
        book(self._ledger, decision)
        self._promises.kept(query.question)
        self._promises.placed(self._work_s(decision))
        expected = self._ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        self._shares.serve(query.tenant, decision.uncached_tokens, expected)

    def _wait_or_reject(
        self, decision: Decision, found: Candidates, now: float, came_at: float, share: float
    ) -> Verdict:
        query = decision.query
        latest_start = query.arrived_at + query.ttft_s - decision.best.prefill_s
        deadline = min(came_at + self._rules.max_wait_s, latest_start)
        outlook = Outlook(self._ledger, query, found, now)
        if now < deadline and self._may_wait(query):
            within_s = deadline - now if query.has_targets else NO_TARGET
            wait_s = outlook.placeable_s(self._policy_for(query, now), share, within_s)
            if wait_s is not None:
                until = min(now + wait_s, deadline)
                self._room.put(
                    Waiting(query=query, came_at=came_at, try_at=until, latest_start=latest_start, deadline=deadline)
                )
                return Verdict(outcome=Outcome.WAITING, decision=decision, until=until)
        if query.has_targets and came_at < now and decision.best.ttft_s < NO_TARGET:
            decision = anyway(decision)
            self._place(decision, now)
            return Verdict(outcome=Outcome.PLACED, decision=decision)
        retry_at = now + outlook.welcome_s(self._policy, share)
        if query.has_targets:
            pool = self._ledger.table.pools()[decision.best.prefill is None]
            num_workers = max(1, int(pool.stop - pool.start))
            retry_at = self._promises.make(query.question, retry_at, self._work_s(decision), num_workers, now)
        return Verdict(
            outcome=Outcome.REJECTED, decision=decision, retry_after_s=max(MIN_RETRY_AFTER_S, retry_at - now)
        )

    def _work_s(self, decision: Decision) -> float:
        """Of workers' time: the prompt's, and what its tokens add to the steps of those who decode beside it."""
        query, best, table = decision.query, decision.best, self._ledger.table
        cost = table.cost(table.row(best.decode))
        num_output = self._ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        token_s = cost.decode_s + cost.context_token_s * (query.num_tokens + num_output / 2)
        return best.prefill_s + num_output * token_s

    def _may_wait(self, query: Query) -> bool:
        if query.has_targets and self._room.num_with_targets >= self._rules.max_contenders:
            return False
        return not self._room.is_full


def _is_hopeless(query: Query, surveyed: Survey) -> bool:
    """Late also where nothing else is to be done: it is lost for goodput, so it gets what others leave. What was begun
    already goes on as it was."""
    is_late = query.ttft_s < surveyed.shortest_s or query.tpot_s < surveyed.shortest_tpot_s
    return query.attempt == 0 and surveyed.shortest_s < NO_TARGET and is_late
