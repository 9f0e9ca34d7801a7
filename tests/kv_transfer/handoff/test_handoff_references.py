"""The five references that vllm#52234 found to be honoured when they should not have been.

There, an impossible or consumed reference to KV ended in HTTP 200 with garbage, and a stale one with the answer to
another prompt. Here each of the five must leave every admitted sequence on its own KV, admit nothing else, and say why.
The world's nodes compare the bytes in the leased blocks with what the admitted attempt's prefill computed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.digest import combine, slab_digest
from kv_transfer.messages.handoff import Commit, KeepAlive, Rejected, SlabHeader
from kv_transfer.messages.requests import Reserved, Ticket
from tests.kv_transfer.handoff.handoff_world.decode import DecodeNode
from tests.kv_transfer.handoff.handoff_world.model import DECODE, NUM_LAYERS, TTL_S, Packet, kv_of, request_spec
from tests.kv_transfer.handoff.handoff_world.world import World

FORGER = "prefill-x"
NUM_TOKENS = 4


@pytest.fixture
def world() -> World:
    return World()


def reserve(world: World, request_id: str, num_tokens: int = NUM_TOKENS) -> Ticket:
    world.gateway.submit(num_tokens)
    world.packets.clear()
    answer = world.decode.reserve(request_spec(request_id, 1, num_tokens))
    assert isinstance(answer, Reserved)
    return answer.ticket


def slab(ticket: Ticket, layer: int, content_of: str, *, start: int = 0, count: int = NUM_TOKENS) -> Packet:
    """A slab for this ticket that holds the KV of `content_of`."""
    content = request_spec(content_of, 1, NUM_TOKENS)
    payload = bytearray(b"".join(kv_of(content, layer, start + i) for i in range(count)))
    header = SlabHeader(
        request_id=ticket.request_id,
        fence=ticket.fence,
        layer=layer,
        token_start=start,
        num_tokens=count,
        digest=slab_digest(payload),
    )
    return Packet(DECODE, FORGER, header, payload)


def send_all(world: World, ticket: Ticket, content_of: str) -> list[str]:
    """A whole hand-off under this ticket, in good form; returns the sentences with which it was rejected."""
    slabs = [slab(ticket, layer, content_of) for layer in range(NUM_LAYERS)]
    for packet in slabs:
        world.decode.on_packet(packet)
    finish_copies(world.decode)
    headers = [packet.message for packet in slabs]
    commit = Commit(
        request_id=ticket.request_id,
        fence=ticket.fence,
        num_tokens=NUM_TOKENS,
        layer_digests=[combine([header.digest]) for header in headers if isinstance(header, SlabHeader)],
        first_token=3,
        first_token_index=0,
    )
    world.decode.on_packet(Packet(DECODE, FORGER, commit))
    return rejections(world)


def finish_copies(decode: DecodeNode) -> None:
    while decode.copies:
        decode.finish_copy(decode.copies[0])


def rejections(world: World) -> list[str]:
    """The reasons given since the last look."""
    reasons = [packet.message.reason for packet in world.packets if isinstance(packet.message, Rejected)]
    world.packets.clear()
    return reasons


def test_unknown_request_id(world: World) -> None:
    ticket = reserve(world, "request-0")
    reasons = send_all(world, replace(ticket, request_id="never-heard-of"), content_of="request-0")
    assert len(reasons) == NUM_LAYERS + 1
    assert all("knows no reservation for request never-heard-of" in reason for reason in reasons)
    assert world.decode.num_admitted == 0
    assert world.decode.receiver.holds("request-0"), "the honest reservation is unharmed"
    assert send_all(world, ticket, content_of="request-0") == []
    assert world.decode.num_admitted == 1


@pytest.mark.parametrize(
    ("layer", "start", "count", "says"),
    [
        (NUM_LAYERS, 0, NUM_TOKENS, "layer 2 does not exist: the model has layers 0 to 1"),
        (2**62, 0, NUM_TOKENS, "does not exist"),
        (0, NUM_TOKENS, 1, "tokens [4, 5) of layer 0 do not lie in the reserved [0, 4)"),
        (0, 2, 3, "tokens [2, 5)"),
        (0, 2**62, 1, "do not lie in the reserved"),
        (0, 0, 0, "tokens [0, 0)"),
    ],
)
def test_out_of_range_layer_or_tokens(world: World, layer: int, start: int, count: int, says: str) -> None:
    ticket = reserve(world, "request-0")
    before = dict(world.decode.memory)
    wrong = slab(ticket, 0, "request-0")
    assert isinstance(wrong.message, SlabHeader)
    wrong.message = replace(wrong.message, layer=layer, token_start=start, num_tokens=count)
    world.decode.on_packet(wrong)
    (reason,) = rejections(world)
    assert says in reason
    assert not world.decode.copies and world.decode.memory == before, "not a byte was written"
    assert [fail.reason for fail in world.decode.failures] == [reason], "the gateway learns the reason too"
    assert len(send_all(world, ticket, content_of="request-0")) == NUM_LAYERS + 1, "the attempt is over for good"
    assert world.decode.num_admitted == 0
    world.decode.check_idle()


def test_overlapping_ranges(world: World) -> None:
    ticket = reserve(world, "request-0")
    world.decode.on_packet(slab(ticket, 0, "request-0", start=0, count=3))
    world.decode.on_packet(slab(ticket, 0, "request-0", start=2, count=2))
    (reason,) = rejections(world)
    assert "tokens [2, 4) of layer 0 overlap [0, 3)" in reason
    finish_copies(world.decode)
    world.decode.check_idle()


def test_consumed_reference_reused_immediately(world: World) -> None:
    ticket = reserve(world, "request-0")
    assert send_all(world, ticket, content_of="request-0") == []
    assert world.decode.num_admitted == 1
    reasons = send_all(world, ticket, content_of="request-1")
    assert len(reasons) == NUM_LAYERS + 1
    assert all("its sequence was admitted and is being decoded" in reason for reason in reasons)
    assert world.decode.num_admitted == 1
    world.decode.finish_decoding("request-0")  # asserts that the KV is still its own
    assert len(send_all(world, ticket, content_of="request-1")) == NUM_LAYERS + 1, "nor after it has finished"
    world.decode.check_idle()


def test_stale_reference_after_the_blocks_were_reused_for_another_prompt(world: World) -> None:
    stale = reserve(world, "request-0")
    blocks = list(world.decode.leases[stale.fence.lease].blocks)
    world.decode.cancel("request-0", 1)
    fresh = reserve(world, "request-1", num_tokens=2 * world.decode.pool.num_available)
    assert set(blocks) <= set(world.decode.leases[fresh.fence.lease].blocks), "the same blocks, for another prompt"
    before = dict(world.decode.memory)
    reasons = send_all(world, stale, content_of="request-0")
    assert len(reasons) == NUM_LAYERS + 1
    assert all("the reservation is over: the gateway cancelled it" in reason for reason in reasons)
    assert world.decode.memory == before and world.decode.num_admitted == 0

    for forged in (replace(stale, request_id="request-1"), replace(fresh, fence=stale.fence)):
        reasons = send_all(world, forged, content_of="request-0")
        assert len(reasons) == NUM_LAYERS + 1 and all("is stale" in reason for reason in reasons)
    assert world.decode.memory == before and world.decode.num_admitted == 0


def test_stale_reference_from_before_a_restart(world: World) -> None:
    """The new life leases the same blocks under the same lease id to the same attempt: only the epoch tells."""
    stale = reserve(world, "request-0")
    world.decode = DecodeNode(world, epoch=2)
    fresh = world.decode.reserve(request_spec("request-0", 1, NUM_TOKENS))
    assert isinstance(fresh, Reserved)
    assert fresh.ticket.fence == replace(stale.fence, epoch=2)
    reasons = send_all(world, stale, content_of="request-0")
    assert len(reasons) == NUM_LAYERS + 1 and all("has restarted" in reason for reason in reasons)
    assert world.decode.num_admitted == 0 and not world.decode.memory


def test_lease_expiry(world: World) -> None:
    ticket = reserve(world, "request-0")
    world.decode.on_packet(slab(ticket, 0, "request-0"))
    finish_copies(world.decode)
    world.advance(TTL_S)  # no tick: the first late message itself finds the reservation expired
    reasons = send_all(world, ticket, content_of="request-0")
    assert f"expired: nothing was heard of it for {TTL_S:g} s" in reasons[0]
    assert all("expired" in reason for reason in reasons)
    (failure,) = world.decode.failures
    assert "expired" in failure.reason
    assert world.decode.num_admitted == 0
    world.decode.on_packet(Packet(DECODE, FORGER, KeepAlive(fences=[("request-0", ticket.fence)])))
    assert "expired" in rejections(world)[0], "a keep-alive does not bring it back"
    world.decode.check_idle()


@pytest.mark.parametrize("name", ["epoch", "lease", "generation"])
def test_every_field_of_the_fence_matters(world: World, name: str) -> None:
    ticket = reserve(world, "request-0")
    other = replace(ticket.fence, **{name: getattr(ticket.fence, name) + 1})
    assert len(send_all(world, replace(ticket, fence=other), content_of="request-0")) == NUM_LAYERS + 1
    assert world.decode.num_admitted == 0 and not world.decode.memory
    assert send_all(world, ticket, content_of="request-0") == []
    assert world.decode.num_admitted == 1
