from __future__ import annotations

import hmac
from dataclasses import asdict, replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.connections.handshake import (
    MAX_CHALLENGE_BYTES,
    Handshake,
    HandshakeError,
    HandshakeRole,
    Hello,
    hello_of,
)
from kv_transfer.messages import PROTOCOL_VERSION
from kv_transfer.transports.base import Identity, PeerRefusedError

PREFILL = Identity(worker_id="prefill-1", node_id="a", secret=b"secret", compatibility={"KV dtype": "bfloat16"})
DECODE = Identity(worker_id="decode-1", node_id="b", secret=b"secret", compatibility={"KV dtype": "bfloat16"})


def end(role: HandshakeRole, identity: Identity, purpose: str = "kv-tcp", version: int | None = None) -> Handshake:
    hello = hello_of(identity, purpose, {"link": "7"})
    if version is not None:
        hello = replace(hello, protocol_version=version)
    return Handshake(role, hello, identity.secret)


def meet(dialer: Handshake, listener: Handshake) -> None:
    """Carry messages between the two, a refusal included."""
    message: bytes | None = dialer.opening()
    while message is not None:
        try:
            answer = listener.on_message(message)
        except HandshakeError as error:
            assert error.refusal is not None
            answer = error.refusal
        assert answer is not None
        message = dialer.on_message(answer)


def test_both_ends_learn_who_the_other_is() -> None:
    dialer, listener = end("dialer", PREFILL), end("listener", DECODE)
    meet(dialer, listener)
    assert dialer.peer == hello_of(DECODE, "kv-tcp", {"link": "7"})
    assert listener.peer == hello_of(PREFILL, "kv-tcp", {"link": "7"})


def test_another_secret_is_refused_at_both_ends_and_the_listener_proves_nothing() -> None:
    dialer, listener = end("dialer", replace(PREFILL, secret=b"other")), end("listener", DECODE)
    challenge = listener.on_message(dialer.opening())
    assert challenge is not None
    proof = dialer.on_message(challenge)
    assert proof is not None
    with pytest.raises(HandshakeError, match="secrets of the two processes differ") as refused:
        listener.on_message(proof)
    assert refused.value.refusal is not None
    with pytest.raises(PeerRefusedError, match="secrets of the two processes differ"):
        dialer.on_message(refused.value.refusal)
    assert dialer.peer is None
    assert listener.peer is None


def test_another_model_is_refused_with_both_values() -> None:
    other = replace(PREFILL, compatibility={"KV dtype": "float32"})
    with pytest.raises(PeerRefusedError, match="KV dtype is bfloat16 here and float32 there"):
        meet(end("dialer", other), end("listener", DECODE))


def test_another_protocol_version_is_refused_with_both_versions() -> None:
    told = f"decode-1 speaks protocol version {PROTOCOL_VERSION}, prefill-1 version 99"
    with pytest.raises(PeerRefusedError, match=told):
        meet(end("dialer", PREFILL, version=99), end("listener", DECODE))


def test_control_peers_compare_only_what_both_know() -> None:
    gateway = Identity(worker_id="gateway", node_id="a", secret=b"secret", compatibility={})
    meet(end("dialer", gateway, "control"), end("listener", DECODE, "control"))
    with pytest.raises(PeerRefusedError, match="not stated there"):
        meet(end("dialer", gateway, "kv-tcp"), end("listener", DECODE))


def test_a_listener_serves_only_its_purposes() -> None:
    listener = Handshake("listener", hello_of(DECODE, "listener"), DECODE.secret, purposes=["kv-tcp", "kv-shm"])
    with pytest.raises(PeerRefusedError, match="listens here for kv-shm and kv-tcp, not for 'gateway'"):
        meet(end("dialer", PREFILL, "gateway"), listener)


def test_a_listener_cannot_be_answered_with_its_own_words() -> None:
    """Reflection: without the secret, let a second handshake with the same listener compute the proof."""
    victim, oracle = end("listener", DECODE), end("listener", DECODE)
    thief = end("dialer", replace(PREFILL, secret=b"unknown"))
    challenge = victim.on_message(thief.opening())
    assert challenge is not None
    assert oracle.on_message(challenge) is not None
    with pytest.raises(HandshakeError, match="secrets"):
        # The oracle only ever proves itself to who has proved himself; the best on offer is the thief's own proof.
        oracle.on_message(thief.on_message(challenge) or b"")
    dialer = end("dialer", PREFILL)
    proof_for_thief = dialer.on_message(challenge)  # a true dialer, lured: bound to its own nonce
    with pytest.raises(HandshakeError, match="secrets"):
        victim.on_message(proof_for_thief or b"")


