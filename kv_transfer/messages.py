"""Every message that crosses between Legato's processes, and its encoding.

A message is a frozen dataclass; on the wire it is the msgpack array `[tag, {field: value}]`. Decoding validates types
and ranges (pydantic) and refuses unknown tags and fields, so a malformed frame raises `MalformedMessageError` and
nothing else. Messages hold plain data only; behaviour lives in the state machines that take them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

import msgpack
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from engine.prefix import HASH_BYTES
from engine.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from engine.stopping import FinishReason

PROTOCOL_VERSION: Final = 1

# Strict, because by default pydantic takes "5", 5.0 and true for integers; and finite, because a NaN passes through
# every comparison that a scheduler might guard itself with.
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Digest = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0.0)]
Role = Literal["prefill", "decode"]

_Item = TypeVar("_Item")
# Stops at the first bad item: a megabyte of bad items must not cost a gigabyte of error reports.
Items = Annotated[list[_Item], Field(fail_fast=True)]


MAX_HASHES: Final = 16_384  # in one value
MAX_EVENT_CHANGES: Final = 32  # in one message: 8 MiB of hashes, half of what a frame may hold
Tier = Literal["device", "host", "disk"]
SourceName = Literal["neighbours", "disk"]
PrefixSource = Literal["device", "host", "neighbours", "disk"]


def _whole_hashes(joined: bytes) -> bytes:
    if len(joined) % HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes are not a number of hashes of {HASH_BYTES} bytes")
    return joined


# Hashes of columns (see `engine.prefix`), joined: one value instead of thousands.
Hashes = Annotated[bytes, Field(strict=True, max_length=MAX_HASHES * HASH_BYTES), AfterValidator(_whole_hashes)]


class MalformedMessageError(ValueError):
    """The bytes are no message of this protocol version."""


_STRICT = ConfigDict(extra="forbid")


# --- what messages are made of ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One sequence to generate. `output_token_ids` were already emitted by earlier attempts."""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count
    prompt_token_ids: Items[TokenId]
    params: SamplingParams
    output_token_ids: Items[TokenId] = field(default_factory=list)
    cache_salt: Text = ""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a process listens. Two endpoints with the same `node_id` share memory."""

    __pydantic_config__ = _STRICT
    host: Text
    port: Annotated[int, Field(strict=True, ge=0, le=65535)]
    node_id: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A reference to a reservation that tells when it has become stale.

    `epoch` names one life of the receiving pool, `lease` the blocks, `generation` the attempt they are promised to:
    a newer attempt on the same lease makes all references of the older one void.
    """

    __pydantic_config__ = _STRICT
    epoch: Count
    lease: Count
    generation: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The one object that crosses the hand-off: where the KV of a request goes, and the right to send it there."""

    __pydantic_config__ = _STRICT
    request_id: Text
    fence: Fence
    endpoint: Endpoint  # of the decode worker's KV listener
    worker_id: Text
    num_tokens: Count  # whose KV the reservation has room for
    ttl_s: NonNegative  # the reservation lapses when nothing is heard of it for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """The `index`-th output token of a request (counted over all attempts)."""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count
    index: Count
    token_id: TokenId
    finish_reason: FinishReason | None = None
    logprob: Real | None = None
    top_logprobs: Items[tuple[TokenId, Real]] | None = None
    num_cached_tokens: Count | None = None  # only on an attempt's first token
    # only on an attempt's first token, where asked for: (logprob, top) of each prompt token after the first
    prompt_logprobs: Items[tuple[Real, Items[tuple[TokenId, Real]]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent:
    """This attempt of the request ends without finishing; the gateway decides what follows."""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count
    reason: Text
    retryable: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChange:
    """Columns of blocks that a tier of a worker has held, or has not held any more, since the change before it."""

    __pydantic_config__ = _STRICT
    tier: Tier
    stored: Hashes
    removed: Hashes


# --- gateway <-> worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Gateway to decode: lease room for this request. Repeated with a newer attempt it renews the ticket."""

    __pydantic_config__ = _STRICT
    request: RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    __pydantic_config__ = _STRICT
    attempt: Count
    ticket: Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nothing was done for the request. `retry_after_s` is when it would probably fit; None: never on this worker."""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count
    reason: Text
    retry_after_s: NonNegative | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Gateway to prefill (with the ticket of the decode worker), or to decode (without: do all of it yourself)."""

    __pydantic_config__ = _STRICT
    request: RequestSpec
    ticket: Ticket | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Forget every attempt of the request up to this one. Always safe, also for unknown requests."""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFrame:
    """Worker to gateway: what one step brought for all requests of that gateway."""

    __pydantic_config__ = _STRICT
    tokens: Items[TokenEvent]
    failures: Items[FailureEvent] = field(default_factory=list)


# --- prefill <-> decode ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabHeader:
    """Announces the KV of `num_tokens` tokens of one layer, `[2, num_tokens, num_kv_heads, head_dim]`, K before V.

    `digest` is of the payload's bytes as they lie in the slab.
    """

    __pydantic_config__ = _STRICT
    request_id: Text
    fence: Fence
    layer: Count
    token_start: Count
    num_tokens: Count
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All KV has been announced; decode may go on from here once it has verified it.

    `layer_digests[l]` is the sum modulo 2^64 of the digests of layer l's slabs. Sampling is counter-based, so the
    sampler's state is the tokens themselves: the request as reserved, plus `first_token`.
    """

    __pydantic_config__ = _STRICT
    request_id: Text
    fence: Fence
    num_tokens: Count
    layer_digests: Items[Digest]
    first_token: TokenId
    first_token_index: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Decode to prefill: every layer arrived whole; the source blocks are no longer needed."""

    __pydantic_config__ = _STRICT
    request_id: Text
    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Decode to prefill: this hand-off is over, and why."""

    __pydantic_config__ = _STRICT
    request_id: Text
    fence: Fence
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Prefill to decode: nothing more will come for this fence."""

    __pydantic_config__ = _STRICT
    request_id: Text
    fence: Fence
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Prefill to decode: these hand-offs are still being worked on; renews their reservations."""

    __pydantic_config__ = _STRICT
    fences: Items[tuple[Text, Fence]]  # (request_id, fence)


