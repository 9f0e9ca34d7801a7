"""What the HTTP side needs of the cluster: a `Generator` that turns a request into tokens, and for operators a
`ClusterView`.

The orchestrator implements the one, its scheduler client the other; tests of the HTTP side implement both with scripted
tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
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


ConnectionState = Literal["up", "down", "silent"]
"""The state of a gateway's connection to a worker. A worker whose step is overdue counts as silent, too."""

Tokens = list[TokenEvent]
"""Tokens of one sequence that came since the last ones were read, in order: at least one."""


class Generator(Protocol):
    """Generates sequences somewhere in the cluster, surviving the deaths of workers."""

    def generate(self, request: RequestSpec, timeline: SequenceTimeline | None = None) -> AsyncGenerator[Tokens, None]:
        """Yields the tokens of one sequence: each index once, in order, ending after the event with a `finish_reason`.
        Closing the generator cancels the sequence on every worker and frees what it holds.

        `timeline` says on what terms the sequence is served, and notes where it is and when each token came. None: it
        is served without targets.

        Iterating raises a subclass of `cluster.errors.GenerationError` when the sequence cannot be finished.
        """
        ...

    def limits(self, model: str = "") -> ServingLimits | None:
        """What the live workers of a model can do together; "": there is one. None: no worker has registered yet."""
        ...


AnswerGateway = Callable[[bytes], Awaitable[bytes]]
"""Answers another gateway's question. Empty bytes: this gateway knows nothing of it."""


class ClusterView(Protocol):
    """What operators see of the cluster and may do to it. `SchedulerClient` implements it for the routes."""

    @property
    def gateway(self) -> str:
        """The name of this gateway among those of the cluster."""
        ...

    def answer_gateways(self, about: str, answer: AnswerGateway) -> None:
        """Answer other gateways' questions about the topic `about` by `answer` from now on."""
        ...

    async def ask_gateways(
        self, about: str, question: bytes, *, one_is_enough: bool = False
    ) -> dict[str, bytes | None]:
        """Ask all other gateways and return their answers by name. None: a gateway did not answer within a second, or
        is gone. `one_is_enough`: return as soon as one of them knows something.

        Raises `cluster.errors.UnavailableError` while nobody can be asked.
        """
        ...

    def describe_workers(self) -> list[dict[str, object]]:
        """What is known of each live worker, as JSON values, for people and dashboards."""
        ...

    def reports(self) -> list[KnownWorker]:
        """Each live worker's registration and newest snapshot."""
        ...

    def connection_states(self) -> dict[str, ConnectionState]:
        """The state of this gateway's connection to each live worker."""
        ...

    @property
    def pools(self) -> dict[str, dict[Role, int]]:
        """How many workers each pool should have by the scheduler's advice, by model. Empty: it gives none."""
        ...

    @property
    def loading(self) -> list[LoadingReport]:
        """The progress of workers that are starting and have not registered."""
        ...

    async def decisions(self, limit: int, *, as_text: bool) -> list[str]:
        """The newest `limit` decisions of the scheduler, newest first: where requests were sent and why, as lines of
        JSON or as tables for people.

        Raises `cluster.errors.UnavailableError` while nobody can be asked.
        """
        ...

    async def change_role(self, worker_id: str, role: Role, drain_s: float, model: str = "") -> None:
        """Have a worker take on that role, and that model ("": it keeps its own); returns once it was told. What still
        runs there after `drain_s` goes on elsewhere.

        Raises NotFoundError without such a worker, ConflictError where it must not change, and UnavailableError while
        nobody can be asked.
        """
        ...
