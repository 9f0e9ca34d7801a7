"""Who has had more than its share: tokens served per tenant (cf. the virtual token counter of arXiv:2401.00588).

A tenant that comes back after a pause is lifted to the least served of those who were there, so that nobody saves up.
Knows tokens only; what follows from being ahead is admission's business.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_OUTPUT_WEIGHT: Final = 2.0  # a token that is put out costs as much as two of the prompt


class TenantShares:
    """`quantum`: tokens that a tenant may be ahead; `active_s`: so long after a request a tenant still counts."""

    def __init__(self, quantum: float = 20_000.0, active_s: float = 30.0, max_tenants: int = 10_000) -> None:
        self._quantum = quantum
        self._active_s = active_s
        self._max_tenants = max_tenants
        self._served: OrderedDict[str, float] = OrderedDict()  # least recently heard of first
        self._asked_at: dict[str, float] = {}

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

    def is_ahead(self, tenant: str, now: float) -> bool:
        """Whether it was served more than another tenant that wants something too."""
        return self._served.get(tenant, 0.0) - self._least_served(now) > self._quantum

    def _least_served(self, now: float) -> float:
        least = float("inf")
        for tenant in reversed(self._served):
            if now - self._asked_at[tenant] > self._active_s:
                break
            least = min(least, self._served[tenant])
        return least if least < float("inf") else 0.0
