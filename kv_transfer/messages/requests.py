"""What gateways and workers say to each other about one request.

Gateways take these in `Orchestrator`, prefill and decode workers in their `_on_message`; workers send by `GatewayPort`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from engine.sampling.params import SamplingParams
from engine.sequence import FinishReason, Pooling
from kv_transfer.digest import DigestKind
from kv_transfer.messages.codec import Message, message, record
from kv_transfer.messages.fields import Count, Embedding, Flag, Items, NonNegative, Real, Text, TokenId


@record
class AdapterRef:
    """An adapter that a sequence is computed with: by its digest the very one, by its folder where workers find it."""

    name: Text
    digest: Text
    folder: Text


@record
class RequestSpec:
    """One sequence to generate. `output_token_ids` were already emitted by earlier attempts. With `pooling` nothing is
    generated: its vector comes in place of the first token, from any worker that computes prompts."""

    request_id: Text
    attempt: Count
    prompt_token_ids: Items[TokenId]
    params: SamplingParams
    output_token_ids: Items[TokenId] = field(default_factory=list)
    cache_salt: Text = ""
    alone: Flag = False  # its steps are shared with nobody at first: it may be what makes workers fail
    # what was promised of its tokens, as in `SloClass`; None: nothing
    tpot_s: NonNegative | None = None
    gap_s: NonNegative | None = None
    pooling: Pooling | None = None
    # what the client expects its output to be much like: a guess, which changes only when tokens come
    prediction_token_ids: Items[TokenId] = field(default_factory=list)
    split_at: Count = 0  # who decodes computes the tokens from here on itself, and has the others from another worker
    adapter: AdapterRef | None = None  # None: the model alone
    model: Text = ""  # whose workers compute it; "": there is one

    @property
    def prefix_salt(self) -> str:
        """What keeps its prefixes apart from others': KV of an adapter is no other's, nor the model's."""
        return self.cache_salt if self.adapter is None else f"{self.adapter.digest} {self.cache_salt}"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_split(self) -> bool:
        """Whether two workers compute it, each a part."""
        return 0 < self.split_at < self.num_tokens

    @property
    def num_handed_tokens(self) -> int:
        """How many of the prompt's tokens another worker computes and hands over, where the one that decodes does not
        compute them all."""
        return self.split_at if self.is_split else self.num_tokens


@record
class Endpoint:
    """Where a process listens. Two endpoints with the same `node_id` share memory.

    `offers`: what it would take KV by besides memory of the host and TCP, in the words of those transports.
    """

    host: Text
    port: Annotated[int, Field(strict=True, ge=0, le=65535)]
    node_id: Text
    offers: Items[Text] = field(default_factory=list)


@record
class Fence:
    """A reference to a reservation that tells when it has become stale.

    `epoch` names one life of the receiving pool, `lease` the blocks, `generation` the attempt they are promised to:
    a newer attempt on the same lease makes all references of the older one void.
    """

    epoch: Count
    lease: Count
    generation: Count


@record
class Ticket:
    """The one object that crosses the hand-off: where the KV of a request goes, and the right to send it there."""

    request_id: Text
    fence: Fence
    endpoint: Endpoint  # of the decode worker's KV listener
    worker_id: Text
    num_tokens: Count  # whose KV is to come, from the first one on
    ttl_s: NonNegative  # the reservation lapses when nothing is heard of it for so long
    digest_kind: DigestKind = "xxh3_64"  # that the decode worker would have for itself


@record
class TokenEvent:
    """The `index`-th output token of a request (counted over all attempts)."""

    request_id: Text
    attempt: Count
    index: Count
    token_id: TokenId
    finish_reason: FinishReason | None = None
    logprob: Real | None = None
    top_logprobs: Items[tuple[TokenId, Real]] | None = None
    num_cached_tokens: Count | None = None  # this and the next only on an attempt's first token
    waited_s: NonNegative | None = None  # in the worker that began to compute the prompt, before its first step
    # only on an attempt's first token, where asked for: (logprob, top) of each prompt token after the first
    prompt_logprobs: Items[tuple[Real, Items[tuple[TokenId, Real]]]] | None = None
    drafted: tuple[Text, Count, Count] | None = None  # see `engine.drafting.drafter.Drafted`
    embedding: Embedding | None = None  # what was asked for in place of tokens: `token_id` says nothing


FailureCause = Literal["fault", "moved", "shared", "raised", "broke", "adapter"]
"""Why an attempt ended: something went wrong; its worker leaves in order, or for another request's sake, and others are
to go on with it; a step of it and others failed, after which it cannot go on there; its own steps fail while the worker
computes others'; the worker's device failed in a step of it, and has computed nothing since; the worker cannot load its
adapter."""


@record
class FailureEvent:
    """An attempt of a request ends without finishing; the gateway decides what follows."""

    request_id: Text
    attempt: Count
    reason: Text
    retryable: Flag
    cause: FailureCause = "fault"


@message
class Reserve(Message):
    """Gateway to decode: lease room for this request. Repeated with a newer attempt it renews the ticket."""

    request: RequestSpec


@message
class Reserved(Message):
    """Decode to gateway: room is leased; the ticket is for the prefill worker."""

    attempt: Count
    ticket: Ticket


@message
class RoomAwaited(Message):
    """Decode to gateway: no room yet; `Reserved` or `Refused` follows. The prompt may be computed meanwhile."""

    request_id: Text
    attempt: Count


@message
class Refused(Message):
    """Nothing was done for the request. `retry_after_s` is when it would probably fit; None: never on this worker."""

    request_id: Text
    attempt: Count
    reason: Text
    retry_after_s: NonNegative | None


@message
class Start(Message):
    """Gateway to prefill, with the ticket of the decode worker; without one while room is awaited there, and again once
    there is a ticket. Or to decode: with the ticket of another worker compute what that is for, without one do all
    of it."""

    request: RequestSpec
    ticket: Ticket | None


@message
class Cancel(Message):
    """Forget every attempt of the request up to this one. Always safe, also for unknown requests."""

    request_id: Text
    attempt: Count


@message
class StepOverdue(Message):
    """Worker to gateway: its step takes far longer than predicted, and may never end; or it has ended after all."""

    is_overdue: Flag


@message
class Computing(Message):
    """Worker to gateway, before a step: which requests it may be that take the worker down.

    `sequences`, each (request id, attempt): those of this gateway that compute here for the first time. `alone`: of
    this gateway's they are the only ones in a step, until the next message of this kind.
    """

    sequences: Items[tuple[Text, Count]]
    alone: Flag


@message
class Preempted(Message):
    """Worker to gateway: the request's KV was given up for others, and is computed again before its `index`-th output
    token comes."""

    request_id: Text
    attempt: Count
    index: Count


@record
class HandedOver:
    """Prefill to gateway: decode has verified this attempt's KV.

    `exposed_s`: the part of the hand-off that computing the prompt did not hide, in seconds on the prefill worker's
    clock, from the end of the last step until decode's answer was there. Decode goes on at most that late.
    """

    request_id: Text
    attempt: Count
    exposed_s: NonNegative


@message
class StepFrame(Message):
    """Worker to gateway: what one step brought for all requests of that gateway.

    `handoffs`, which come between steps, may also name requests that have ended since.
    """

    tokens: Items[TokenEvent]
    failures: Items[FailureEvent] = field(default_factory=list)
    handoffs: Items[HandedOver] = field(default_factory=list)