# --- workers and gateways <-> global scheduler -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What never changes in a worker's life."""

    __pydantic_config__ = _STRICT
    worker_id: Text
    role: Role
    endpoint: Endpoint
    pid: Count
    model: Text
    compatibility: Text
    max_model_len: Count
    num_blocks: Count
    block_size: Count
    layer_groups: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBlocks:
    """Blocks of one tier; on disk a block is a whole column."""

    __pydantic_config__ = _STRICT
    free: Count
    cached: Count
    held: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """What a worker's disk tier did since it was opened, in columns where the name does not say otherwise."""

    __pydantic_config__ = _STRICT
    restored: Count = 0
    lost: Count = 0
    stored: Count = 0
    dropped_queue: Count = 0
    dropped_paused: Count = 0
    dropped_slots: Count = 0
    write_errors: Count = 0
    read_bytes: Count = 0
    written_bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersReport:
    """A worker's memory tiers: what they hold now, and what was done with them since the worker's start."""

    __pydantic_config__ = _STRICT
    blocks: dict[Tier, TierBlocks] = field(default_factory=dict)
    num_in_host: Count = 0  # sequences of which a part, or all, rests in host memory now
    host_bytes_per_s: NonNegative = 0.0  # measured, of copies between device and host; 0 without host memory
    num_host_landings: Count = 0  # sequences that had a part in host memory when they got their blocks
    num_offloads: Count = 0
    num_restores: Count = 0
    num_preemptions: Count = 0
    hit_tokens: dict[PrefixSource, Count] = field(default_factory=dict)  # of prompts computed here
    missed_tokens: Count = 0  # of the same prompts
    loaded_columns: dict[SourceName, Count] = field(default_factory=dict)  # into host memory
    failed_columns: dict[SourceName, Count] = field(default_factory=dict)  # that a load did not bring
    host_stored_columns: Count = 0
    host_dropped_columns: Count = 0  # not copied to host memory: no room, or too many copies queued
    disk: DiskReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What changes. `sequence_number` grows with each snapshot of a worker."""

    __pydantic_config__ = _STRICT
    worker_id: Text
    sequence_number: Count
    draining: Flag
    num_running: Count
    num_waiting: Count
    queued_prefill_tokens: Count  # uncomputed tokens of everything accepted
    blocks_available: Count
    num_leases: Count
    prefill_tokens_per_s: NonNegative  # measured; 0 until known
    decode_step_s: NonNegative  # measured; 0 until known
    num_paused: Count = 0  # of the running, those that take turns because they rest in host memory
    host_blocks_available: Count = 0
    tiers: TiersReport = field(default_factory=TiersReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    __pydantic_config__ = _STRICT
    info: WorkerInfo
    snapshot: WorkerSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    __pydantic_config__ = _STRICT
    snapshot: WorkerSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvents:
    """Worker to scheduler: what changed in its tiers, numbered from `first_id` on within the epoch.

    An epoch is one life of the worker's tiers. Without changes it says that none is missing before `first_id`.
    """

    __pydantic_config__ = _STRICT
    worker_id: Text
    epoch: Count
    first_id: Count
    changes: Annotated[list[BlockChange], Field(fail_fast=True, max_length=MAX_EVENT_CHANGES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexRequest:
    """Scheduler to worker: changes are missing here; send all that your tiers hold."""

    __pydantic_config__ = _STRICT
    worker_id: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexSnapshot:
    """Worker to scheduler: part of all that its tiers hold, as before the change `next_id`. Parts come in order."""

    __pydantic_config__ = _STRICT
    worker_id: Text
    epoch: Count
    next_id: Count
    part: Count
    num_parts: Count
    tier: Tier
    hashes: Hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Gateway to scheduler: where should this attempt run?"""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count
    num_tokens: Count
    max_new_tokens: Count
    exclude: Items[Text] = field(default_factory=list)  # worker ids that just failed this request
    prefer_decode: Text | None = None  # holds a reservation of an earlier attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`prefill` None: the decode worker does all of it."""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count
    prefill: Text | None
    decode: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaceable:
    """No worker can take it now. `retry_after_s` None: none ever could (the sentence says why)."""

    __pydantic_config__ = _STRICT
    request_id: Text
    attempt: Count
    reason: Text
    retry_after_s: NonNegative | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Gateway to scheduler: the request left the cluster; forget its reservations of work."""

    __pydantic_config__ = _STRICT
    request_id: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """What the scheduler's block index knows of one worker, and what befell it since the worker registered."""

    __pydantic_config__ = _STRICT
    worker_id: Text
    in_step: Flag  # False: changes are missing, and a snapshot is awaited
    columns: dict[Tier, Count]
    num_gaps: Count
    num_snapshots_asked: Count
    num_snapshots_taken: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Scheduler to gateways: all live workers with their newest snapshots. Sent on change and periodically."""

    __pydantic_config__ = _STRICT
    workers: Items[tuple[WorkerInfo, WorkerSnapshot]]
    indexes: Items[IndexReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Either way on any connection: I am alive. Nothing is answered."""

    __pydantic_config__ = _STRICT


