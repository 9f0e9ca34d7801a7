"""What every endpoint of one gateway may use: the generator, the view of the cluster, the tokenizer, the settings, the
metrics. Routes ask for it as an `ApiOf` parameter.

Owns the counts of sequences in flight and of output that waits to be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import Depends, Request

from cluster.batch.service import BatchService
from cluster.config.settings import GatewaySettings
from cluster.errors import InvalidRequestError, NotFoundError, OverloadedError, UnavailableError
from cluster.gateway.generator import ClusterView, Generator, ServingLimits
from cluster.gateway.layout_study import LayoutStudy
from cluster.gateway.recent_requests import RecentRequests
from cluster.gateway.timeline import RequestTimeline
from cluster.http.background import StoredResponses
from cluster.http.openai.structured import Grammars
from cluster.http.server.turns import Turns
from cluster.http.server.unread import Unread
from cluster.http.terms import Tenants
from cluster.metrics.requests import Metrics
from cluster.slo.account import SloAccount
from engine.checkpoint.pooling import CheckpointPooling
from engine.text.formats import OutputFormats, ReasoningFormatName, ToolFormatName, output_formats
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.requests import AdapterRef

if TYPE_CHECKING:
    from cluster.gateway.adapter_folder import AdapterFolder  # brings torch, which only who has adapters needs

RESPONSES_SHARE: Final = 10  # files may take so many times what stored responses may


class InFlight:
    """Counts the sequences that this gateway is generating, and refuses more than it may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num = 0

    def require_room(self, num_sequences: int) -> None:
        """Check that there is room for so many sequences. Call it before anything is made ready for them.

        Raises InvalidRequestError if there will never be room for them at once, OverloadedError if there is none now:
        several take at most half of what others leave, so that a few large requests do not shut out small ones.
        """
        if num_sequences > self._limit:
            raise InvalidRequestError(
                f"This request asks for {num_sequences} choices (prompts × n) and the server generates at most "
                f"{self._limit} at a time. Send fewer prompts, or a smaller n.",
                param="n",
            )
        left = self._limit - self._num
        if num_sequences > (left if num_sequences == 1 or self._num == 0 else left // 2):
            raise OverloadedError(
                f"{self._num} of at most {self._limit} sequences are in flight here. Try again shortly.",
                retry_after_s=1.0,
            )

    def share(self, most: int) -> int:
        """How many sequences, from one to `most`, a request may have at once now, if it can wait for the rest."""
        return max(1, min(most, (self._limit - self._num) // 2))

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[Callable[[], None]]:
        """Hold room for that many sequences inside the block. Yields a function that gives back the room of one
        sequence; what is left is given back at the end. Raises like `require_room`."""
        self.require_room(num_sequences)
        held = num_sequences
        self._num += held

        def leave() -> None:
            nonlocal held
            assert held > 0, "more sequences end than have begun"
            held -= 1
            self._num -= 1

        try:
            yield leave
        finally:
            self._num -= held


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What clients that are slow, or gone without a word, can hold of a gateway.

    A body must have arrived within `body_timeout_s`. Of all bodies that are on their way, `max_arriving_bytes` are
    held, and at least as many as one body may have; beyond that the body that has been on its way longest gives way.
    Output that waits to be read is bounded by `max_unread_bytes`; beyond that the answer with most of it is ended. So
    is an answer of which the client takes nothing for `unread_timeout_s`.
    """

    body_timeout_s: float = 30.0
    max_arriving_bytes: int = 64 * 2**20
    unread_timeout_s: float = 30.0
    max_unread_bytes: int = 256 * 2**20


@dataclass(slots=True, kw_only=True)
class Api:
    """What every endpoint of a gateway may use; routes get it as an `ApiOf` parameter. `on_ended` is called with each
    request that was generated, for the request log; `layouts` replays that log. `recent` has the requests that run and
    those that ended last. `secret` is the cluster's. `batches` (files and batches) and `responses` are None if the
    gateway has no folder for them, `adapters` if it has none for those."""

    generator: Generator
    cluster: ClusterView
    tokenizer: Tokenizer
    model_name: str
    settings: GatewaySettings
    metrics: Metrics
    slo: SloAccount
    secret: InitVar[bytes]
    pooling: CheckpointPooling
    limits: HttpLimits = HttpLimits()
    tool_format: InitVar[ToolFormatName] = "auto"
    reasoning_format: InitVar[ReasoningFormatName] = "auto"
    on_ended: Callable[[RequestTimeline], None] = lambda timeline: None
    layouts: LayoutStudy = field(default_factory=LayoutStudy)
    batches: BatchService | None = None
    adapters: AdapterFolder | None = None
    recent: RecentRequests = field(default_factory=RecentRequests)
    created: int = field(default_factory=lambda: int(time.time()))
    formats: OutputFormats = field(init=False)
    tenants: Tenants = field(init=False)
    in_flight: InFlight = field(init=False)
    unread: Unread = field(init=False)
    turns: Turns = field(init=False, default_factory=Turns)
    grammars: Grammars = field(init=False)
    responses: StoredResponses | None = field(init=False)

    def __post_init__(self, secret: bytes, tool_format: ToolFormatName, reasoning_format: ReasoningFormatName) -> None:
        settings, tokenizer = self.settings, self.tokenizer
        self.formats = output_formats(
            tool_format, reasoning_format, tokenizer.chat_template, tokenizer.response_template
        )
        self.tenants = Tenants(
            secret, trust_header=settings.trust_tenant_header, share_prefixes=settings.share_prefixes
        )
        self.in_flight = InFlight(settings.max_concurrent)
        self.unread = Unread(self.limits.max_unread_bytes)
        self.grammars = Grammars(self.tokenizer)
        self.responses = None
        if self.batches is not None:
            self.responses = StoredResponses(self.batches.database, settings.storage_budget // RESPONSES_SHARE)

    @contextmanager
    def following(self, timeline: RequestTimeline) -> Iterator[None]:
        """Follow a request that is generated inside the block. However it ends, its timeline then goes to metrics, SLO
        account, request log and recent requests."""
        self.slo.follow(timeline)
        self.recent.began(timeline)
        with self.metrics.running():
            try:
                yield
            finally:
                timeline.ended()
                self.metrics.record(timeline)
                self.slo.ended(timeline)
                self.on_ended(timeline)
                self.recent.ended(timeline)

    def details(self, timeline: RequestTimeline, choice: int | None = None) -> dict[str, Any]:
        """What operators are told of a request of this gateway, with where the time of one choice went."""
        return {"gateway": self.cluster.gateway, "model": self.model_name, **self.recent.details(timeline, choice)}

    async def rows(self, timelines: Iterable[RequestTimeline]) -> list[dict[str, Any]]:
        """What operators are told at a glance of each of these requests of this gateway."""
        of_all = {"gateway": self.cluster.gateway, "model": self.model_name}
        return [{**of_all, **await self.turns.on_loop(self.recent.facts, timeline)} for timeline in timelines]

    async def adapter_of(self, name: str) -> AdapterRef | None:
        """What `name` asks for beside the model served here; None: that one alone. Raises NotFoundError where there is
        no such model, InvalidRequestError where there is one that cannot be computed."""
        if name == self.model_name:
            return None
        found = None
        if self.adapters is not None:
            try:
                found = await asyncio.to_thread(self.adapters.find, name)
            except (ValueError, OSError) as error:
                raise InvalidRequestError(f"The model {name!r} cannot be used: {error}.", param="model") from error
        if found is None:
            raise NotFoundError(
                f"The model {name[:200]!r} does not exist here. Use {self.model_name!r} (see /v1/models).",
                param="model",
                code="model_not_found",
            )
        return found

    def require_limits(self) -> ServingLimits:
        """What the live workers can do together. Raises UnavailableError while no worker is known."""
        limits = self.generator.limits()
        if limits is None:
            raise UnavailableError(
                "No worker has reported yet, so nothing can be generated. Try again shortly.", retry_after_s=2.0
            )
        return limits


async def _api(request: Request) -> Api:
    api: Api = request.app.state.api
    return api


ApiOf = Annotated[Api, Depends(_api)]
"""The type of a route's parameter that gets the gateway's `Api`."""
