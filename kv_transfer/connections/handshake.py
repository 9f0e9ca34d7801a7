"""How two processes make sure of each other before they talk, and what they must agree on before KV may move between
them. Sans-IO.

    dialer                                listener
      challenge(nonce) ------------------->
      <----------------------------------- challenge(nonce)
      proof(mac, hello) ------------------>   checks the secret, then the hello
      <----------------------------------- proof(mac, hello)   or refusal(sentence)

`mac` is HMAC-SHA256 with the cluster secret over the prover's role, both nonces and its hello: nobody can answer with
what it was sent (the roles differ), replay an older meeting (the nonces are fresh) or alter a hello. The dialer proves
itself first, so a stranger learns nothing from a listener. The form of these messages must never change: through them
two protocol versions tell each other that they differ. Authenticates the ends, not the bytes that follow: the network
between workers must be a private one.

A hello says what its end must have in common with the other one (`describe`). Not part of that: block size and layers
per group, which each end is free to choose, since a slab holds one layer's tokens whatever blocks they come from or go
to.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from kv_transfer.digest import DIGEST_KINDS
from kv_transfer.messages import PROTOCOL_VERSION
from kv_transfer.transports.base import Identity, PeerRefusedError

if TYPE_CHECKING:
    from engine.kv.cache import KVLayout

HandshakeRole = Literal["dialer", "listener"]

MAX_MESSAGE_BYTES: Final = 32 * 1024
MAX_CHALLENGE_BYTES: Final = 128
_MAX_HELLO_BYTES: Final = 24 * 1024
_MAX_REFUSAL_CHARS: Final = 2000
_MAGIC: Final = "legato handshake 1"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32

_Short = Annotated[str, Field(strict=True, max_length=512)]
_Facts = Annotated[dict[_Short, Annotated[str, Field(strict=True, max_length=4096)]], Field(max_length=128)]


class HandshakeError(PeerRefusedError):
    """The meeting failed at this end. `refusal`, where there is one, tells the peer why."""

    def __init__(self, reason: str, refusal: bytes | None = None) -> None:
        super().__init__(reason)
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What each end says of itself. `attributes` belong to its purpose, such as the link it is part of."""

    protocol_version: Annotated[int, Field(strict=True)]
    worker_id: _Short
    node_id: _Short
    purpose: _Short
    compatibility: _Facts
    attributes: _Facts = field(default_factory=dict)


_HELLO: Final = TypeAdapter(Hello)


def hello_of(identity: Identity, purpose: str, attributes: dict[str, str] | None = None) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        worker_id=identity.worker_id,
        node_id=identity.node_id,
        purpose=purpose,
        compatibility=identity.compatibility,
        attributes=attributes or {},
    )


