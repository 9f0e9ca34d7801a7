"""A decode worker: reserves blocks, receives and verifies KV, and streams tokens; it can also compute prompts, to go on
with them itself or for another decode worker.

A `Worker` whose scheduler decides what runs, and whose reservations let KV in.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

from decode_workers.offload_policy import OffloadPolicy
from decode_workers.pacing import LayerKvConfig
from decode_workers.reservations import Reservations
from decode_workers.scheduler import DecodeScheduler, DecodeState
from engine.drafting.speculation import Speculation, SpeculationConfig
from engine.kv.allocation import BlockAllocator
from engine.sequence import Sequence, SequenceKey, StepOutput, StepPlan
from engine.steps.loading import LoadedModel
from engine.steps.loop import StepLoop
from kv_transfer.messages import Message
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Cancel, Preempted, RequestSpec, Reserve, Start, Ticket
from kv_transfer.messages.workers import DraftReport, WorkerSnapshot
from kv_transfer.worker.base import Worker, WorkerConfig, WorkerParts
from kv_transfer.worker.port import GatewayId
from kv_transfer.worker.sequences import embedding_event, token_event

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkerConfig(WorkerConfig):
    """Defaults are for tests; a cluster's are in `cluster.config.build`.

    `token_budget` bounds a step's decodes and local prefill chunks together, whatever those who decode could bear: on a
    cluster `decode.chunk_tokens`, and a token for each of `max_num_seqs`.

    A reservation that does not fit waits up to `reserve_wait_s` for room; one whose prefill is not heard of for
    `lease_ttl_s` lapses. `layerkv`: how sequences rest in host memory too; None: on the device only. `overlap_steps`:
    the next step is prepared while one computes; None: on a GPU, not on a CPU. `speculation`: who guesses tokens that a
    step checks beside the next one; None: nobody.
    """

    max_num_seqs: int = 64
    token_budget: int = 512
    reserve_wait_s: float = 60.0
    lease_ttl_s: float = 120.0
    layerkv: LayerKvConfig | None = None
    overlap_steps: bool | None = None
    speculation: SpeculationConfig | None = field(default_factory=SpeculationConfig)


class DecodeWorker(Worker):
    """Accepts `Reserve` (KV will come, and what it lacks is computed here) and `Start` (compute it here, for the
    ticket's worker if there is one); answers with tokens, `Refused`, or a failure."""

    role: ClassVar[Role] = "decode"
    scheduler: DecodeScheduler
    _config: DecodeWorkerConfig

    def __init__(self, parts: WorkerParts, config: DecodeWorkerConfig) -> None:
        super().__init__(parts, config, step_tokens=config.token_budget)
        self.scheduler = decode_scheduler(
            self.model,
            self.allocator,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            layerkv=config.layerkv,
            speculation=None
            if config.speculation is None
            else Speculation.of(
                config.speculation, self.model.costs, self.model.runner.sampler.masks, self.model.draft_model
            ),
        )
        self.scheduler.on_preempted = self._tell_preempted

    async def _open(self) -> StepLoop:
        self.reservations = Reservations(
            self.parts,
            self.scheduler,
            self._port,
            self._thread,
            sequence_of=self._sequence,
            wait_s=self._config.reserve_wait_s,
            listener=self,
        )
        await self.reservations.start(ttl_s=self._config.lease_ttl_s)
        overlaps = self._config.overlap_steps
        if overlaps is None:
            overlaps = self.model.kv_cache.device.type != "cpu"  # which idles otherwise
        return self._step_loop(plan_ahead=self._plan_ahead if overlaps else None)

    def _close(self) -> None:
        self.reservations.stop()

    @property
    def _max_num_seqs(self) -> int:
        return self.scheduler.tiers.max_in_flight

    @property
    def _num_waiting(self) -> int:
        """Whatever has no blocks yet, reservations included."""
        return self.reservations.num_waiting + self.prefix.num_loading + self.scheduler.num_waiting

    def _is_idle(self) -> bool:
        is_empty = not (self.gateway_of or self._num_waiting or self.scheduler.num_running)
        return is_empty and not self.sender.num_handing_over

    def snapshot(self) -> WorkerSnapshot:
        scheduler, snapshot = self.scheduler, super().snapshot()
        tiers = replace(
            snapshot.tiers,
            num_offloads=scheduler.tiers.num_offloads,
            num_restores=scheduler.tiers.num_restores,
            num_offloaded_blocks=scheduler.tiers.num_offloaded_blocks,
            num_restored_blocks=scheduler.tiers.num_restored_blocks,
            num_preemptions=scheduler.num_preemptions,
        )
        if (speculation := scheduler.speculation) is not None:
            snapshot = replace(
                snapshot,
                drafts={
                    drafter: DraftReport(num_drafted=counts.drafted, num_accepted=counts.accepted)
                    for drafter, counts in speculation.counts.items()
                },
                tokens_per_step=speculation.tokens_per_step,
                drafts_stretch=speculation.drafts_stretch,
            )
        return replace(
            snapshot,
            tiers=tiers,
            num_waiting=self._num_waiting,
            queued_prefill_tokens=scheduler.num_uncomputed_tokens + self.prefix.num_loading_tokens,
            num_paused=scheduler.num_paused,
            context_tokens=scheduler.num_context_tokens,
            num_local_waiting=self.prefix.num_loading + scheduler.num_uncomputed,
            num_pending=self.reservations.num_waiting,
            oldest_wait_s=max(self.reservations.oldest_wait_s, scheduler.oldest_wait_s),
        )

    def migrate_all(self, reason: str) -> None:
        self.reservations.abort_waiting(reason)
        super().migrate_all(reason)

    # --- requests in ---

    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        match message:
            case Reserve(request=request):
                if self._acceptable(gateway, request):
                    self._reserve(gateway, request)
            case Start(request=request, ticket=ticket):
                if self._acceptable(gateway, request):
                    self._start(gateway, request, ticket)
            case Cancel(request_id=request_id, attempt=attempt):
                self._cancel(request_id, attempt)
            case _:
                logger.warning("a gateway sent %s, which a decode worker has no use for", type(message).__name__)

    def _acceptable(self, gateway: GatewayId, request: RequestSpec) -> bool:
        if request.num_tokens + (request.pooling is None) > self.info.max_model_len:
            reason = f"{request.num_tokens} tokens leave no room in {self.info.max_model_len}"
            self._port.refuse(gateway, request, reason, None)
            return False
        if self._refused_adapter(gateway, request):
            return False
        if self._refused_as_leaving(gateway, SequenceKey(request.request_id, request.attempt)):
            return False
        if self._num_waiting >= self._config.max_waiting:
            self._port.refuse(gateway, request, "the decode queue is full", self._room_in_s)
            return False
        return True

    @property
    def _room_in_s(self) -> float:
        """Predicted seconds until all who wait now have room. Who is to be computed here waits as long as those before
        did, and not shorter than the prompts take. One that waits for long, as one whose adapter gets no slot, tells
        nothing of the others: its wait counts up to `reserve_wait_s`."""
        num_uncomputed = self.scheduler.num_uncomputed_tokens + self.prefix.num_loading_tokens
        oldest_wait_s = min(self._config.reserve_wait_s, self.scheduler.oldest_wait_s)
        return max(self.reservations.room_in_s, oldest_wait_s, self._queue_s(num_uncomputed))

    def _reserve(self, gateway: GatewayId, request: RequestSpec) -> None:
        """Renew what an older attempt reserved, else reserve anew, else wait for room."""
        void = self.reservations.refusal(request)
        if void is not None:
            self._port.refuse(gateway, request, void, 0.0)
            return
        if self.reservations.renew(gateway, request):
            return
        self._cancel(request.request_id, request.attempt)
        self.reservations.add(gateway, request)

    def _start(self, gateway: GatewayId, request: RequestSpec, ticket: Ticket | None) -> None:
        """Compute it here: entirely, or its prompt for the worker that gave the ticket."""
        if self.sender.hands_over(SequenceKey(request.request_id, request.attempt)):
            return  # a repetition: the first one is being worked on
        self._cancel(request.request_id, request.attempt)
        seq = self._sequence(request, hands_over=ticket is not None)
        self.gateway_of[seq.key] = gateway
        if ticket is not None:
            self.sender.begin(ticket, seq)
            if not self.sender.hands_over(seq.key):
                return  # the ticket is for another length: it has failed
        if not self.prefix.begin(seq):
            self._on_prefix(seq)

    def _on_prefix(self, seq: Sequence) -> None:
        """Compute it here, from where its prefix in the own memory ends."""
        self.scheduler.add(seq, hands_over=self.sender.hands_over(seq.key))
        self.steps.wake()

    # --- what becomes of reservations (`ReservationListener`) ---

    def on_reserved(self, gateway: GatewayId, key: SequenceKey, instead_of: SequenceKey | None) -> None:
        if instead_of is not None:
            self.gateway_of.pop(instead_of, None)
        self.gateway_of[key] = gateway

    def on_received(self, seq: Sequence) -> None:
        self.prefix.stored([(seq, 0, seq.num_published)])
        self.steps.wake()

    def on_reservation_ended(self) -> None:
        self._on_room()

    def on_reservation_failed(self, key: SequenceKey, reason: str) -> None:
        self._fail(key, reason, retryable=True)

    # --- what leaves ---

    def _on_gateway_lost(self, gateway: GatewayId) -> None:
        # First what waits: room that a cancelled request leaves must not go to another one that nobody waits for.
        self.reservations.forget(gateway)
        for request_id, attempt in [key for key, owner in self.gateway_of.items() if owner == gateway]:
            self._cancel(request_id, attempt)
        self._on_room()

    def _cancel(self, request_id: str, attempt: int) -> None:
        """End every attempt up to this one, whatever state it is in."""
        self.reservations.cancel_waiting(request_id, attempt)
        for key in [key for key in self.gateway_of if key.request_id == request_id and key.attempt <= attempt]:
            self.gateway_of.pop(key, None)  # it may have gone with a later attempt's end
            self._abort(key, "cancelled")
        self._on_room()

    def _abort(self, key: SequenceKey, reason: str) -> None:
        if self.scheduler.state(key) is DecodeState.RESERVED:
            self.reservations.cancel(key)
        else:
            self.prefix.cancel(key)
            self.scheduler.drop(key)
            self.sender.cancel(key, reason)

    def _on_room(self) -> None:
        self.reservations.retry()
        super()._on_room()

    # --- steps ---

    def _plan(self) -> StepPlan:
        plan = self.scheduler.plan(time.monotonic())
        if plan.is_empty:
            for seq in self.scheduler.stuck():  # whose decode worker has room, and can compute it as well
                self._end(seq.key, "the memory is kept for prompts that others compute", "moved")
        return plan

    def _plan_ahead(self) -> StepPlan:
        if self._faults.probe is not None:
            return StepPlan(())
        return self._begin_step(self.scheduler.plan_ahead(time.monotonic()))

    def _tell_preempted(self, seq: Sequence) -> None:
        if (gateway := self.gateway_of.get(seq.key)) is not None:
            index = len(seq.output_token_ids) + seq.num_awaited
            self._port.post(gateway, Preempted(request_id=seq.request_id, attempt=seq.attempt, index=index))

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        completed = self.prefix.completed_by(plan)
        emissions = self.scheduler.finish_step(plan, output)
        self.prefix.stored(completed)
        for emission in emissions:
            seq = emission.seq
            if emission.sampled is None or emission.index == seq.num_prior_output:
                self.prefix.count(seq)
            gateway = self.gateway_of.get(seq.key)
            if gateway is not None and emission.sampled is not None:
                event = token_event(
                    seq, emission.index, emission.token, emission.finish, emission.prompt_logprobs, emission.drafted
                )
                self._port.emit(gateway, event)
            elif gateway is not None and seq.pooling is not None:
                self._port.emit(gateway, embedding_event(seq))
            if self.sender.hands_over(seq.key):
                self.prefix.ended(seq)
                self._hand_over(seq.key, emission.sampled, emission.index, emission.finish)
            elif emission.finish is not None:
                self.gateway_of.pop(seq.key, None)
                self.prefix.ended(seq)

    def _set_aside(self, accused: Sequence) -> None:
        self.scheduler.drop(accused.key)


def decode_scheduler(
    model: LoadedModel,
    allocator: BlockAllocator,
    *,
    max_num_seqs: int,
    token_budget: int,
    layerkv: LayerKvConfig | None,
    speculation: Speculation | None = None,
) -> DecodeScheduler:
    """Sequences rest in host memory only if `layerkv` says how and the model has a host pool and a staging ring."""
    return DecodeScheduler(
        allocator,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        tiers=_offload_policy(model, allocator, layerkv),
        cost=model.costs.cautious_cost,
        speculation=speculation,
    )


def _offload_policy(
    model: LoadedModel, allocator: BlockAllocator, layerkv: LayerKvConfig | None
) -> OffloadPolicy | None:
    if layerkv is None or model.host_pool is None or not model.staging_columns:
        return None
    return OffloadPolicy(
        allocator,
        layerkv,
        staging_columns=model.staging_columns,
        block_bytes=model.layout.block_bytes,
        cost=model.costs.cost,
        host_bytes_per_s=model.host_bytes_per_s,
    )
