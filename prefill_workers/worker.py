"""A prefill worker: computes prompts in chunks and hands their KV over while it computes.

A `Worker` whose scheduler decides which chunks run, whose layer stream tells the sender what stands of their KV, and
which sends first tokens to gateways.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from engine.memory.streams import Event, MarkQueued, queued_on
from engine.sequence import SampledToken, Sequence, SequenceKey, StepOutput, StepPlan, finish_reason
from engine.steps.loop import StepLoop
from kv_transfer.handoff.sender import HandoffTimeline, KvSender, ignore_timeline
from kv_transfer.messages import Message
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Cancel, RequestSpec, Start, Ticket
from kv_transfer.worker.base import Worker, WorkerConfig, WorkerParts
from kv_transfer.worker.port import GatewayId
from kv_transfer.worker.sequences import sequence_of, token_event
from prefill_workers.scheduler import PrefillScheduler, host_groups

logger = logging.getLogger(__name__)

LayerReady = Callable[[SequenceKey, int, int, int, Event | None], None]
"""(sequence, layer, first token, number of tokens, when they stand; None: they do)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorkerConfig(WorkerConfig):
    """`chunk_tokens` is the token budget of one step; `max_slab_bytes` the most KV announced at a time."""

    chunk_tokens: int = 512
    max_slab_bytes: int = 4 * 2**20


class PrefillWorker(Worker):
    """Accepts `Start` with a ticket; answers with the first token, or `Refused`, or a failure."""

    role: ClassVar[Role] = "prefill"
    scheduler: PrefillScheduler
    _config: PrefillWorkerConfig

    def __init__(
        self,
        parts: WorkerParts,
        config: PrefillWorkerConfig,
        on_handed_over: Callable[[HandoffTimeline], None] = ignore_timeline,
    ) -> None:
        super().__init__(parts, config, step_tokens=config.chunk_tokens)
        self._on_handed_over = on_handed_over
        in_host = functools.partial(
            host_groups,
            allocator=self.allocator,
            staging_columns=self.model.staging_columns,
            chunk_tokens=config.chunk_tokens,
            block_bytes=self.model.layout.block_bytes,
            host_bytes_per_s=self.model.host_bytes_per_s,
            prefill_s=self._prefill_s,
        )
        self.scheduler = PrefillScheduler(
            self.allocator,
            token_budget=config.chunk_tokens,
            max_waiting=config.max_waiting,
            staging_columns=self.model.staging_columns,
            host_groups=in_host,
            cost=lambda: self.steps.costs.cautious_cost(),
        )

    async def _open(self) -> StepLoop:
        self._sender = KvSender(
            self.model.sequence_kv,
            self.parts.transport,
            self._thread,
            host_cache=self.model.host_cache,
            max_slab_bytes=self._config.max_slab_bytes,
            digest_kind=self.parts.digest_kind,
            owner=self,
        )
        self._stream = LayerStream(
            self.model.layout.num_layers,
            self._sender.layer_ready,
            is_moving=self.allocator.is_moving,
            mark_queued=queued_on(self.model.kv_cache.tensor.device),
        )
        return self._step_loop(on_layer=self._stream.on_layer)

    def _close(self) -> None:
        self._sender.stop()

    def _is_idle(self) -> bool:
        return not (self._sender.num_handing_over or self.scheduler.num_held)

    # --- requests in ---

    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        match message:
            case Start(request=request, ticket=Ticket() as ticket):
                self._accept(gateway, request, ticket)
            case Start(request=request):
                self._port.refuse(gateway, request, "a prefill worker needs the ticket of a decode worker", None)
            case Cancel(request_id=request_id, attempt=attempt):
                self._cancel(
                    [k for k in self.gateway_of if k.request_id == request_id and k.attempt <= attempt], "cancelled"
                )
            case _:
                logger.warning("a gateway sent %s, which a prefill worker has no use for", type(message).__name__)

    def _accept(self, gateway: GatewayId, request: RequestSpec, ticket: Ticket) -> None:
        key = SequenceKey(request.request_id, request.attempt)
        if key in self.gateway_of:
            return  # a repetition: the first one is being worked on
        if request.num_tokens > self.info.max_model_len:
            self._port.refuse(gateway, request, f"{request.num_tokens} tokens exceed {self.info.max_model_len}", None)
            return
        if self._refused_as_leaving(gateway, key):
            return
        if not self.scheduler.can_add():
            chunk_tokens = self._config.chunk_tokens  # of many prompts: whose tokens attend to no other's
            queue_s = self.scheduler.num_uncomputed_tokens / chunk_tokens * self._prefill_s(chunk_tokens)
            self._port.refuse(gateway, request, "the prefill queue is full", queue_s)
            return
        seq = sequence_of(request)
        self.gateway_of[key] = gateway
        self.scheduler.add(seq, loading=self.prefix.begin(seq))
        self._sender.begin(ticket, seq)
        self.steps.wake()

    def _on_gateway_lost(self, gateway: GatewayId) -> None:
        self._cancel([key for key, owner in self.gateway_of.items() if owner == gateway], "its gateway is gone")

    def _cancel(self, keys: list[SequenceKey], reason: str) -> None:
        for key in keys:
            self.gateway_of.pop(key, None)  # it may have gone with a later attempt's end
            self._sender.cancel(key, reason)

    # --- steps ---

    def _plan(self) -> StepPlan:
        plan, admitted = self.scheduler.plan()
        self._stream.entered(admitted)
        return plan

    def _on_prefix(self, seq: Sequence) -> None:
        self.scheduler.loaded(seq.key)
        self.steps.wake()

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        for item, logprobs in zip(plan.items, output.prompt_logprobs, strict=True):
            if logprobs and item.seq.wants_prompt_logprobs:
                item.seq.prompt_logprobs += logprobs
        completed = self.prefix.completed_by(plan)
        first_tokens = self.scheduler.finish_step(plan, output)
        self.prefix.stored(completed)
        for seq, sampled in first_tokens:
            self.prefix.count(seq)
            self.prefix.ended(seq)
            if seq.key in self.gateway_of:
                self._first_token(seq, sampled)

    def _first_token(self, seq: Sequence, sampled: SampledToken) -> None:
        index = len(seq.output_token_ids)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs or None, []
        seq.output_token_ids.append(sampled.token_id)
        finish = finish_reason(seq, self.model.eos_token_ids)
        self._port.emit(self.gateway_of[seq.key], token_event(seq, index, sampled, finish, prompt_logprobs))
        if finish is None:
            self._sender.first_token(seq.key, sampled.token_id, index)
        else:
            del self.gateway_of[seq.key]
            self._sender.cancel(seq.key, "the request ended with its first token")

    def _suspect(self, plan: StepPlan) -> None:
        cannot_go_on = self.scheduler.suspect(plan)
        if self._stream.was_reported:  # what went out of such a step is not to be trusted, and nothing goes out twice
            cannot_go_on = [item.seq for item in plan.items]
        for seq in cannot_go_on:
            self._end(seq.key, "a step of it and others failed", "shared")

    def _set_aside(self, accused: Sequence) -> None:
        self.scheduler.give_up(accused.key)

    def _let_go(self, key: SequenceKey, reason: str) -> None:
        self.scheduler.give_up(key)
        self._sender.cancel(key, reason)

    # --- what becomes of hand-offs (`SourceOwner`) ---

    def on_handed_over(self, timeline: HandoffTimeline) -> None:
        gateway = self.gateway_of.get(timeline.key)
        if gateway is not None:
            self._port.handed_over(gateway, timeline.key, timeline.exposed_s)
        self._on_handed_over(timeline)

    def on_handoff_failed(self, key: SequenceKey, reason: str) -> None:
        self._fail(key, reason, retryable=True)

    def on_source_released(self, key: SequenceKey) -> None:
        self.gateway_of.pop(key, None)
        self.prefix.cancel(key)
        self.scheduler.release(key)
        self._on_room()