def test_a_dialer_does_not_take_its_own_proof_for_the_listeners() -> None:
    dialer = end("dialer", PREFILL)
    proof = dialer.on_message(dialer.opening())
    assert proof is not None
    with pytest.raises(HandshakeError, match="secrets"):
        dialer.on_message(proof)


def test_a_replayed_proof_is_worthless() -> None:
    dialer, listener = end("dialer", PREFILL), end("listener", DECODE)
    challenge = listener.on_message(dialer.opening())
    assert challenge is not None
    proof = dialer.on_message(challenge)
    assert proof is not None
    listener.on_message(proof)
    later = end("listener", DECODE)
    later.on_message(dialer.opening())
    with pytest.raises(HandshakeError, match="secrets"):
        later.on_message(proof)


def test_an_altered_hello_is_refused() -> None:
    dialer, listener = end("dialer", PREFILL), end("listener", DECODE)
    proof = dialer.on_message(listener.on_message(dialer.opening()) or b"")
    assert proof is not None
    with pytest.raises(HandshakeError, match="secrets"):
        listener.on_message(proof.replace(b"prefill-1", b"prefill-2"))


def proof_of(hello: bytes, listener: Handshake) -> bytes:
    """What a dialer that knows the secret says, in the form that must never change, of itself whatever it likes."""
    nonce = bytes(32)
    challenge = listener.on_message(msgpack.packb(["challenge", "legato handshake 1", nonce]))
    assert challenge is not None
    _, _, their_nonce = msgpack.unpackb(challenge)
    text = b"legato handshake 1 dialer  " + nonce + their_nonce + hello
    packed: bytes = msgpack.packb(["proof", hmac.digest(DECODE.secret, text, "sha256"), hello])
    return packed


@pytest.mark.parametrize("hello", [b"\xc1", msgpack.packb({"worker_id": "x"}), msgpack.packb([1, 2])])
def test_a_member_with_a_malformed_hello_is_refused(hello: bytes) -> None:
    listener = end("listener", DECODE)
    with pytest.raises(HandshakeError, match="hello is malformed"):
        listener.on_message(proof_of(hello, listener))


def test_a_hello_with_fields_of_a_later_release_is_still_read() -> None:
    listener = end("listener", DECODE)
    hello = {**asdict(hello_of(PREFILL, "kv-tcp", {"link": "7"})), "protocol_version": 99, "colour": "blue"}
    with pytest.raises(HandshakeError, match="version 99"):
        listener.on_message(proof_of(msgpack.packb(hello), listener))


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.binary(max_size=200), max_size=4), role=st.sampled_from(["dialer", "listener"]))
def test_no_bytes_make_a_stranger_known(words: list[bytes], role: HandshakeRole) -> None:
    handshake = end(role, DECODE)
    for word in words:
        with pytest.raises(PeerRefusedError):
            handshake.on_message(word)
    assert handshake.peer is None


def test_a_refusal_is_shortened_and_printable() -> None:
    with pytest.raises(PeerRefusedError) as refused:
        end("dialer", PREFILL).on_message(msgpack.packb(["refusal", "a\x1b[31m\n" + "b" * 10_000]))
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 2100


def test_a_stranger_gets_room_for_a_challenge_only() -> None:
    listener = end("listener", DECODE)
    assert listener.max_message_bytes == MAX_CHALLENGE_BYTES
    assert len(end("dialer", PREFILL).opening()) <= MAX_CHALLENGE_BYTES
    listener.on_message(end("dialer", PREFILL).opening())
    assert listener.max_message_bytes > MAX_CHALLENGE_BYTES


def test_what_cannot_work_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="secret is empty"):
        end("dialer", replace(PREFILL, secret=b""))
    with pytest.raises(ValueError, match="at most"):
        end("dialer", replace(PREFILL, compatibility={"x": "y" * 30_000}))
    assert isinstance(hello_of(PREFILL, "kv-tcp"), Hello)
