"""A prefill worker: computes prompts in chunks and hands their KV over while it computes.

A `Worker` whose scheduler decides which chunks run, and which sends first tokens to gateways.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import ClassVar

from engine.sequence import SampledToken, Sequence, SequenceKey, StepOutput, StepPlan, finish_reason
from engine.steps.loop import StepLoop
from kv_transfer.messages import Message
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Cancel, RequestSpec, Start, Ticket
from kv_transfer.worker.base import Worker, WorkerConfig, WorkerParts
from kv_transfer.worker.port import GatewayId
from kv_transfer.worker.sequences import embedding_event, token_event
from prefill_workers.scheduler import PrefillScheduler, host_groups

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorkerConfig(WorkerConfig):
    """`chunk_tokens` is the token budget of one step."""

    chunk_tokens: int = 512


class PrefillWorker(Worker):
    """Accepts `Start`; answers with the first token (of a request that is split, with nothing), or `Refused`, or a
    failure. Without a ticket the prompt is computed and kept here, until a `Start` with one follows; where a vector is
    asked for in place of tokens, none is waited for, and that is the answer."""

    role: ClassVar[Role] = "prefill"
    scheduler: PrefillScheduler
    _config: PrefillWorkerConfig

    def __init__(self, parts: WorkerParts, config: PrefillWorkerConfig) -> None:
        super().__init__(parts, config, step_tokens=config.chunk_tokens)
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
            longest=self.model.max_model_len,
            staging_columns=self.model.staging_columns,
            host_groups=in_host,
            cost=lambda: self.steps.costs.cautious_cost(),
        )

    async def _open(self) -> StepLoop:
        return self._step_loop()

    def _is_idle(self) -> bool:
        return not (self.sender.num_handing_over or self.scheduler.num_held)

    # --- requests in ---

    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        match message:
            case Start(request=request, ticket=ticket):
                self._accept(gateway, request, ticket)
            case Cancel(request_id=request_id, attempt=attempt):
                self._cancel(
                    [k for k in self.gateway_of if k.request_id == request_id and k.attempt <= attempt], "cancelled"
                )
            case _:
                logger.warning("a gateway sent %s, which a prefill worker has no use for", type(message).__name__)

    def _accept(self, gateway: GatewayId, request: RequestSpec, ticket: Ticket | None) -> None:
        key = SequenceKey(request.request_id, request.attempt)
        if key in self.gateway_of:  # its ticket, or a repetition: the first one is being worked on
            if ticket is not None and self.sender.awaits_ticket(key):
                self._take_ticket(key, ticket)
            return
        if request.num_tokens > self.info.max_model_len:
            self._port.refuse(gateway, request, f"{request.num_tokens} tokens exceed {self.info.max_model_len}", None)
            return
        if self._refused_adapter(gateway, request) or self._refused_as_leaving(gateway, key):
            return
        if not self.scheduler.can_add():
            queue_s = self._queue_s(self.scheduler.num_uncomputed_tokens)
            self._port.refuse(gateway, request, "the prefill queue is full", queue_s)
            return
        seq = self._sequence(request, hands_over=True)
        self.gateway_of[key] = gateway
        is_pooled = seq.pooling is not None
        self.scheduler.add(seq, loading=self.prefix.begin(seq), is_reserved=is_pooled or ticket is not None)
        if ticket is not None:
            self.sender.begin(ticket, seq)
        elif not is_pooled:
            self.sender.keep(seq)
        self.steps.wake()

    def _take_ticket(self, key: SequenceKey, ticket: Ticket) -> None:
        """Begin the hand-off of a sequence that was accepted without a ticket, computed by now or not: decode has room
        for it."""
        seq = self.scheduler.sequence(key)
        assert seq is not None
        self.scheduler.reserved(key)
        self.sender.begin(ticket, seq)
        self.steps.wake()

    def _on_gateway_lost(self, gateway: GatewayId) -> None:
        self._cancel([key for key, owner in self.gateway_of.items() if owner == gateway], "its gateway is gone")

    def _cancel(self, keys: list[SequenceKey], reason: str) -> None:
        for key in keys:
            self.gateway_of.pop(key, None)  # it may have gone with a later attempt's end
            self._release(key, reason)

    def _release(self, key: SequenceKey, reason: str) -> None:
        """Release a sequence: its blocks are free as soon as no step and no hand-off uses them."""
        seq = self.scheduler.sequence(key)
        if seq is None or seq.pooling is None:
            self.sender.cancel(key, reason)
        else:
            self.on_source_released(key)

    # --- steps ---

    def _plan(self) -> StepPlan:
        return self.scheduler.plan()

    def _on_prefix(self, seq: Sequence) -> None:
        self.scheduler.loaded(seq.key)
        self.steps.wake()

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        for item, logprobs in zip(plan.items, output.prompt_logprobs, strict=True):
            if logprobs and item.seq.wants_prompt_logprobs:
                item.seq.prompt_logprobs += logprobs
        for index, part in output.pooled.items():
            plan.items[index].seq.pool(plan.items[index].start, part)
        completed = self.prefix.completed_by(plan)
        computed = self.scheduler.finish_step(plan, output)
        self.prefix.stored(completed)
        for seq, sampled in computed:
            self.prefix.count(seq)
            self.prefix.ended(seq)
            if seq.key not in self.gateway_of:
                continue
            if seq.pooling is not None:
                self._port.emit(self.gateway_of[seq.key], embedding_event(seq))
                self.on_source_released(seq.key)
            elif sampled is None:
                self._hand_over(seq.key, None, 0, None)
            else:
                self._first_token(seq, sampled)

    def _first_token(self, seq: Sequence, sampled: SampledToken) -> None:
        index = len(seq.output_token_ids)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs or None, []
        seq.output_token_ids.append(sampled.token_id)
        finish = finish_reason(seq, self.model.eos_token_ids)
        self._port.emit(self.gateway_of[seq.key], token_event(seq, index, sampled, finish, prompt_logprobs))
        self._hand_over(seq.key, sampled, index, finish)

    def _set_aside(self, accused: Sequence) -> None:
        self.scheduler.stop_computing(accused.key)

    def _abort(self, key: SequenceKey, reason: str) -> None:
        self.scheduler.stop_computing(key)
        self._release(key, reason)