class LayerStream:
    """Reports to the sender which tokens of which layer have their KV: while a step computes them, at once for a hit.

    Calls `layer_ready` for each token and layer of a prompt once, in the order of its tokens. The runner's thread calls
    `on_layer`, all else happens on the main loop. On a device a step is queued faster than it is computed, so each word
    of tokens that stand comes with an event: they do when the device has come to that.
    """

    def __init__(
        self,
        num_layers: int,
        layer_ready: LayerReady,
        *,
        is_moving: Callable[[Sequence], bool],
        mark_queued: MarkQueued,
    ) -> None:
        self._num_layers = num_layers
        self._layer_ready = layer_ready
        self._is_moving = is_moving
        self._mark_queued = mark_queued
        self._loop = asyncio.get_running_loop()
        self._copied_in: frozenset[SequenceKey] = frozenset()  # by the step in flight: prefix hits
        self.was_reported = False  # anything of the step that was planned last

    def entered(self, seqs: Iterable[Sequence]) -> None:
        """These are new in the step that is about to be made. What they found goes out before anything is computed."""
        self.was_reported = False
        hits = [seq for seq in seqs if seq.num_cached]
        self._copied_in = frozenset(seq.key for seq in hits if self._is_moving(seq))
        # The steps that computed them have been taken in, but may still run.
        stored = self._mark_queued() if hits else None
        for seq in hits:
            for layer in range(self._num_layers) if seq.key not in self._copied_in else ():
                self._layer_ready(seq.key, layer, 0, seq.num_cached, stored)

    def on_layer(self, plan: StepPlan, layer: int) -> None:
        """A layer of the step stands, or its storing is what the device was given last.

        A hit that the step copies to the device is ready with the tokens that follow it.
        """
        ready = []
        for item in plan.items:
            start = 0 if item.seq.key in self._copied_in else item.start
            ready.append((item.seq.key, start, item.stop - start))
        self._loop.call_soon_threadsafe(self._report, layer, ready, self._mark_queued())

    def _report(self, layer: int, ready: list[tuple[SequenceKey, int, int]], stored: Event | None) -> None:
        self.was_reported = True
        for key, start, num_tokens in ready:
            self._layer_ready(key, layer, start, num_tokens, stored)
