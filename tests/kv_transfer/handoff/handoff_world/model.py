"""Sizes, requests and contents of the world, and what travels in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from engine.sampling.params import SamplingParams
from kv_transfer.messages import Message
from kv_transfer.messages.requests import RequestSpec

NUM_LAYERS: Final = 2
BLOCK_SIZE: Final = 2
NUM_BLOCKS: Final = 7
TOKEN_BYTES: Final = 4
TTL_S: Final = 12.0
DECODE: Final = "decode"
GATEWAY: Final = "gateway"
SAMPLING: Final = SamplingParams(max_tokens=8, seed=1)


def kv_of(request: RequestSpec, layer: int, token: int) -> bytes:
    """What a prefill computes. Attempts may differ in the last bits of their KV, so here they differ altogether."""
    name = f"{request.request_id}/{request.attempt}/{layer}/{token}"
    return hashlib.blake2b(name.encode(), digest_size=TOKEN_BYTES).digest()


def layer_kv(request: RequestSpec, layer: int) -> bytes:
    return b"".join(kv_of(request, layer, token) for token in range(request.num_handed_tokens))


def request_spec(request_id: str, attempt: int, num_prompt: int) -> RequestSpec:
    """Every other attempt goes on after one more token, which the one before it had emitted; every fourth is split."""
    return RequestSpec(
        request_id=request_id,
        attempt=attempt,
        prompt_token_ids=list(range(num_prompt)),
        output_token_ids=[7] * ((attempt - 1) // 2),
        split_at=num_prompt // 2 if attempt % 4 == 0 else 0,
        params=SAMPLING,
    )


def num_blocks_for(request: RequestSpec) -> int:
    return -(-request.num_tokens // BLOCK_SIZE)


@dataclass(eq=False, slots=True)
class Packet:
    """Something under way. A payload lies in its sender's memory, where it may be scribbled over at any time."""

    to: str
    sender: str
    message: Message | None  # None: the link from `sender` is lost
    payload: bytearray | None = None