class Handshake:
    """One end of the exchange: send `opening()` if it is the dialer's, then the answer of each `on_message`."""

    def __init__(
        self,
        role: HandshakeRole,
        hello: Hello,
        secret: bytes,
        *,
        purposes: Collection[str] | None = None,
    ) -> None:
        """`purposes` are those that a listener serves; None: any."""
        if not secret:
            raise ValueError("The cluster secret is empty: give every process of the cluster the same random bytes.")
        self._role: HandshakeRole = role
        self._hello_bytes: bytes = msgpack.packb(asdict(hello))
        if len(self._hello_bytes) > _MAX_HELLO_BYTES:
            raise ValueError(
                f"What this process says of itself takes {len(self._hello_bytes)} bytes, "
                f"of which at most {_MAX_HELLO_BYTES} are allowed."
            )
        self._hello = hello
        self._secret = secret
        self._purposes = purposes
        self._nonce = os.urandom(_NONCE_BYTES)
        self._their_nonce: bytes | None = None
        self.peer: Hello | None = None  # known once the peer has been checked

    @property
    def max_message_bytes(self) -> int:
        """How long the next message may be: a stranger gets room for a challenge only."""
        if self._role == "listener" and self._their_nonce is None:
            return MAX_CHALLENGE_BYTES
        return MAX_MESSAGE_BYTES

    @property
    def heard(self) -> bool:
        """The peer has said something that belongs here."""
        return self._their_nonce is not None

    def opening(self) -> bytes:
        return _pack("challenge", _MAGIC, self._nonce)

    def on_message(self, data: bytes) -> bytes | None:
        """The answer, or None where none is due. Raises HandshakeError, and PeerRefusedError for the peer's refusal."""
        kind, fields = _unpack(data)
        if kind == "refusal":
            raise PeerRefusedError(f"The peer refuses the connection: {_refusal_text(fields)}")
        if kind == "challenge" and self._their_nonce is None:
            self._their_nonce = _challenge_nonce(fields)
            return self._proof() if self._role == "dialer" else self.opening()
        if kind == "proof" and self._their_nonce is not None and self.peer is None:
            self._check(fields)
            return self._proof() if self._role == "listener" else None
        raise HandshakeError("The peer does not keep to the order of the handshake.")

    def _proof(self) -> bytes:
        return _pack("proof", self._mac(self._role, self._hello_bytes), self._hello_bytes)

    def _mac(self, role: HandshakeRole, hello: bytes) -> bytes:
        assert self._their_nonce is not None
        dialer, listener = self._nonce, self._their_nonce
        if self._role == "listener":
            dialer, listener = listener, dialer
        # Only the last part varies in length, so no two inputs run together.
        text = f"{_MAGIC} {role:8}".encode() + dialer + listener + hello
        return hmac.digest(self._secret, text, "sha256")

    def _check(self, fields: list[Any]) -> None:
        mac, hello_bytes = _proof_fields(fields)
        theirs: HandshakeRole = "dialer" if self._role == "listener" else "listener"
        if not hmac.compare_digest(mac, self._mac(theirs, hello_bytes)):
            self._refuse("The cluster secrets of the two processes differ: give both the same one.")
        peer = _parse_hello(hello_bytes)
        reason = disagreement(self._hello, peer, self._purposes)
        if reason is not None:
            self._refuse(reason)
        self.peer = peer

    def _refuse(self, reason: str) -> None:
        raise HandshakeError(reason, _pack("refusal", reason))


def disagreement(ours: Hello, theirs: Hello, purposes: Collection[str] | None) -> str | None:
    """Why these two must not talk, as a sentence; None when they may.

    KV links must agree on everything; control connections only compare what both know of.
    """
    if ours.protocol_version != theirs.protocol_version:
        return (
            f"{ours.worker_id} speaks protocol version {ours.protocol_version}, {theirs.worker_id} version "
            f"{theirs.protocol_version}: run the same release of Legato in the whole cluster."
        )
    if purposes is not None and theirs.purpose not in purposes:
        return f"{ours.worker_id} listens here for {' and '.join(sorted(purposes))}, not for {theirs.purpose!r}."
    if theirs.purpose.startswith("kv-") or (ours.compatibility and theirs.compatibility):
        return mismatch(ours.compatibility, theirs.compatibility)
    return None


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


def _pack(kind: str, *fields: object) -> bytes:
    packed: bytes = msgpack.packb([kind, *fields])
    return packed


def _unpack(data: bytes) -> tuple[str, list[Any]]:
    try:
        body = msgpack.unpackb(data, max_array_len=4, max_map_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise HandshakeError("The peer does not speak Legato's handshake.") from error
    if not (isinstance(body, list) and body and isinstance(body[0], str)):
        raise HandshakeError("The peer does not speak Legato's handshake.")
    return body[0], body[1:]


def _challenge_nonce(fields: list[Any]) -> bytes:
    match fields:
        case [str(magic), bytes(nonce)] if magic == _MAGIC and len(nonce) == _NONCE_BYTES:
            return nonce
    raise HandshakeError("The peer's challenge is not one of this handshake: is it another release of Legato?")


def _proof_fields(fields: list[Any]) -> tuple[bytes, bytes]:
    match fields:
        case [bytes(mac), bytes(hello)] if len(mac) == _MAC_BYTES and len(hello) <= _MAX_HELLO_BYTES:
            return mac, hello
    raise HandshakeError("The peer's proof is not one of this handshake.")


def _refusal_text(fields: list[Any]) -> str:
    """The peer may be anybody: its words are cut and freed of control characters."""
    text = fields[0] if fields and isinstance(fields[0], str) else ""
    shown = "".join(char if char.isprintable() else " " for char in text[:_MAX_REFUSAL_CHARS])
    return shown or "no reason given."


def _parse_hello(data: bytes) -> Hello:
    try:
        return _HELLO.validate_python(msgpack.unpackb(data))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        detail = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise HandshakeError(f"The peer's hello is malformed: {detail}.") from error
