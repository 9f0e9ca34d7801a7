"""What the HTTP side needs of the cluster: a `Generator` that turns a request into tokens, and for operators a
`ClusterView`.

The orchestrator implements the one, its scheduler client the other; tests of the HTTP side implement both with scripted
tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from cluster.gateway.timeline import SequenceTimeline
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import RequestSpec, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What the live workers can do together."""

    max_model_len: int  # prompt and output tokens of one sequence
    ready: bool  # a request sent now could be served
    reason: str = ""  # a sentence, where not ready


Tokens = list[TokenEvent]
"""What has come since the last time, in order: at least one."""


class Generator(Protocol):
    """Generates sequences somewhere in the cluster, surviving the deaths of workers."""

    def generate(self, request: RequestSpec, timeline: SequenceTimeline | None = None) -> AsyncGenerator[Tokens, None]:
        """The tokens of one sequence: each index once, in order, ending after the event with a `finish_reason`. Closing
        it cancels the sequence on every worker and frees what it holds.

        `timeline` says on what terms, and is told what happens when: where the sequence is and when each token came.
        None: without targets.

        Iterating raises a subclass of `cluster.errors.GenerationError` when the sequence cannot be finished.
        """
        ...

    def limits(self) -> ServingLimits | None:
        """None while no worker has registered yet, so that nothing is known."""
        ...


class ClusterView(Protocol):
    """What operators see of the cluster and may do to it. `SchedulerClient` implements it for the routes."""

    def describe_workers(self) -> list[dict[str, object]]:
        """What is known of each live worker, as JSON values, for people and dashboards."""
        ...

    @property
    def pools(self) -> dict[Role, int]:
        """Workers that each pool should have by the scheduler's advice; empty while there is none."""
        ...

    async def decisions(self, limit: int, *, as_text: bool) -> list[str]:
        """Where requests were sent lately and why, newest first: lines of JSON, or tables for people.

        Raises `cluster.errors.UnavailableError` while nobody can be asked.
        """
        ...

    async def change_role(self, worker_id: str, role: Role, drain_s: float) -> None:
        """Have a worker become one of that role; returns when it was told. What runs there after `drain_s` goes on
        elsewhere.

        Raises NotFoundError, ConflictError where it must not, or UnavailableError where nobody can say.
        """
        ...


async def one_by_one(stream: AsyncGenerator[Tokens, None]) -> AsyncGenerator[TokenEvent, None]:
    """The tokens of a stream; closes it."""
    async with aclosing(stream):
        async for tokens in stream:
            for token in tokens:
                yield token
