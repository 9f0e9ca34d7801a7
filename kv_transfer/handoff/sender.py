"""The sending end of hand-offs, at work: runs `HandoffSender`'s actions against real links and a real KV cache.

The state machine lives on the worker's main loop. Gathering, digesting and sending happen on the KV thread, begun
in order per peer, so that compute and tokens do not wait for bytes; what a device still has to store or to copy is
waited for in threads for that alone, so that no link does. What a worker's steps have stored `LayerStream` tells.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from engine.kv.cache import SequenceKV
from engine.memory.streams import Event, MarkQueued
from engine.sequence import ScheduledSequence, Sequence, SequenceKey, StepPlan
from engine.steps.loop import OnLayer
from kv_transfer.connections.event_loops import DeadlineTimer, HomeLoop, LoopThread, to_the_end
from kv_transfer.digest import DigestKind
from kv_transfer.handoff.actions import Action, Fail, ReleaseSource, Send, SenderState, SendSlab
from kv_transfer.handoff.sender_state import KEPT_S, HandoffSender
from kv_transfer.handoff.slab_copy import COPIES_AT_ONCE, copying_threads, fill_slab
from kv_transfer.messages import Message
from kv_transfer.messages.handoff import Verified
from kv_transfer.messages.requests import Endpoint, Ticket
from kv_transfer.messages.workers import LinkReport
from kv_transfer.transports.base import Link, SlabBytes, Transport, TransportError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
UNREACHABLE_S: Final = 30.0  # after a link could not be made, until it is worth another try
_MAX_LINKS = 64  # that are told of: in a long life there are many peers


@dataclass(slots=True, kw_only=True)
class HandoffTimeline:
    """When a hand-off that decode verified did what: how much of it was hidden behind compute, and how much was not.

    Stamps are seconds of `time.monotonic` in the worker that computed it, and 0 until what they tell has happened.
    """

    request_id: str
    attempt: int
    num_tokens: int
    begun_s: float  # the ticket was there, or that there was none yet
    computed_s: float = 0.0  # the last step was over, and its first token sampled: from here on nothing is hidden
    sent_s: float = 0.0  # the link had taken the last slab
    verified_s: float = 0.0  # decode's answer was here
    num_bytes: int = 0
    num_slabs: int = 0
    num_hidden_bytes: int = 0  # sent before `computed_s`

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.request_id, self.attempt)

    @property
    def prefill_s(self) -> float:
        return self.computed_s - self.begun_s

    @property
    def exposed_s(self) -> float:
        """Seconds from the last step until decode may schedule the sequence, the way of decode's answer included."""
        return self.verified_s - self.computed_s


@dataclass(slots=True)
class _HandOff:
    """A sequence on its way."""

    seq: Sequence
    timeline: HandoffTimeline
    stored: dict[int, Event] = field(default_factory=dict)  # behind the tokens of each layer that came last
    has_begun: bool = False  # tokens of it stand
    worker_id: str | None = None  # whom it goes to, once that is known


@dataclass(frozen=True, slots=True, eq=False)
class _SlabJob:
    action: SendSlab
    kv_cache: SequenceKV  # where the layer rests
    group_row: npt.NDArray[np.int32]
    stored: Event | None  # on a device, which may not have come to it


