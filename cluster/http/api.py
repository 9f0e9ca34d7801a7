"""What every endpoint of one gateway may use: the generator, the view of the cluster, the models, the settings, the
metrics. Routes ask for it as an `ApiOf` parameter, and it for the model that a request names.

Owns the counts of sequences in flight and of output that waits to be read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from cluster import build_info
from cluster.batch.service import BatchService
from cluster.config.settings import GatewaySettings
from cluster.errors import DeadlineError, InvalidRequestError, NotFoundError, OverloadedError
from cluster.gateway.generator import ClusterView, Generator
from cluster.gateway.layout_study import LayoutStudy
from cluster.gateway.recent_requests import RecentRequests
from cluster.gateway.timeline import RequestTimeline
from cluster.http.background import StoredResponses
from cluster.http.openai.schemas import ServedBody
from cluster.http.served_model import ServedModel
from cluster.http.server.turns import Turns
from cluster.http.server.unread import Unread
from cluster.http.terms import Tenants, terms_of, trace_headers
from cluster.metrics.requests import Metrics
from cluster.slo.account import SloAccount
from cluster.slo.classes import RequestTerms
from kv_transfer.messages.requests import AdapterRef

RESPONSES_SHARE: Final = 10  # files may take so many times what stored responses may


class InFlight:
    """Counts the sequences that this gateway is generating, and refuses more than it may.

    A tenant that has few of them finds room beyond the limit. Else another one's, which wait for their turn, would keep
    it from asking for its own: whose turn it is the scheduler says.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._few, self._beyond = limit // 16, limit // 4
        self._num = 0
        self._of_tenants = Counter[str]()

    def require_room(self, num_sequences: int, terms: RequestTerms) -> None:
        """Check that there is room for so many sequences of a request. Call it before anything is made ready for them.
        Who has time, as a line of a batch, leaves what is beyond the limit to others.

        Raises InvalidRequestError if there will never be room for them at once, OverloadedError if there is none now:
        several take at most half of what others leave, within the limit and beyond, so that a few large requests do not
        shut out small ones.
        """
        if num_sequences > self._limit:
            raise InvalidRequestError(
                f"This request asks for {num_sequences} choices (prompts × n) and the server generates at most "
                f"{self._limit} at a time. Send fewer prompts, or a smaller n.",
                param="n",
            )
        left = self._limit - self._num
        if num_sequences <= (left if num_sequences == 1 or self._num == 0 else left // 2):
            return
        has_few = self._of_tenants[terms.tenant] + num_sequences <= self._few
        left += self._beyond
        if terms.has_time or not has_few or num_sequences > (left if num_sequences == 1 else left // 2):
            raise OverloadedError(
                f"{self._num} sequences are in flight here, where there is room for {self._limit}. Try again shortly.",
                retry_after_s=1.0,
            )

    def share(self, most: int) -> int:
        """How many sequences, from one to `most`, a request may have at once now, if it can wait for the rest."""
        return max(1, min(most, (self._limit - self._num) // 2))

    @contextmanager
    def enter(self, num_sequences: int, terms: RequestTerms) -> Iterator[Callable[[], None]]:
        """Hold room for that many sequences of a request inside the block. Yields a function that gives back the room
        of one sequence; what is left is given back at the end. Raises like `require_room`."""
        self.require_room(num_sequences, terms)
        held = num_sequences
        self._count(held, terms.tenant)

        def leave() -> None:
            nonlocal held
            assert held > 0, "more sequences end than have begun"
            held -= 1
            self._count(-1, terms.tenant)

        try:
            yield leave
        finally:
            self._count(-held, terms.tenant)

    def _count(self, num_sequences: int, tenant: str) -> None:
        self._num += num_sequences
        self._of_tenants[tenant] += num_sequences
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]


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
    """What every endpoint of a gateway may use; routes get it as an `ApiOf` parameter. `models`: at least one, each
    under a name of its own. `on_ended` is called with each request that was generated, for the request log; `layouts`
    replays that log. `recent` has the requests that run and those that ended last. `secret` is the cluster's. `batches`
    (files and batches) and `responses` are None if the gateway has no folder for them. `build`: which Legato runs here,
    as of its start: a checkout may change under it."""

    generator: Generator
    cluster: ClusterView
    models: Sequence[ServedModel]
    settings: GatewaySettings
    metrics: Metrics
    slo: SloAccount
    secret: InitVar[bytes]
    limits: HttpLimits = HttpLimits()
    on_ended: Callable[[RequestTimeline], None] = lambda timeline: None
    layouts: LayoutStudy = field(default_factory=LayoutStudy)
    batches: BatchService | None = None
    recent: RecentRequests = field(default_factory=RecentRequests)
    created: int = field(default_factory=lambda: int(time.time()))
    build: dict[str, str | int] = field(default_factory=build_info)
    tenants: Tenants = field(init=False)
    in_flight: InFlight = field(init=False)
    unread: Unread = field(init=False)
    turns: Turns = field(init=False, default_factory=Turns)
    responses: StoredResponses | None = field(init=False)

    def __post_init__(self, secret: bytes) -> None:
        settings = self.settings
        self.tenants = Tenants(
            secret, trust_header=settings.trust_tenant_header, share_prefixes=settings.share_prefixes
        )
        self.in_flight = InFlight(settings.max_concurrent)
        self.unread = Unread(self.limits.max_unread_bytes)
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

    @asynccontextmanager
    async def preparing(self, terms: RequestTerms) -> AsyncIterator[None]:
        """Make a request ready inside the block, from where it is followed. An error that ends it there is counted, and
        goes on. Raises DeadlineError as `in_time` does."""
        with self.slo.admitting(terms):
            async with self.in_time(terms):
                yield

    @asynccontextmanager
    async def in_time(self, terms: RequestTerms) -> AsyncIterator[None]:
        """Raises DeadlineError at the request's deadline, if the block lasts longer. A deadline that its terms do not
        name counts from its arrival."""
        deadline_s = self.settings.request_deadline_s
        deadline = terms.arrived_at + deadline_s if terms.deadline is None else terms.deadline
        timeout = asyncio.timeout(deadline - time.monotonic())
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineError(
                f"The request took longer than {deadline_s:g} s. Ask for fewer tokens, or try again later."
            ) from error

    def details(self, timeline: RequestTimeline, choice: int | None = None) -> dict[str, Any]:
        """What operators are told of a request of this gateway, with where the time of one choice went."""
        return {"gateway": self.cluster.gateway, **self.recent.details(timeline, choice)}

    async def rows(self, timelines: Iterable[RequestTimeline]) -> list[dict[str, Any]]:
        """What operators are told at a glance of each of these requests of this gateway."""
        here = {"gateway": self.cluster.gateway}
        return [{**here, **await self.turns.on_loop(self.recent.facts, timeline)} for timeline in timelines]

    def served(self, name: str) -> ServedModel | None:
        """The model of that name, which is no adapter's; None: there is none."""
        return next((model for model in self.models if model.name == name), None)

    async def find_model(self, name: str | None) -> Asked:
        """What a request for that model, or adapter of one, asks for: of several adapters of one name, the first that
        can be computed. None: the model that there is. Raises NotFoundError where there is no such model,
        InvalidRequestError where there is one that cannot be computed, or where it takes a name to know which is meant.
        """
        if name is None and len(self.models) > 1:
            raise InvalidRequestError(f"Several models are served here. Say which: {self._names}.", param="model")
        if name is None:
            return Asked(self, self.models[0], None)
        if (found := self.served(name)) is not None:
            return Asked(self, found, None)
        refused: InvalidRequestError | None = None
        for model in self.models:
            try:
                adapter = await model.adapter(name)
            except InvalidRequestError as error:
                refused = refused or error
            else:
                if adapter is not None:
                    return Asked(self, model, adapter)
        if refused is not None:
            raise refused
        raise NotFoundError(
            f"The model {name[:200]!r} does not exist here. Use {self._names} (see /v1/models).",
            param="model",
            code="model_not_found",
        )

    @property
    def _names(self) -> str:
        return " or ".join(repr(model.name) for model in self.models)


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks for: a model of this gateway, with one of its adapters or alone (None)."""

    api: Api
    model: ServedModel
    adapter: AdapterRef | None

    def timeline(self, endpoint: str, request: Request, body: ServedBody) -> RequestTimeline:
        """A new timeline of the request, on the terms that it states. `endpoint`: its name in metrics. Raises
        InvalidRequestError as `terms_of` does."""
        terms = terms_of(request, body, self.api.slo.classes, self.api.tenants, self.model.name)
        return RequestTimeline(endpoint=endpoint, terms=terms, trace_headers=trace_headers(request))


async def _api(request: Request) -> Api:
    api: Api = request.app.state.api
    return api


ApiOf = Annotated[Api, Depends(_api)]
"""The type of a route's parameter that gets the gateway's `Api`."""
