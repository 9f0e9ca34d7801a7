"""What two processes must agree on before KV may move between them.

Not part of it: block size and layers per group, which each end is free to choose, since a slab holds one layer's tokens
whatever blocks they come from or go to. Each end describes itself so in its hello (`handshake`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kv_transfer.digest import DIGEST_KINDS
from kv_transfer.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from engine.kv.cache import KVLayout


def fingerprint(facts: Mapping[str, Any]) -> str:
    """SHA-256 of facts (JSON values) that make KV exchangeable, such as a model's configuration, in any order."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def describe(
    model_fingerprint: str,
    layout: KVLayout,
    protocol_version: int = PROTOCOL_VERSION,
    digest_kinds: Sequence[str] = DIGEST_KINDS,
) -> dict[str, str]:
    """All that both ends must agree on, as names and values for people to read."""
    return {
        "protocol version": str(protocol_version),
        "digests": ", ".join(sorted(digest_kinds)),  # that each end can compute
        "model fingerprint": model_fingerprint,
        "layers": str(layout.num_layers),
        "KV heads": str(layout.num_kv_heads),
        "head size": str(layout.head_dim),
        "KV dtype": str(layout.dtype).removeprefix("torch."),
    }


def mismatch(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Compare what two ends say of themselves. Returns None if KV may move between them; else a sentence that names
    every field that differs, and both values."""
    differing = [
        f"{name} is {ours.get(name, 'not stated')} here and {theirs.get(name, 'not stated')} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if not differing:
        return None
    return f"KV cannot be exchanged: {'; '.join(differing)}. Start both ends with the same model, dtype and version."