# --- inside connections and transports ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """Either way on any connection, its last message: why this end closes it."""

    __pydantic_config__ = _STRICT
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOffer:
    """Shared memory: this segment of process `pid`, open there as descriptor `fd`, will hold the slabs that follow."""

    __pydantic_config__ = _STRICT
    pid: Count
    fd: Count
    name: Text
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAnswer:
    """Shared memory: the offered segment is mapped; or `refusal` says why it could not be."""

    __pydantic_config__ = _STRICT
    refusal: Text | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabsFreed:
    """Shared memory: the receiver is done with these slabs of the sender's segment."""

    __pydantic_config__ = _STRICT
    slabs: Items[Count]


Message = (
    Reserve
    | Reserved
    | Refused
    | Start
    | Cancel
    | StepFrame
    | SlabHeader
    | Commit
    | Verified
    | Rejected
    | Abort
    | KeepAlive
    | Register
    | Heartbeat
    | BlockEvents
    | BlockIndexRequest
    | BlockIndexSnapshot
    | Place
    | Placement
    | Unplaceable
    | Ended
    | Replicas
    | Ping
    | Goodbye
    | SegmentOffer
    | SegmentAnswer
    | SlabsFreed
)

_ADAPTERS: Final[dict[str, TypeAdapter[Any]]] = {kind.__name__: TypeAdapter(kind) for kind in Message.__args__}


def encode(message: Message) -> bytes:
    """The message as msgpack bytes."""
    tag = type(message).__name__
    packed: bytes = msgpack.packb([tag, _ADAPTERS[tag].dump_python(message)])
    return packed


def decode(data: bytes | memoryview) -> Message:
    """The message in `data`. Raises MalformedMessageError for anything that is not exactly one message."""
    try:
        # Integer keys are allowed for `logit_bias`, whose size is the largest that a map may have.
        frame = msgpack.unpackb(data, strict_map_key=False, max_map_len=MAX_LOGIT_BIAS)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"not msgpack: {str(error) or 'nested too deeply'}") from error
    if not (isinstance(frame, list) and len(frame) == 2 and isinstance(frame[0], str)):
        raise MalformedMessageError("a message is an array of a tag and a map")
    tag, fields = frame
    adapter = _ADAPTERS.get(tag)
    if adapter is None:
        raise MalformedMessageError(f"unknown message {tag[:40]!r}: the peer speaks another protocol version")
    if not isinstance(fields, dict):
        raise MalformedMessageError(f"the fields of {tag} must be a map")
    try:
        message: Message = adapter.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedMessageError(f"{tag}.{where[:100]}: {first['msg'][:200]}") from error
    return message
