"""What prefill and decode workers say to each other while KV moves."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.digest import DigestKind
from kv_transfer.messages.fields import STRICT, Count, Digest, Items, Text, TokenId
from kv_transfer.messages.requests import Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabHeader:
    """Announces the KV of `num_tokens` tokens of one layer, `[2, num_tokens, num_kv_heads, head_dim]`, K before V.

    `digest`, of the kind `digest_kind`, is of the payload's bytes as they lie in the slab.
    """

    __pydantic_config__ = STRICT
    request_id: Text
    fence: Fence
    layer: Count
    token_start: Count
    num_tokens: Count
    digest: Digest
    digest_kind: DigestKind = "xxh3_64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All KV has been announced; decode may go on from here once it has verified it.

    `layer_digests[l]` is the sum modulo 2^64 of the digests of layer l's slabs. Sampling is counter-based, so the
    sampler's state is the tokens themselves: the request as reserved, plus `first_token`.
    """

    __pydantic_config__ = STRICT
    request_id: Text
    fence: Fence
    num_tokens: Count
    layer_digests: Items[Digest]
    first_token: TokenId
    first_token_index: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Decode to prefill: every layer arrived whole; the source blocks are no longer needed."""

    __pydantic_config__ = STRICT
    request_id: Text
    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Decode to prefill: this hand-off is over, and why."""

    __pydantic_config__ = STRICT
    request_id: Text
    fence: Fence
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Prefill to decode: nothing more will come for this fence."""

    __pydantic_config__ = STRICT
    request_id: Text
    fence: Fence
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Prefill to decode: these hand-offs are still being worked on; renews their reservations."""

    __pydantic_config__ = STRICT
    fences: Items[tuple[Text, Fence]]  # (request_id, fence)