class _Peer:
    """One decode worker, on the KV thread: connects when there is something to send, sends, reads answers.

    `COPIES_AT_ONCE` slabs are under way, begun in order; whichever is full first goes out first. Other messages
    overtake them, so that a reservation is kept alive while slabs are scarce. (A commit cannot come too early: the
    state machine orders it when the last slab has been sent.)

    Reports to the sender through callbacks that hop to the main loop. Ends at the first failure, having reported every
    job it had accepted as failed; the sender then makes a new one.

    A slab whose hand-off is over can be recalled until it is being filled: a peer that takes no more slabs, or takes
    them slowly, must not hold the blocks that it would be filled from, nor other hand-offs behind it.
    """

    def __init__(self, sender: KvSender, worker_id: str, endpoint: Endpoint) -> None:
        self.worker_id = worker_id
        self._sender = sender
        self._endpoint = endpoint
        self._queued: OrderedDict[_SlabJob, None] = OrderedDict()  # neither begun nor recalled
        self._slab_comes = asyncio.Event()
        self._unfilled: dict[SequenceKey, dict[_SlabJob, None]] = {}  # those, and those that wait for a slab to fill
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._ended = False
        self.was_connected = False

    def enqueue(self, job: _SlabJob | Message) -> None:
        if not isinstance(job, _SlabJob):
            self._messages.put_nowait(job)
        elif self._ended:
            self._report_failed(job, "the link is down")
        else:
            self._unfilled.setdefault(job.action.key, {})[job] = None
            self._queued[job] = None
            self._slab_comes.set()

    def recall(self, key: SequenceKey, reason: str = "its hand-off is over") -> None:
        """Slabs of this attempt that are not being filled need not be: they are reported as failed."""
        for job in self._unfilled.pop(key, ()):
            self._queued.pop(job, None)
            self._report_failed(job, reason)

    async def run(self) -> None:
        reason = "the sender stops"
        try:
            link = await self._sender.transport.connect(self._endpoint, timeout_s=CONNECT_TIMEOUT_S)
            self.was_connected = True
            tasks = [
                asyncio.create_task(work)
                for work in (
                    self._read(link),
                    self._send_messages(link),
                    *(self._send_slabs(link) for _ in range(COPIES_AT_ONCE)),
                )
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            reason = str(next(iter(done)).exception())
            await link.close(reason)
        except (TransportError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        finally:
            self._ended = True
            for key in list(self._unfilled):
                self.recall(key, reason)
            self._sender.home.run(self._sender.on_peer_lost, self, reason)

    async def _read(self, link: Link) -> None:
        while True:
            delivery = await link.receive()
            delivery.release()
            self._sender.home.run(self._sender.on_peer_message, self, delivery.message)

    async def _send_messages(self, link: Link) -> None:
        while True:
            await link.send(await self._messages.get())

    async def _send_slabs(self, link: Link) -> None:
        while True:
            while not self._queued:
                self._slab_comes.clear()
                await self._slab_comes.wait()
            await self._send_slab(link, self._queued.popitem(last=False)[0])

    async def _send_slab(self, link: Link, job: _SlabJob) -> None:
        action = job.action
        slab = await link.acquire(action.num_tokens * self._sender.kv_cache.layout.bytes_per_token_layer)
        if not self._may_fill(job):
            slab.discard()
            return
        try:
            digest = await self._sender.fill(job, slab.view)
            await link.send(action.header(digest), slab)
        except BaseException as error:  # also when cancelled: whatever ends the job must end the read of its blocks
            self._report_failed(job, str(error))
            raise
        self._sender.home.run(self._sender.on_slab_sent, action, digest)

    def _may_fill(self, job: _SlabJob) -> bool:
        """Whether a slab was not recalled while none was free; from now on it cannot be."""
        key = job.action.key
        unfilled = self._unfilled.get(key, {})
        if job not in unfilled:
            return False
        del unfilled[job]
        if not unfilled:
            del self._unfilled[key]
        return True

    def _report_failed(self, job: _SlabJob, reason: str) -> None:
        self._sender.home.run(self._sender.on_slab_failed, job.action, reason)


class SourceOwner(Protocol):
    """The owner of the sequences that are handed over, which hears what became of them: a `Worker`, on its main
    loop."""

    def on_handed_over(self, timeline: HandoffTimeline) -> None:
        """Decode has verified it, and so long it took; before `on_source_released`."""

    def on_handoff_failed(self, key: SequenceKey, reason: str) -> None:
        """The hand-off came to nothing; `on_source_released` still follows, or went before."""

    def on_source_released(self, key: SequenceKey) -> None:
        """The hand-off no longer reads the sequence's blocks, which may be freed. Once per `KvSender.begin`."""


class KvSender:
    """Hands computed sequences over, each layer from the tier that it rests in. All methods belong to the main loop."""

    def __init__(
        self,
        kv_cache: SequenceKV,
        transport: Transport,
        thread: LoopThread,
        *,
        host_cache: SequenceKV | None = None,
        max_slab_bytes: int,
        digest_kind: DigestKind = "xxh3_64",
        kept_s: float = KEPT_S,
        owner: SourceOwner,
    ) -> None:
        self.kv_cache = kv_cache
        self._host_cache = host_cache
        self.transport = transport
        self._thread = thread
        self.machine = HandoffSender(digest_kind, kept_s=kept_s)
        self._max_slab_tokens = max(1, max_slab_bytes // kv_cache.layout.bytes_per_token_layer)
        self._owner = owner
        self._handoffs: dict[SequenceKey, _HandOff] = {}
        self._peers: dict[str, _Peer] = {}
        # What came of hand-offs, by the decode worker; who was sent to last is last.
        self.links: dict[str, LinkReport] = {}
        self._unreachable: dict[str, float] = {}  # when a link to them could not be made
        self.num_failed = 0
        self._copying = copying_threads("kv-copies-out")
        self.home = HomeLoop()
        self._timer = DeadlineTimer(self._on_deadline)

    @property
    def num_handing_over(self) -> int:
        return len(self._handoffs)

    @property
    def unreachable(self) -> list[str]:
        """Decode workers to whom no link could be made lately."""
        since = time.monotonic() - UNREACHABLE_S
        self._unreachable = {worker_id: at for worker_id, at in self._unreachable.items() if at > since}
        return list(self._unreachable)

    def hands_over(self, key: SequenceKey) -> bool:
        """Whether the sequence's blocks are still read, or will be."""
        return key in self._handoffs

    def has_begun(self, key: SequenceKey) -> bool:
        """Whether any of its tokens stood yet, and were told of."""
        return self._handoffs[key].has_begun

    def awaits_ticket(self, key: SequenceKey) -> bool:
        """Whether decode had no room for it yet (`keep`)."""
        return self.machine.state(key) is SenderState.WAITING

    def keep(self, seq: Sequence) -> None:
        """Decode has no room for it yet: until `begin` nothing of it is sent, and its blocks are held."""
        self._add(seq)
        self.machine.keep(seq.key)

    def begin(self, ticket: Ticket, seq: Sequence) -> None:
        """Once its tokens stand (`layer_ready`) and all are `computed`, hand them over to the reservation."""
        if not self.awaits_ticket(seq.key):
            self._add(seq)
        self._handoffs[seq.key].worker_id = ticket.worker_id
        if ticket.worker_id not in self._peers:
            peer = self._peers[ticket.worker_id] = _Peer(self, ticket.worker_id, ticket.endpoint)
            self._thread.submit(peer.run())
        num_layers, num_tokens = self.kv_cache.layout.num_layers, self._handoffs[seq.key].timeline.num_tokens
        self._do(self.machine.begin(ticket, num_layers=num_layers, num_tokens=num_tokens, now=time.monotonic()))

    def _add(self, seq: Sequence) -> None:
        timeline = HandoffTimeline(**seq.key._asdict(), num_tokens=seq.num_tokens, begun_s=time.monotonic())
        self._handoffs[seq.key] = _HandOff(seq, timeline)

    def layer_ready(
        self, key: SequenceKey, layer: int, token_start: int, num_tokens: int, stored: Event | None = None
    ) -> None:
        """The KV of tokens [token_start, token_start + num_tokens) of `layer` stands where the layer rests.

        On a device it does when that has come to `stored`, which comes after those of earlier calls.
        """
        handoff = self._handoffs.get(key)
        if handoff is None:
            return
        handoff.has_begun = True
        if stored is not None:
            handoff.stored[layer] = stored
        for start in range(token_start, token_start + num_tokens, self._max_slab_tokens):
            count = min(self._max_slab_tokens, token_start + num_tokens - start)
            self._do(self.machine.on_layer_ready(key, layer, start, count, now=time.monotonic()))

    def computed(self, key: SequenceKey, first_token: tuple[int, int] | None) -> None:
        """All its tokens are. `first_token`: the next one, its id and index; None: decode samples it."""
        now = time.monotonic()
        handoff = self._handoffs.get(key)
        if handoff is None:
            return
        handoff.timeline.computed_s = now
        seq = handoff.seq
        self._do(
            self.machine.on_computed(
                key, first_token, now, num_cached_tokens=seq.num_cached, waited_s=max(0.0, seq.waited_s)
            )
        )

    def cancel(self, key: SequenceKey, reason: str) -> None:
        """End the hand-off, and those of earlier attempts; harmless if there is none."""
        self._do(self.machine.cancel(key, reason))
        for mine in [k for k in self._handoffs if k.request_id == key.request_id and k.attempt <= key.attempt]:
            self._recall(mine)

    def stop(self) -> None:
        self._timer.stop()
        self._copying.shutdown(wait=False)  # what was taken is done

    # Called on the KV thread.
    async def fill(self, job: _SlabJob, view: SlabBytes) -> int:
        """Gather the job's tokens into `view` and return their digest. Nothing reads or writes any more when it ends,
        however it does."""
        action = job.action
        fill = functools.partial(
            fill_slab,
            job.kv_cache,
            job.group_row,
            action.layer,
            action.token_start,
            action.num_tokens,
            view,
            action.digest_kind,
            after=job.stored,
        )
        if job.stored is None and job.kv_cache.device.type == "cpu":
            return fill()
        return await to_the_end(asyncio.wrap_future(self._copying.submit(fill)))  # a copy cannot be recalled

    # Reported from the KV thread; called on the main loop.
    def on_slab_sent(self, action: SendSlab, digest: int) -> None:
        num_bytes = action.num_tokens * self.kv_cache.layout.bytes_per_token_layer
        timeline = self._handoffs[action.key].timeline
        timeline.sent_s = now = time.monotonic()
        timeline.num_slabs += 1
        timeline.num_bytes += num_bytes
        timeline.num_hidden_bytes += num_bytes if timeline.computed_s == 0.0 else 0
        self._do(self.machine.on_slab_sent(action.key, action.layer, action.token_start, digest, now=now))

    def on_slab_failed(self, action: SendSlab, reason: str) -> None:
        self._do(self.machine.on_slab_failed(action.key, action.layer, action.token_start, reason))

    def on_peer_message(self, peer: _Peer, message: Message) -> None:
        if self._peers.get(peer.worker_id) is not peer:
            return
        actions = self.machine.on_message(peer.worker_id, message)
        if isinstance(message, Verified) and actions:  # else it is not believed, or a repetition
            timeline = self._handoffs[SequenceKey(message.request_id, message.fence.generation)].timeline
            timeline.verified_s = time.monotonic()
            self._count(peer.worker_id, timeline)
            self._owner.on_handed_over(timeline)
        self._do(actions)

    def _count(self, worker_id: str, timeline: HandoffTimeline) -> None:
        before = self.links.pop(worker_id, None) or LinkReport()
        if len(self.links) == _MAX_LINKS:
            del self.links[next(iter(self.links))]
        self.links[worker_id] = LinkReport(
            num_handoffs=before.num_handoffs + 1,
            num_bytes=before.num_bytes + timeline.num_bytes,
            num_hidden_bytes=before.num_hidden_bytes + timeline.num_hidden_bytes,
            exposed_s=before.exposed_s + max(0.0, timeline.exposed_s),
        )

    def on_peer_lost(self, peer: _Peer, reason: str) -> None:
        logger.info("link to decode worker %s is down: %s", peer.worker_id, reason)
        if not peer.was_connected:
            self._unreachable[peer.worker_id] = time.monotonic()
        if self._peers.get(peer.worker_id) is peer:
            del self._peers[peer.worker_id]
            self._do(self.machine.on_link_lost(peer.worker_id))

    def _on_deadline(self) -> None:
        self._do(self.machine.tick(time.monotonic()))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendSlab():
                    self._enqueue(action.worker_id, self._job(action))
                case Send():
                    self._enqueue(action.peer_id, action.message)
                case ReleaseSource():
                    del self._handoffs[action.key]
                    self._owner.on_source_released(action.key)
                case Fail():
                    self.num_failed += 1
                    self._recall(action.key)
                    self._owner.on_handoff_failed(action.key, action.reason)
        self._timer.arm(self.machine.next_deadline())

    def _recall(self, key: SequenceKey) -> None:
        """The hand-off is over: what of it is not being filled need not be. Its source is released after the rest."""
        worker_id = self._handoffs[key].worker_id
        peer = None if worker_id is None else self._peers.get(worker_id)
        if peer is not None:
            self._thread.call(peer.recall, key)

    def _job(self, action: SendSlab) -> _SlabJob:
        handoff = self._handoffs[action.key]
        seq = handoff.seq
        group = action.layer // self.kv_cache.layout.layers_per_group
        on_host = group in seq.host_groups
        cache: SequenceKV | None
        cache, table = (self._host_cache, seq.host_table) if on_host else (self.kv_cache, seq.block_table)
        assert cache is not None
        assert table is not None
        return _SlabJob(action, cache, table.view[group], handoff.stored.get(action.layer))

    def _enqueue(self, worker_id: str, job: _SlabJob | Message) -> None:
        # There is one since the first of its hand-offs began; where it is lost, they are all over.
        self._thread.call(self._peers[worker_id].enqueue, job)


@dataclass(eq=False, slots=True)
class _Step:
    """One that is under way. `items`: of sequences that are handed over, and from which token on each is reported: from
    the first on where the step brings a prefix hit to the device."""

    items: list[tuple[ScheduledSequence, int]]
    was_reported: bool = False  # anything of it


class LayerStream:
    """Reports to the sender which tokens of which layer have their KV: while a step computes them, at once for a hit.

    Calls `KvSender.layer_ready` for each token and layer of a prompt once, in the order of its tokens. The runner's
    thread calls what `listener` returns, all else happens on the main loop. On a device a step is queued faster than it
    is computed, so each word of tokens that stand comes with an event: they do when the device has come to that.
    """

    def __init__(
        self, sender: KvSender, num_layers: int, *, is_moving: Callable[[Sequence], bool], mark_queued: MarkQueued
    ) -> None:
        self._sender = sender
        self._num_layers = num_layers
        self._is_moving = is_moving
        self._mark_queued = mark_queued
        self._loop = asyncio.get_running_loop()
        self._steps: dict[int, _Step] = {}  # by the id of the plan, which is alive until the step is over

    def begin(self, plan: StepPlan) -> None:
        """The step is about to be made. What those who begin with it found cached goes out before anything computes."""
        items = [(item, item.start) for item in plan.items if self._sender.hands_over(item.seq.key)]
        for number, (item, start) in enumerate(items):
            if start == 0 or start != item.seq.num_cached or self._sender.has_begun(item.seq.key):
                continue
            if self._is_moving(item.seq):
                items[number] = (item, 0)
                continue
            stored = self._mark_queued()  # the steps that computed the hit have been taken in, but may still run
            for layer in range(self._num_layers):
                self._sender.layer_ready(item.seq.key, layer, 0, start, stored)
        if items:
            self._steps[id(plan)] = _Step(items)

    def listener(self, plan: StepPlan) -> OnLayer | None:
        """What to call when a layer of the step stands, or its storing is what the device was given last; None where
        nobody in it is handed over."""
        step = self._steps.get(id(plan))
        return None if step is None else functools.partial(self._on_layer, step)

    def end(self, plan: StepPlan) -> list[SequenceKey]:
        """The step is over. Of whom KV went out while it computed: if it failed, none of that is to be trusted."""
        step = self._steps.pop(id(plan), None)
        return [] if step is None or not step.was_reported else [item.seq.key for item, _ in step.items]

    def _on_layer(self, step: _Step, layer: int) -> None:
        self._loop.call_soon_threadsafe(self._report, step, layer, self._mark_queued())

    def _report(self, step: _Step, layer: int, stored: Event | None) -> None:
        step.was_reported = True
        for item, start in step.items:
            self._sender.layer_ready(item.seq.key, layer, start, item.stop - start, stored)
