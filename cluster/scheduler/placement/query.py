"""What the decision is asked: one request, its targets and whose it is. Knows no workers."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from engine.kv.prefix import HASH_BYTES

NO_TARGET = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One attempt of a request. Without a target (inf) it is batch work.

    `arrived_at`: when the client's request reached the gateway, on the scheduler's clock; TTFT counts from there.
    `prefix_hashes`: of the prompt's full blocks, joined, as far as the last one may be cached.
    """

    request_id: str
    attempt: int = 0
    num_tokens: int
    max_new_tokens: int
    arrived_at: float
    ttft_s: float = NO_TARGET
    tpot_s: float = NO_TARGET
    tenant: str = ""
    slo_class: str = ""
    prefix_hashes: bytes = b""
    exclude: Collection[str] = ()
    prefer_decode: str | None = None

    @property
    def has_targets(self) -> bool:
        return self.ttft_s < NO_TARGET or self.tpot_s < NO_TARGET

    @property
    def question(self) -> Hashable:
        """The same for the same question asked again, under whatever id."""
        return (self.tenant, self.slo_class, self.num_tokens, self.max_new_tokens, self.prefix_hashes[-HASH_BYTES:])
