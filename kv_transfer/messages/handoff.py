"""What prefill and decode workers say to each other while KV moves."""

from __future__ import annotations

from kv_transfer.digest import DigestKind
from kv_transfer.messages.codec import Message, message
from kv_transfer.messages.fields import Count, Digest, Items, NonNegative, Text, TokenId
from kv_transfer.messages.requests import Fence


@message
class SlabHeader(Message):
    """Announces the KV of `num_tokens` tokens of one layer, `[planes, num_tokens, num_kv_heads, head_dim]`, K before V.

    `digest`, of the kind `digest_kind`, is of the payload's bytes as they lie in the slab.
    """

    request_id: Text
    fence: Fence
    layer: Count
    token_start: Count
    num_tokens: Count
    digest: Digest
    digest_kind: DigestKind = "xxh3_64"


@message
class Commit(Message):
    """All KV has been announced; decode may go on from here once it has verified it.

    `layer_digests[l]` is the sum modulo 2^64 of the digests of layer l's slabs. Sampling is counter-based, so the
    sampler's state is the tokens themselves: the request as reserved, plus `first_token`. Where the request is split
    there is none yet: decode computes the rest and samples it. `num_cached_tokens`, `waited_s`: see `TokenEvent`.
    """

    request_id: Text
    fence: Fence
    num_tokens: Count
    layer_digests: Items[Digest]
    first_token: TokenId | None
    first_token_index: Count | None
    num_cached_tokens: Count = 0
    waited_s: NonNegative = 0.0


@message
class Verified(Message):
    """Decode to prefill: every layer arrived whole; the source blocks are no longer needed."""

    request_id: Text
    fence: Fence


@message
class Rejected(Message):
    """Decode to prefill: this hand-off is over, and why."""

    request_id: Text
    fence: Fence
    reason: Text


@message
class Abort(Message):
    """Prefill to decode: nothing more will come for this fence."""

    request_id: Text
    fence: Fence
    reason: Text


@message
class KeepAlive(Message):
    """Prefill to decode: these hand-offs are still being worked on; renews their reservations."""

    fences: Items[tuple[Text, Fence]]  # (request_id, fence)
