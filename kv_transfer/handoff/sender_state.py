"""The prefill end of all hand-offs of one worker: sends layers as they are computed, commits, awaits the answer.

Pure: events and the time go in, actions come out (`actions.py`). `KvSender` (`sender.py`) drives it in a worker.

```
   begin            every slab sent, all computed                    Verified
  ──────▶ SENDING ────────────────────────────────────▶ COMMITTED ───────────▶ OVER: `ReleaseSource`
             │                                              │                            ▲
             │ Rejected, link lost, slab failed,            │ Rejected, link lost,       │ no slab in flight
             │ time is up, cancel                           │ time is up, cancel         │ any more
             └────────────────────────────────────────▶ DRAINING ────────────────────────┘
```

What each event does in each state ("=": the state stays; "–": nothing):

| event       | SENDING                                      | COMMITTED                 | DRAINING                |
|-------------|----------------------------------------------|---------------------------|-------------------------|
| layer ready | =, `SendSlab`                                | cannot be: all was sent   | –                       |
| slab sent   | =; after the last: `Commit`, COMMITTED [1]   | cannot be: none in flight | =; after the last: OVER |
| slab failed | `Abort`, `Fail`, DRAINING                    | cannot be: none in flight | =; after the last: OVER |
| computed    | =; if all was sent: `Commit`, COMMITTED      | cannot be: it is known    | –                       |
| Verified    | –, it is not believed                        | `ReleaseSource`, OVER     | –                       |
| Rejected    | `Fail`, DRAINING                             | `Fail`, OVER              | –                       |
| link lost   | `Fail`, DRAINING                             | `Fail`, OVER              | –                       |
| time is up  | `Abort`, `Fail`, DRAINING [2]                | `Abort`, `Fail`, OVER     | –                       |
| cancel      | `Abort`, DRAINING                            | `Abort`, OVER             | –                       |

Where decode has no room yet, a hand-off begins without a ticket:

```
   keep                   begin: what stands is sent, `KeepAlive`
  ──────▶ WAITING ─────────────────────────────────────────────────▶ SENDING
             │ cancel; time is up, once all is computed (`Fail`)
             └─────────────────────────────────────────────────────▶ OVER
```

In WAITING a layer that is ready, and that all is computed, are noted. Nobody reads the source blocks, and no decode
worker is known, so that nothing else can be.

OVER is no state, but the end: `ReleaseSource`, and nothing is known of the attempt any more. DRAINING with nothing in
flight is OVER at once. [1] Once all is computed. [2] While slabs are in flight the time starts again with each that
gets through, and goes on while slabs of others do that were ordered before them, for `kept_s` at most; while this
worker itself has yet to compute, nothing is awaited from decode and no time runs. A keep-alive goes to each decode
worker `KEEP_ALIVES_PER_TTL` times per ttl, for all live hand-offs with it.

The rules:

* the source blocks are released exactly once, and never while a slab in flight reads them;
* a commit goes out only after every slab of every layer was sent, and says what their digests add up to;
* every attempt ends in exactly one way: verified, failed (reported once), or cancelled;
* nothing is ever sent twice: a hand-off that lost something fails, and the gateway begins a newer attempt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.sequence import SequenceKey
from kv_transfer.digest import DigestKind, agreed_kind
from kv_transfer.handoff.actions import Action, Fail, ReleaseSource, Send, SenderState, SendSlab
from kv_transfer.handoff.coverage import Coverage
from kv_transfer.messages import Message
from kv_transfer.messages.handoff import Abort, Commit, KeepAlive, Rejected, Verified
from kv_transfer.messages.requests import Fence, Ticket

KEPT_S = 60.0  # a computed prompt without a ticket; its gateway has heard from decode, or has died, long before
KEEP_ALIVES_PER_TTL = 6  # several may be lost or late before a reservation lapses
_UNDER_WAY = 8  # slabs at most that are filled and sent at once, and so may get through before one ordered earlier


@dataclass(eq=False, slots=True, kw_only=True)
class _Outgoing:
    ticket: Ticket
    coverage: Coverage
    state: SenderState = SenderState.SENDING
    deadline: float | None = None  # for what is awaited from decode; None while this worker itself has yet to compute
    awaited_since: float = 0.0  # when that began, or was put off last by what decode took of this one
    is_computed: bool = False
    first_token: tuple[int, int] | None = None  # (token id, index); None also where decode is to sample it
    num_cached_tokens: int = 0
    waited_s: float = 0.0
    # (layer, token_start) -> number of tokens, and its place among all slabs for the worker; the oldest first
    in_flight: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.ticket.request_id, self.ticket.fence.generation)

    @property
    def is_live(self) -> bool:
        return self.state is not SenderState.DRAINING

    @property
    def reference(self) -> tuple[str, Fence]:
        return self.ticket.request_id, self.ticket.fence

    def await_decode(self, now: float) -> None:
        """From now on decode has one ttl."""
        self.awaited_since, self.deadline = now, now + self.ticket.ttl_s


@dataclass(eq=False, slots=True)
class _Queue:
    """The slabs of all live hand-offs for one decode worker, which begin in the order in which they were ordered."""

    num_ordered: int = 0
    last_through: int = -1  # the place of that which got through last, and when
    through_at: float = 0.0


@dataclass(eq=False, slots=True)
class _Kept:
    """A hand-off that has no ticket yet: the slabs that are ready, in the order in which they came, and what else must
    be told once it begins."""

    slabs: list[tuple[int, int, int]] = field(default_factory=list)  # (layer, token_start, num_tokens)
    is_computed: bool = False
    first_token: tuple[int, int] | None = None
    num_cached_tokens: int = 0
    waited_s: float = 0.0
    deadline: float | None = None  # None: it is still computed here


class HandoffSender:
    """All hand-offs of one prefill worker.

    What happens goes in, with the time in seconds where it matters, on any clock that does not go back. Out comes what
    the driver has to do, in order.

    A prompt without a ticket is kept for `kept_s` after it was computed: no less than reservations wait for room. One
    with a ticket waits for as long while others are sent to its decode worker that were ready before it.
    """

    def __init__(self, digest_kind: DigestKind = "xxh3_64", *, kept_s: float = KEPT_S) -> None:
        self._digest_kind = digest_kind
        self._kept_s = kept_s
        self._kept: dict[SequenceKey, _Kept] = {}
        self._outgoing: dict[SequenceKey, _Outgoing] = {}
        self._keep_alive_at: dict[str, float] = {}  # per decode worker
        self._queues: dict[str, _Queue] = {}  # likewise

    def state(self, key: SequenceKey) -> SenderState | None:
        """The state of this attempt's hand-off; None if it was never begun or is over."""
        if key in self._kept:
            return SenderState.WAITING
        out = self._outgoing.get(key)
        return None if out is None else out.state

    def keep(self, key: SequenceKey) -> None:
        """Decode has no room for it yet: `begin` follows once it has, or `cancel`."""
        assert self.state(key) is None, f"attempt {key} was begun before"
        self._kept[key] = _Kept()

    def begin(self, ticket: Ticket, *, num_layers: int, num_tokens: int, now: float) -> list[Action]:
        """Hand the KV of `num_tokens` tokens over to the ticket's reservation.

        The first keep-alive leaves at once: it opens the way, and a reservation that is void answers before anything
        was computed for it. What was computed before there was a ticket follows.
        """
        out = _Outgoing(ticket=ticket, coverage=Coverage(num_layers, num_tokens))
        assert out.key not in self._outgoing, f"attempt {out.key} was begun before"
        self._outgoing[out.key] = out
        kept = self._kept.pop(out.key, _Kept())
        if num_tokens != ticket.num_tokens:
            return self._fail(out, f"{num_tokens} tokens are to be sent, but {ticket.num_tokens} were reserved")
        self._keep_alive_at.setdefault(ticket.worker_id, now + ticket.ttl_s / KEEP_ALIVES_PER_TTL)
        actions: list[Action] = [Send(ticket.worker_id, KeepAlive(fences=[out.reference]))]
        for slab in kept.slabs:
            actions += self.on_layer_ready(out.key, *slab, now)
        if kept.is_computed:
            cached, waited_s = kept.num_cached_tokens, kept.waited_s
            actions += self.on_computed(out.key, kept.first_token, now, num_cached_tokens=cached, waited_s=waited_s)
        return actions

    def on_layer_ready(
        self, key: SequenceKey, layer: int, token_start: int, num_tokens: int, now: float
    ) -> list[Action]:
        """Send the KV of these tokens and this layer, which stands in the source blocks: computed, or found in the
        prefix cache."""
        if key in self._kept:
            self._kept[key].slabs.append((layer, token_start, num_tokens))
            return []
        out = self._live(key)
        if out is None:
            return []
        is_new = out.coverage.claim(layer, token_start, num_tokens)
        assert is_new, f"tokens from {token_start} on of layer {layer} of {key.request_id} were sent before"
        queue = self._queues.setdefault(out.ticket.worker_id, _Queue())
        out.in_flight[layer, token_start] = num_tokens, queue.num_ordered
        queue.num_ordered += 1
        if out.deadline is None:
            out.await_decode(now)
        ticket = out.ticket
        kind = agreed_kind(self._digest_kind, ticket.digest_kind)
        return [SendSlab(ticket.worker_id, key.request_id, ticket.fence, layer, token_start, num_tokens, kind)]

    def on_slab_sent(self, key: SequenceKey, layer: int, token_start: int, digest: int, now: float) -> list[Action]:
        """A `SendSlab` was carried out, and reads the source blocks no more."""
        out = self._outgoing[key]
        num_tokens, place = out.in_flight.pop((layer, token_start))
        if not out.is_live:
            return self._release_if_drained(out)
        queue = self._queues[out.ticket.worker_id]
        queue.last_through, queue.through_at = place, now
        out.coverage.complete(layer, num_tokens, digest)
        if out.in_flight:
            out.await_decode(now)
        else:
            out.deadline = None
        return self._commit_if_whole(out, now)

    def on_slab_failed(self, key: SequenceKey, layer: int, token_start: int, reason: str) -> list[Action]:
        """A `SendSlab` was not carried out, and reads the source blocks no more."""
        out = self._outgoing[key]
        del out.in_flight[layer, token_start]
        if not out.is_live:
            return self._release_if_drained(out)
        return self._fail(out, f"a slab of layer {layer} could not be sent to {out.ticket.worker_id}: {reason}")

    def on_computed(
        self,
        key: SequenceKey,
        first_token: tuple[int, int] | None,
        now: float,
        *,
        num_cached_tokens: int = 0,
        waited_s: float = 0.0,
    ) -> list[Action]:
        """All tokens are computed. `first_token`: the next one (its id and index), which goes with the commit; None:
        decode computes more of them and samples it. The rest is for who samples it to report."""
        kept = self._kept.get(key)
        if kept is not None:
            kept.is_computed, kept.first_token = True, first_token
            kept.num_cached_tokens, kept.waited_s = num_cached_tokens, waited_s
            kept.deadline = now + self._kept_s
            return []
        out = self._live(key)
        if out is None:
            return []
        out.is_computed, out.first_token = True, first_token
        out.num_cached_tokens, out.waited_s = num_cached_tokens, waited_s
        return self._commit_if_whole(out, now)

    def on_message(self, peer_id: str, message: Message) -> list[Action]:
        """Decode's answer. Anything that is not an answer to a live hand-off with this peer is ignored."""
        if not isinstance(message, Verified | Rejected):
            return []
        out = self._live(SequenceKey(message.request_id, message.fence.generation))
        if out is None or out.ticket.fence != message.fence or out.ticket.worker_id != peer_id:
            return []
        if isinstance(message, Rejected):
            return self._fail(out, f"{peer_id} rejected the hand-off: {message.reason}", tell_peer=False)
        return self._end(out) if out.state is SenderState.COMMITTED else []

    def on_link_lost(self, peer_id: str) -> list[Action]:
        """The link to a decode worker is gone, or could not be made."""
        lost = [out for out in self._outgoing.values() if out.is_live and out.ticket.worker_id == peer_id]
        reason = f"the link to {peer_id} was lost"
        return [action for out in lost for action in self._fail(out, reason, tell_peer=False)]

    def cancel(self, key: SequenceKey, reason: str) -> list[Action]:
        """End every attempt up to this one. Nothing is reported to the gateway, whose wish it was."""
        kept = [k for k in self._kept if k.request_id == key.request_id and k.attempt <= key.attempt]
        mine = [
            out
            for out in self._outgoing.values()
            if out.is_live and out.key.request_id == key.request_id and out.key.attempt <= key.attempt
        ]
        ended = [action for out in mine for action in (_abort(out, reason), *self._end(out))]
        return [*(self._forget(k) for k in kept), *ended]

    def tick(self, now: float) -> list[Action]:
        """Fail what decode let wait for too long; send the keep-alives that are due."""
        actions: list[Action] = []
        for key in [k for k, kept in self._kept.items() if kept.deadline is not None and kept.deadline <= now]:
            actions += [Fail(key, f"no decode worker had room for it within {self._kept_s:g} s"), self._forget(key)]
        for out in list(self._outgoing.values()):
            if out.is_live and out.deadline is not None and out.deadline <= now:
                waits_until = self._waits_until(out)
                if waits_until > now:
                    out.deadline = waits_until
                else:
                    actions += self._fail(out, _overdue(out, now))
        for peer_id in [peer_id for peer_id, at in self._keep_alive_at.items() if at <= now]:
            actions += self._keep_alive(peer_id, now)
        return actions

    def next_deadline(self) -> float | None:
        deadlines = [out.deadline for out in self._outgoing.values() if out.is_live and out.deadline is not None]
        kept = [kept.deadline for kept in self._kept.values() if kept.deadline is not None]
        return min([*deadlines, *kept, *self._keep_alive_at.values()], default=None)

    def _waits_until(self, out: _Outgoing) -> float:
        """Until when its slabs may wait for others', which were ordered before them: one ttl from when decode took one
        of those, but for no longer than a prompt waits for room. In the past where it takes none of them any more."""
        if not out.in_flight:
            return -math.inf
        _, oldest = next(iter(out.in_flight.values()))
        queue = self._queues[out.ticket.worker_id]
        if not -1 < queue.last_through < oldest + _UNDER_WAY:
            return -math.inf
        return min(queue.through_at + out.ticket.ttl_s, out.awaited_since + self._kept_s)

    def _live(self, key: SequenceKey) -> _Outgoing | None:
        out = self._outgoing.get(key)
        return out if out is not None and out.is_live else None

    def _commit_if_whole(self, out: _Outgoing, now: float) -> list[Action]:
        if not out.is_computed or not out.coverage.is_complete or out.state is not SenderState.SENDING:
            return []
        out.state = SenderState.COMMITTED
        out.await_decode(now)
        token_id, index = out.first_token or (None, None)
        commit = Commit(
            request_id=out.ticket.request_id,
            fence=out.ticket.fence,
            num_tokens=out.coverage.num_tokens,
            layer_digests=out.coverage.layer_digests,
            first_token=token_id,
            first_token_index=index,
            num_cached_tokens=out.num_cached_tokens,
            waited_s=out.waited_s,
        )
        return [Send(out.ticket.worker_id, commit)]

    def _keep_alive(self, peer_id: str, now: float) -> list[Action]:
        live = [out for out in self._outgoing.values() if out.is_live and out.ticket.worker_id == peer_id]
        if not live:
            del self._keep_alive_at[peer_id]
            self._queues.pop(peer_id, None)
            return []
        self._keep_alive_at[peer_id] = now + min(out.ticket.ttl_s for out in live) / KEEP_ALIVES_PER_TTL
        return [Send(peer_id, KeepAlive(fences=[out.reference for out in live]))]

    def _fail(self, out: _Outgoing, reason: str, *, tell_peer: bool = True) -> list[Action]:
        aborted = [_abort(out, reason)] if tell_peer else []
        return [*aborted, Fail(out.key, reason), *self._end(out)]

    def _forget(self, key: SequenceKey) -> ReleaseSource:
        del self._kept[key]
        return ReleaseSource(key)

    def _end(self, out: _Outgoing) -> list[Action]:
        out.state = SenderState.DRAINING
        return self._release_if_drained(out)

    def _release_if_drained(self, out: _Outgoing) -> list[Action]:
        if out.in_flight:
            return []
        del self._outgoing[out.key]
        return [ReleaseSource(out.key)]


def _abort(out: _Outgoing, reason: str) -> Send:
    return Send(out.ticket.worker_id, Abort(request_id=out.ticket.request_id, fence=out.ticket.fence, reason=reason))


def _overdue(out: _Outgoing, now: float) -> str:
    worker_id, waited_s = out.ticket.worker_id, now - out.awaited_since
    if out.state is SenderState.COMMITTED:
        return f"{worker_id} did not answer the commit within {waited_s:.3g} s"
    return f"{worker_id} took no slab of it for {waited_s:.3g} s"
