"""A prefill worker as plain Python: computes prompts in chunks and hands their KV over while it computes.

Composition of the scheduler (what runs), the step loop (when), the sender (KV out) and the gateway port (requests in,
first tokens out). Knows nothing of Ray or of decode workers beyond the tickets they issue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.kv.allocation import BlockAllocator
from engine.memory.streams import queued_on
from engine.sequence import SampledToken, Sequence, SequenceKey, StepOutput, StepPlan, TokenLogprobs, finish_reason
from engine.steps.calibration import calibrate
from engine.steps.fault_finding import FaultFinder
from engine.steps.loop import OVERDUE_S, StepLoop
from kv_transfer.connections.loop_thread import LoopThread
from kv_transfer.handoff.sender import HandoffTimeline, KvSender, ignore_timeline
from kv_transfer.messages import Cancel, FailureCause, Message, RequestSpec, Start, Ticket, WorkerSnapshot
from kv_transfer.tiers.report import tiers_report
from kv_transfer.worker.cost_report import cost_report
from kv_transfer.worker.draining import Drain
from kv_transfer.worker.parts import WorkerParts
from kv_transfer.worker.port import GatewayId, GatewayPort, worker_info
from kv_transfer.worker.prefix_loading import PrefixLoading
from kv_transfer.worker.sequences import sequence_of, token_event
from prefill_workers.layer_offload import host_placement
from prefill_workers.layer_stream import LayerStream
from prefill_workers.scheduler import PrefillScheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorkerConfig:
    """`chunk_tokens` is the token budget of one step; `max_slab_bytes` the most KV announced at a time.

    `calibration_s`: how long steps are tried out before the worker takes requests; 0: they are learnt from requests.
    `overdue_s`: see `StepLoop`; gateways are told.
    """

    chunk_tokens: int = 512
    max_waiting: int = 256
    max_slab_bytes: int = 4 * 2**20
    heartbeat_s: float = 0.5
    calibration_s: float = 0.0
    overdue_s: float = OVERDUE_S


class PrefillWorker:
    """Accepts `Start` with a ticket; answers with the first token, or `Refused`, or a failure."""

    def __init__(
        self,
        parts: WorkerParts,
        config: PrefillWorkerConfig,
        on_handed_over: Callable[[HandoffTimeline], None] = ignore_timeline,
    ) -> None:
        model = self._model = parts.model
        self._parts = parts
        self._config = config
        self._on_handed_over = on_handed_over
        self._allocator = BlockAllocator(
            model.block_pool,
            layer_groups=model.layout.num_layer_groups,
            block_size=model.layout.block_size,
            prefix_caching=model.prefix_caching,
            host_pool=model.host_pool,
        )
        self._prefix = PrefixLoading(
            parts.lower_tiers,
            self._allocator,
            prefill_s=self._prefill_s,
            on_over=self._on_prefix,
            on_room=lambda: self._steps.wake(),
        )
        placement = host_placement(model, self._allocator, config.chunk_tokens, self._prefill_s)
        self._scheduler = PrefillScheduler(
            self._allocator,
            token_budget=config.chunk_tokens,
            max_waiting=config.max_waiting,
            staging_columns=model.staging_columns,
            host_groups=placement.host_groups,
            shared_tokens=lambda: self._steps.costs.shared_tokens(),
        )
        self._faults = FaultFinder(model)
        self._gateway_of: dict[SequenceKey, GatewayId] = {}
        self._prompt_logprobs: dict[SequenceKey, list[TokenLogprobs]] = {}
        self._num_snapshots = 0
        self._drain = Drain(lambda: not (self._sender.num_handing_over or self._scheduler.num_held))

    def _prefill_s(self, num_tokens: int) -> float:
        return self._model.costs.prefill_s(num_tokens, self._config.chunk_tokens)

    async def start(self) -> None:
        """Listen, register, run. Returns when the worker can take requests."""
        self._thread = LoopThread("kv")
        self._sender = KvSender(
            self._model.sequence_kv,
            self._parts.transport,
            self._thread,
            host_cache=self._model.host_cache,
            max_slab_bytes=self._config.max_slab_bytes,
            digest_kind=self._parts.digest_kind,
            owner=self,
        )
        self._stream = LayerStream(
            self._model.layout.num_layers,
            self._sender.layer_ready,
            is_moving=self._allocator.is_moving,
            mark_queued=queued_on(self._model.kv_cache.tensor.device),
        )
        self._steps = StepLoop(
            self._model.runner,
            costs=self._model.costs,
            plan=self._plan,
            finish=self._finish,
            failed=self._step_failed,
            on_overdue=lambda is_overdue: self._port.step_overdue(is_overdue),
            overdue_s=self._config.overdue_s,
            on_layer=self._stream.on_layer,
        )
        if calibration_s := self._config.calibration_s:
            await self._steps.calibrate(lambda: calibrate(self._model, budget_s=calibration_s).cost)
        self._port = GatewayPort(self._parts.identity, on_message=self._on_message, on_lost=self._on_gateway_lost)
        endpoint = await self._port.start(self._parts.host)
        self.info = worker_info(
            self._model,
            self._parts.identity,
            "prefill",
            endpoint,
            chunk_tokens=self._config.chunk_tokens,
            home=self._parts.home,
        )
        self._registration = self._parts.registration(
            self.info, snapshot=self.snapshot, period_s=self._config.heartbeat_s
        )
        self._steps.start()
        self._registration.start()

    @property
    def healthy(self) -> bool:
        return self._steps.healthy and self._model.runner.healthy

    def snapshot(self) -> WorkerSnapshot:
        self._num_snapshots += 1
        return WorkerSnapshot(
            worker_id=self._parts.identity.worker_id,
            sequence_number=self._num_snapshots,
            draining=self._drain.has_begun or not self.healthy,  # until it is replaced
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            queued_prefill_tokens=self._scheduler.num_uncomputed_tokens,
            blocks_available=self._model.block_pool.num_available,
            num_leases=self._model.block_pool.num_leases,
            host_blocks_available=0 if self._model.host_pool is None else self._model.host_pool.num_available,
            step_cost=cost_report(self._steps.costs),
            tiers=tiers_report(
                self._model,
                self._prefix,
                num_in_host=self._scheduler.num_in_host,
                num_host_landings=self._scheduler.num_host_landings,
            ),
        )

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until nothing is held here, at most so long; whether that is so."""
        return await self._drain.wait(timeout_s)

    def give_up(self, reason: str) -> None:
        """Let go of all that is left, for other workers to go on with. `drain` first, and again until it is gone."""
        for key in list(self._gateway_of):
            self._fail(key, reason, True, "moved")
            self._sender.cancel(key, reason)

    async def stop(self) -> None:
        """Leave at once: what is unfinished fails over to other workers."""
        await self._registration.stop()
        await self._port.close("the prefill worker stops")
        await self._steps.stop()
        self._prefix.close()
        self._sender.stop()
        await self._thread.run(self._parts.transport.close())
        self._thread.stop()

    # --- requests in ---

    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        match message:
            case Start(request=request, ticket=Ticket() as ticket):
                self._accept(gateway, request, ticket)
            case Start(request=request):
                self._port.refuse(gateway, request, "a prefill worker needs the ticket of a decode worker", None)
            case Cancel(request_id=request_id, attempt=attempt):
                self._cancel([k for k in self._gateway_of if k[0] == request_id and k[1] <= attempt], "cancelled")
            case _:
                logger.warning("a gateway sent %s, which a prefill worker has no use for", type(message).__name__)

    def _accept(self, gateway: GatewayId, request: RequestSpec, ticket: Ticket) -> None:
        key = SequenceKey(request.request_id, request.attempt)
        if key in self._gateway_of:
            return  # a repetition: the first one is being worked on
        if request.num_tokens > self.info.max_model_len:
            self._port.refuse(gateway, request, f"{request.num_tokens} tokens exceed {self.info.max_model_len}", None)
            return
        if self._drain.has_begun:  # since it was placed: no reason to turn the client away
            self._port.fail(gateway, key, "the prefill worker is about to stop", retryable=True, cause="moved")
            return
        if not self._scheduler.can_add():
            chunk_tokens = self._config.chunk_tokens  # of many prompts: whose tokens attend to no other's
            queue_s = self._scheduler.num_uncomputed_tokens / chunk_tokens * self._prefill_s(chunk_tokens)
            self._port.refuse(gateway, request, "the prefill queue is full", queue_s)
            return
        seq = sequence_of(request)
        self._gateway_of[key] = gateway
        self._scheduler.add(seq, loading=self._prefix.begin(seq))
        self._sender.begin(ticket, seq)
        self._steps.wake()

    def _on_gateway_lost(self, gateway: GatewayId) -> None:
        self._cancel([key for key, owner in self._gateway_of.items() if owner == gateway], "its gateway is gone")

    def _cancel(self, keys: list[SequenceKey], reason: str) -> None:
        for key in keys:
            self._gateway_of.pop(key, None)  # it may have gone with a later attempt's end
            self._sender.cancel(key, reason)

    # --- steps ---

    def _plan(self) -> StepPlan:
        if self._faults.probe is not None:
            return self._faults.probe
        plan, admitted = self._scheduler.plan()
        self._stream.entered(admitted)
        self._port.computing(plan, self._gateway_of)
        return plan

    def _on_prefix(self, seq: Sequence) -> None:
        self._scheduler.loaded(seq.key)
        self._steps.wake()

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        self._faults.succeeded()
        self._stream.ended()
        if plan is self._faults.probe:
            self._end(self._faults.end_probe(), f"its steps fail, alone as well: {self._faults.why}", "raised")
            return
        for item, logprobs in zip(plan.items, output.prompt_logprobs, strict=True):
            if logprobs and item.seq.wants_prompt_logprobs and item.seq.key in self._gateway_of:
                self._prompt_logprobs.setdefault(item.seq.key, []).extend(logprobs)
        completed = self._prefix.completed_by(plan)
        first_tokens = self._scheduler.finish_step(plan, output)
        self._prefix.stored(completed)
        for seq, sampled in first_tokens:
            self._prefix.count(seq)
            self._prefix.ended(seq)
            if seq.key in self._gateway_of:
                self._first_token(seq, sampled)
        self._port.flush()
        self._drain.note()

    def _first_token(self, seq: Sequence, sampled: SampledToken) -> None:
        index = len(seq.output_token_ids)
        seq.output_token_ids.append(sampled.token_id)
        finish = finish_reason(seq, self._model.eos_token_ids)
        event = token_event(
            seq,
            index,
            sampled,
            finish,
            num_cached_tokens=seq.num_cached,
            prompt_logprobs=self._prompt_logprobs.pop(seq.key, None),
        )
        self._port.emit(self._gateway_of[seq.key], event)
        if finish is None:
            self._sender.first_token(seq.key, sampled.token_id, index)
        else:
            del self._gateway_of[seq.key]
            self._sender.cancel(seq.key, "the request ended with its first token")

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        was_told = self._stream.ended()
        if plan is self._faults.probe:
            self._faults.end_probe()
            self._give_up_device()
            return
        self._scheduler.abandon_step()
        self._drain.note()
        accused = self._faults.failed(plan, error)
        if accused is None:
            cannot_go_on = self._scheduler.suspect(plan)
            if was_told:  # what went out of such a step is not to be trusted, and nothing goes out twice
                cannot_go_on = [item.seq for item in plan.items]
            for seq in cannot_go_on:
                self._end(seq, "a step of it and others failed", "shared")
        elif not self._faults.begin_probe(accused):
            self._end(accused, f"its steps fail, alone as well: {self._faults.why}", "raised")

    def _give_up_device(self) -> None:
        """It computes nothing: everyone has to go elsewhere. Whose step it was may be the reason."""
        for key in list(self._gateway_of):
            seq = self._scheduler.sequence(key)
            if seq is not None:
                cause: FailureCause = "broke" if self._faults.was_there(key) else "moved"
                self._end(seq, "the worker computes nothing any more", cause, flush=False)
        self._port.flush()

    def _end(self, seq: Sequence, reason: str, cause: FailureCause, *, flush: bool = True) -> None:
        self._fail(seq.key, reason, True, cause, flush)
        self._scheduler.give_up(seq.key)
        self._sender.cancel(seq.key, reason)
        self._drain.note()

    # --- ends (the first three: `SourceOwner`) ---

    def on_handed_over(self, timeline: HandoffTimeline) -> None:
        gateway = self._gateway_of.get(timeline.key)
        if gateway is not None:
            self._port.handed_over(gateway, timeline.key, timeline.exposed_s)
        self._on_handed_over(timeline)

    def on_handoff_failed(self, key: SequenceKey, reason: str, retryable: bool) -> None:
        self._fail(key, reason, retryable)

    def on_source_released(self, key: SequenceKey) -> None:
        self._gateway_of.pop(key, None)
        self._prompt_logprobs.pop(key, None)
        self._prefix.cancel(key)
        self._scheduler.release(key)
        self._steps.wake()
        self._drain.note()

    def _fail(
        self, key: SequenceKey, reason: str, retryable: bool, cause: FailureCause = "fault", flush: bool = True
    ) -> None:
        gateway = self._gateway_of.pop(key, None)
        if gateway is not None:
            self._port.fail(gateway, key, reason, retryable=retryable, cause=cause, flush=flush)
