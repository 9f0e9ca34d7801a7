"""What gateways and the global scheduler say to each other about requests, promises, roles and decisions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field
from typing import Final, Literal

from engine.kv.prefix import HASH_BYTES
from kv_transfer.messages.blocks import IndexReport
from kv_transfer.messages.codec import Message, message, record
from kv_transfer.messages.fields import Count, Flag, Hashes, Items, NonNegative, Opaque, Role, Text
from kv_transfer.messages.workers import KnownWorker, LoadingReport

NO_TARGET: Final = float("inf")
MAX_DECISIONS: Final = 100  # in one answer: some 8 ms of the scheduler's time, in which it places nothing


@message
class Place(Message):
    """Gateway to scheduler: where should this attempt run? Placement decides on it and books it as it is.

    `max_new_tokens` 0: a vector is asked for in place of tokens, of whoever computes the prompt.
    """

    request_id: Text
    attempt: Count
    num_tokens: Count
    max_new_tokens: Count
    exclude: Items[Text] = field(default_factory=list)  # worker ids that just failed this request
    prefer_decode: Text | None = None  # holds a reservation of an earlier attempt
    slo_class: Text = ""
    tenant: Text = ""
    ttft_s: NonNegative | None = None  # targets; None: best effort
    tpot_s: NonNegative | None = None
    gap_s: NonNegative | None = None
    waited_s: NonNegative = 0.0  # since the request arrived at its gateway
    prefix_hashes: Hashes = b""  # of the prompt's full blocks, as far as the last one may be cached
    prompt_hash: Hashes = b""  # of the whole prompt; empty where nobody made one
    adapter: Text = ""  # its digest; "": the model alone
    model: Text = ""  # whose workers may take it; "": there is one
    stays: Flag = False  # this attempt goes on where it is, unless a worker that is not excluded has room for it now

    @property
    def is_pooled(self) -> bool:
        """Whether an embedding is wanted in place of tokens, so that nothing is decoded."""
        return self.max_new_tokens == 0

    @property
    def has_targets(self) -> bool:
        """False: it is batch work."""
        return self.ttft_s is not None or self.tpot_s is not None or self.gap_s is not None

    @property
    def ttft_target_s(self) -> float:
        """`NO_TARGET` where there is none, as for the next."""
        return NO_TARGET if self.ttft_s is None else self.ttft_s

    @property
    def tpot_target_s(self) -> float:
        return NO_TARGET if self.tpot_s is None else self.tpot_s

    @property
    def gap_target_s(self) -> float:
        return NO_TARGET if self.gap_s is None else self.gap_s

    @property
    def question(self) -> Hashable:
        """A key that is the same whenever the same question is asked again, under whatever id."""
        last = self.prompt_hash or self.prefix_hashes[-HASH_BYTES:]
        return (self.tenant, self.slo_class, self.num_tokens, self.max_new_tokens, last, self.adapter)

    @property
    def has_name(self) -> bool:
        """Whether `question` names the prompt, so that who asks something else has another one."""
        return bool(self.prompt_hash or self.prefix_hashes)

    @property
    def is_told_apart(self) -> bool:
        """Whether hardly another client has the same `question`. Few tokens, less than a block, many may have in
        common."""
        return bool(self.prefix_hashes)


@message
class Placement(Message):
    """Where an attempt runs, by its workers' ids. `prefill` None: the decode worker, or of what is pooled any worker,
    does all of it. `split_at`: the decode worker computes the tokens from there on, `prefill` those before; 0:
    `prefill` computes all. `ttft_s`: from the request's arrival, as predicted."""

    request_id: Text
    attempt: Count
    prefill: Text | None
    decode: Text
    ttft_s: NonNegative | None = None
    split_at: Count = 0


@record
class StandingRequest:
    """A request that is on its workers, by their ids. `prefill` None: the decode worker computes the prompt.
    `num_emitted`, `since_first_s`: of this attempt; none: its prompt is still to be computed."""

    place: Place  # as it was asked with, without what matters to the choice of workers alone; `waited_s`: by now
    prefill: Text | None
    decode: Text
    num_emitted: Count = 0
    since_first_s: NonNegative = 0.0
    slo_probability: NonNegative = 1.0  # of meeting its targets; 0: the one for its first token is missed


@message
class Standing(Message):
    """Gateway to scheduler: requests that were placed without it, by its predecessor or by the gateway."""

    requests: Items[StandingRequest]


@message
class Unplaceable(Message):
    """No worker can take it now. `retry_after_s` None: none ever could (the sentence says why)."""

    request_id: Text
    attempt: Count
    reason: Text
    retry_after_s: NonNegative | None


@message
class Ended(Message):
    """Gateway to scheduler: the request left the cluster; forget its reservations of work."""

    request_id: Text
    num_output_tokens: Count | None = None  # where it came to its end


@message
class FirstToken(Message):
    """Gateway to scheduler: the request's prompt is computed; from here on it decodes."""

    request_id: Text


@message
class PartComputed(Message):
    """Gateway to scheduler: of a request that is split, the first part is computed and on its decode worker."""

    request_id: Text


@message
class SloUpdate(Message):
    """Gateway to scheduler, every second or so: how requests fared since the last one (`cluster.slo.report`)."""

    report: Opaque


@message
class Queued(Message):
    """Scheduler to gateway, at once: the request waits for room, and will be answered within `within_s`."""

    request_id: Text
    attempt: Count
    within_s: NonNegative


@message
class ClusterSnapshot(Message):
    """Scheduler to gateways, on change and periodically: all live workers with their newest snapshots."""

    workers: Items[KnownWorker]
    indexes: Items[IndexReport] = field(default_factory=list)
    pools: dict[Text, dict[Role, Count]] = field(default_factory=dict)  # by model, the workers that each should have
    loading: Items[LoadingReport] = field(default_factory=list)  # workers that are yet to come


@message
class RoleRequest(Message):
    """Gateway to scheduler: have this worker change its role, or its model. `ask_id` tells a gateway's questions
    apart."""

    ask_id: Count
    worker_id: Text
    role: Role
    drain_s: NonNegative
    model: Text = ""  # "": the one that it has


@message
class RoleAnswer(Message):
    """Scheduler to gateway: whether the worker was told. `reason`: why not."""

    ask_id: Count
    outcome: Literal["ordered", "unknown", "refused"]
    reason: Text = ""


@message
class AskDecisions(Message):
    """Gateway to scheduler: the newest `limit` decisions, at most `MAX_DECISIONS`. `ask_id` tells a gateway's questions
    apart."""

    ask_id: Count
    limit: Count
    as_text: Flag = False  # the tables that they were made from, for people


@message
class Decisions(Message):
    """Scheduler to gateway: newest first, each one line of JSON, or a table where that was asked for."""

    ask_id: Count
    decisions: Items[Text] = field(default_factory=list)


@message
class AskGateways(Message):
    """Gateway to scheduler, which passes it on to all other gateways: what each knows of requests that came to it.
    `ask_id` tells the asker's questions apart; what `question` and `answer` hold, its users know by `about`."""

    ask_id: Count
    about: Text
    question: Opaque = b""
    asker: Text = ""  # the gateway, as the scheduler adds


@message
class GatewaysAsked(Message):
    """Scheduler to gateway: who was asked."""

    ask_id: Count
    gateways: Items[Text]


@message
class GatewayAnswer(Message):
    """Gateway to scheduler, which passes it on to the `asker`."""

    ask_id: Count
    asker: Text
    answer: Opaque
    gateway: Text = ""  # whose it is, as the scheduler adds
