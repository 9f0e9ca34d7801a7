"""What the HTTP side needs of the cluster: a `Generator` that turns a request into tokens, and for operators a
`ClusterView`.

The orchestrator implements the one, its scheduler client the other; tests of the HTTP side implement both with scripted
tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.gateway.timeline import SequenceTimeline
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import RequestSpec, TokenEvent
from kv_transfer.messages.workers import KnownWorker, LoadingReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What the live workers can do together."""

    max_model_len: int  # prompt and output tokens of one sequence
    ready: bool  # a request sent now could be served
    reason: str = ""  # a sentence, where not ready


LinkState = Literal["up", "down", "silent"]
"""A gateway's connection to a worker: silent, too, where a step of the worker is overdue."""

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


AnswerGateway = Callable[[bytes], Awaitable[bytes]]
"""Answers another gateway's question; no bytes: nothing is known."""


class ClusterView(Protocol):
    """What operators see of the cluster and may do to it. `SchedulerClient` implements it for the routes."""

    @property
    def gateway(self) -> str:
        """The name of this gateway among those of the cluster."""
        ...

    def answer_gateways(self, about: str, answer: AnswerGateway) -> None:
        """Answer other gateways' questions about that from now on."""
        ...

    async def ask_gateways(
        self, about: str, question: bytes, *, one_is_enough: bool = False
    ) -> dict[str, bytes | None]:
        """What each other gateway answers, by its name; None: nothing within a second, as where it is gone.
        `one_is_enough`: the answers until somebody knows something.

        Raises `cluster.errors.UnavailableError` while nobody can be asked.
        """
        ...

    def describe_workers(self) -> list[dict[str, object]]:
        """What is known of each live worker, as JSON values, for people and dashboards."""
        ...

    def reports(self) -> list[KnownWorker]:
        """Each live worker's registration and newest snapshot."""
        ...

    def link_states(self) -> dict[str, LinkState]:
        """How the gateway stands with each of them."""
        ...

    @property
    def pools(self) -> dict[Role, int]:
        """Workers that each pool should have by the scheduler's advice; empty while there is none."""
        ...

    @property
    def loading(self) -> list[LoadingReport]:
        """How far workers are that are yet to come."""
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
