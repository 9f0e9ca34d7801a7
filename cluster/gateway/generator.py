"""What the HTTP side needs of the cluster: one object that turns a request into tokens.

The orchestrator implements `Generator`; tests of the HTTP side implement it with scripted tokens. Knows nothing of
HTTP, placement or workers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cluster.gateway.journey import Journey
from cluster.slo.terms import RequestTerms
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import RequestSpec, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What the live workers can do together."""

    max_model_len: int  # prompt and output tokens of one sequence
    ready: bool  # a request sent now could be served
    reason: str = ""  # a sentence, where not ready


class Arrival(NamedTuple):
    """A token, and when it reached this process: seconds of the monotonic clock."""

    at: float
    token: TokenEvent


Arrivals = list[Arrival]
"""What has come since the last time, in order: at least one."""


class TokenStream(Protocol):
    """The tokens of one sequence, as many at a time as are there. Any async generator of Arrivals is one."""

    def __aiter__(self) -> AsyncIterator[Arrivals]: ...

    def __anext__(self) -> Coroutine[Any, Any, Arrivals]: ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Cancel the sequence on every worker and free what it holds. Idempotent; nothing to do after the end."""
        ...


class Generator(Protocol):
    """Generates sequences somewhere in the cluster, surviving the deaths of workers."""

    def generate(
        self, request: RequestSpec, terms: RequestTerms | None = None, journey: Journey | None = None
    ) -> TokenStream:
        """The tokens of one sequence: each index once, in order, ending after the event with a `finish_reason`.

        No `terms`: without targets. `journey` is kept up to date with where the sequence is.

        Iterating raises a subclass of `cluster.errors.GenerationError` when the sequence cannot be finished.
        """
        ...

    async def decisions(self, limit: int, *, as_text: bool) -> list[str]:
        """Where requests were sent lately and why, newest first: lines of JSON, or tables for people.

        Raises `cluster.errors.UnavailableError` while nobody can be asked.
        """
        ...

    def workers(self) -> list[dict[str, object]]:
        """What is known of each live worker, as JSON values, for people and dashboards."""
        ...

    def pools(self) -> dict[Role, int]:
        """Workers that each pool should have by the scheduler's advice; empty while there is none."""
        ...

    async def change_role(self, worker_id: str, role: Role, drain_s: float) -> None:
        """Have a worker become one of that role; returns when it was told. What runs there after `drain_s` goes on
        elsewhere.

        Raises NotFoundError, ConflictError where it must not, or UnavailableError where nobody can say.
        """
        ...

    def limits(self) -> ServingLimits | None:
        """None while no worker has registered yet, so that nothing is known."""
        ...


async def one_by_one(stream: TokenStream) -> AsyncGenerator[TokenEvent, None]:
    """The tokens of a stream; closes it."""
    async with aclosing(stream):
        async for arrivals in stream:
            for arrival in arrivals:
                yield arrival.token
