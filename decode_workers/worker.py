"""A decode worker as plain Python: reserves, receives KV, verifies, and streams tokens.

Composition of the scheduler (what runs), the step loop (when), the reservations (KV in) and the gateway port (requests
in, tokens out). It can also compute a request entirely by itself. Knows nothing of Ray or of prefill workers.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from decode_workers.factory import decode_scheduler, step_overlap
from decode_workers.pacing import LayerKvConfig
from decode_workers.reservations import Reservations
from decode_workers.snapshot import DecodeReport
from decode_workers.states import DecodeState
from engine.sequence import Sequence, SequenceKey, StepOutput, StepPlan
from engine.steps.calibration import calibrate
from engine.steps.fault_finding import FaultFinder
from engine.steps.in_flight import StepSkippedError
from engine.steps.loop import OVERDUE_S, StepLoop
from kv_transfer.connections.loop_thread import LoopThread
from kv_transfer.messages import Cancel, FailureCause, Message, RequestSpec, Reserve, Start, WorkerInfo, WorkerSnapshot
from kv_transfer.worker.draining import Drain
from kv_transfer.worker.parts import WorkerParts
from kv_transfer.worker.port import GatewayId, GatewayPort, worker_info
from kv_transfer.worker.prefix_loading import Columns, PrefixLoading
from kv_transfer.worker.sequences import sequence_of, token_event

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkerConfig:
    """`token_budget` bounds a step's decodes and local prefill chunks together.

    A reservation that does not fit waits up to `reserve_wait_s` for room; one whose prefill is not heard of for
    `lease_ttl_s` lapses. `calibration_s`: how long steps are tried out before the worker takes requests; 0: they are
    learnt from requests. `layerkv`: how sequences rest in host memory too; None: on the device only. `overlap_steps`:
    the next step is prepared while one computes; None: on a GPU, not on a CPU. `overdue_s`: see `StepLoop`;
    gateways are told.
    """

    max_num_seqs: int = 64
    token_budget: int = 512
    max_waiting: int = 256
    reserve_wait_s: float = 10.0
    lease_ttl_s: float = 30.0
    heartbeat_s: float = 0.5
    calibration_s: float = 0.0
    overdue_s: float = OVERDUE_S
    layerkv: LayerKvConfig | None = None
    overlap_steps: bool | None = None


class DecodeWorker:
    """Accepts `Reserve` (KV will come) and `Start` (compute it here); answers with tokens, `Refused`, or a failure."""

    def __init__(self, parts: WorkerParts, config: DecodeWorkerConfig) -> None:
        model = self._model = parts.model
        self._parts = parts
        self._config = config
        self._scheduler = decode_scheduler(
            model,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            layerkv=config.layerkv,
        )
        self._prefix = PrefixLoading(
            parts.lower_tiers,
            self._scheduler.allocator,
            prefill_s=lambda num_tokens: model.costs.prefill_s(num_tokens, config.token_budget),
            on_over=self._compute,
            on_room=self._on_room,
        )
        self._faults = FaultFinder(model)
        self._gateway_of: dict[SequenceKey, GatewayId] = {}
        self._drain = Drain(lambda: not (self._gateway_of or self._num_waiting or self._scheduler.num_running))
        self._report = DecodeReport(
            parts.identity.worker_id, model, self._scheduler, self._prefix, steps=lambda: self._steps
        )

    async def start(self) -> None:
        """Listen, register, run. Returns when the worker can take requests."""
        self._thread = LoopThread("kv")
        self._port = GatewayPort(self._parts.identity, on_message=self._on_message, on_lost=self._on_gateway_lost)
        self.reservations = Reservations(
            self._parts, self._scheduler, self._port, self._thread, wait_s=self._config.reserve_wait_s, listener=self
        )
        await self.reservations.start(ttl_s=self._config.lease_ttl_s)
        self._steps = StepLoop(
            self._model.runner,
            costs=self._model.costs,
            plan=self._plan,
            finish=self._finish,
            failed=self._step_failed,
            on_overdue=lambda is_overdue: self._port.step_overdue(is_overdue),
            overdue_s=self._config.overdue_s,
            async_scheduling=step_overlap(self._model, self._plan_ahead, wanted=self._config.overlap_steps),
        )
        if calibration_s := self._config.calibration_s:
            await self._steps.calibrate(lambda: calibrate(self._model, budget_s=calibration_s).cost)
        endpoint = await self._port.start(self._parts.host)
        self.info: WorkerInfo = worker_info(
            self._model,
            self._parts.identity,
            "decode",
            endpoint,
            chunk_tokens=self._config.token_budget,
            max_num_seqs=self._scheduler.tiers.max_in_flight,
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

    @property
    def _num_waiting(self) -> int:
        return self._report.num_waiting(self.reservations.num_waiting)

    def snapshot(self) -> WorkerSnapshot:
        leaves = self._drain.has_begun or not self.healthy  # until it is replaced
        return self._report.snapshot(num_pending=self.reservations.num_waiting, draining=leaves)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until nothing is held here, at most so long; whether that is so."""
        return await self._drain.wait(timeout_s)

    def give_up(self, reason: str) -> None:
        """Let go of all that is left, for other workers to go on with. `drain` first, and again until it is gone."""
        self.reservations.abort_waiting(reason)
        for key in list(self._gateway_of):
            self._fail(key, reason, True, "moved")
            self._let_go(key)
        self._on_room()

    async def stop(self) -> None:
        """Leave at once: what is unfinished fails over to other workers."""
        await self._registration.stop()
        await self._port.close("the decode worker stops")
        await self._steps.stop()
        self._prefix.close()
        self.reservations.stop()
        await self._thread.run(self._parts.transport.close())
        self._thread.stop()

    # --- requests in ---

    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        match message:
            case Reserve(request=request):
                if self._acceptable(gateway, request):
                    self._reserve(gateway, request)
            case Start(request=request, ticket=None):
                if self._acceptable(gateway, request):
                    self._start_local(gateway, request)
            case Cancel(request_id=request_id, attempt=attempt):
                self._cancel(request_id, attempt)
            case _:
                logger.warning("a gateway sent %s, which a decode worker has no use for", type(message).__name__)

    def _acceptable(self, gateway: GatewayId, request: RequestSpec) -> bool:
        if request.num_tokens >= self.info.max_model_len:
            reason = f"{request.num_tokens} tokens leave no room in {self.info.max_model_len}"
            self._port.refuse(gateway, request, reason, None)
            return False
        if self._drain.has_begun:  # since it was placed: no reason to turn the client away
            key = SequenceKey(request.request_id, request.attempt)
            self._port.fail(gateway, key, "the decode worker is about to stop", retryable=True, cause="moved")
            return False
        if self._num_waiting >= self._config.max_waiting:
            self._port.refuse(gateway, request, "the decode queue is full", self._config.reserve_wait_s)
            return False
        return True

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

    def _start_local(self, gateway: GatewayId, request: RequestSpec) -> None:
        self._cancel(request.request_id, request.attempt)
        seq = sequence_of(request)
        self._gateway_of[seq.key] = gateway
        if not self._prefix.begin(seq):
            self._compute(seq)

    def _compute(self, seq: Sequence) -> None:
        """Entirely here, from where its prefix in the own memory ends."""
        self._scheduler.add(seq)
        self._steps.wake()

    # --- what becomes of reservations (`ReservationListener`) ---

    def on_reserved(self, gateway: GatewayId, key: SequenceKey, instead_of: SequenceKey | None) -> None:
        if instead_of is not None:
            self._gateway_of.pop(instead_of, None)
        self._gateway_of[key] = gateway

    def on_received(self, seq: Sequence) -> None:
        self._prefix.stored([Columns(seq, 0, seq.num_published)])
        self._steps.wake()

    def on_reservation_ended(self) -> None:
        self._on_room()

    def on_reservation_failed(self, key: SequenceKey, reason: str, retryable: bool) -> None:
        self._fail(key, reason, retryable)

    # --- what leaves ---

    def _on_gateway_lost(self, gateway: GatewayId) -> None:
        # First what waits: room that a cancelled request leaves must not go to another one that nobody waits for.
        self.reservations.forget(gateway)
        for request_id, attempt in [key for key, owner in self._gateway_of.items() if owner == gateway]:
            self._cancel(request_id, attempt)
        self._on_room()

    def _cancel(self, request_id: str, attempt: int) -> None:
        """End every attempt up to this one, whatever state it is in."""
        self.reservations.cancel_waiting(request_id, attempt)
        for key in [key for key in self._gateway_of if key.request_id == request_id and key.attempt <= attempt]:
            del self._gateway_of[key]
            self._let_go(key)
        self._on_room()

    def _let_go(self, key: SequenceKey) -> None:
        """Its blocks are free as soon as nothing uses them."""
        if self._scheduler.state(key) is DecodeState.RESERVED:
            self.reservations.cancel(key)
        else:
            self._prefix.cancel(key)
            self._scheduler.drop(key)

    def _on_room(self) -> None:
        """Something left. What waits for its blocks or its turn may come in, also when no step is going on."""
        self.reservations.retry()
        self._drain.note()
        self._steps.wake()

    def _fail(
        self, key: SequenceKey, reason: str, retryable: bool, cause: FailureCause = "fault", flush: bool = True
    ) -> None:
        gateway = self._gateway_of.pop(key, None)
        if gateway is not None:
            self._port.fail(gateway, key, reason, retryable=retryable, cause=cause, flush=flush)

    # --- steps ---

    def _plan(self) -> StepPlan:
        if self._faults.probe is not None:
            return self._faults.probe
        plan = self._scheduler.plan(time.monotonic())
        self._port.computing(plan, self._gateway_of)
        return plan

    def _plan_ahead(self) -> StepPlan:
        if self._faults.probe is not None:
            return StepPlan(())
        plan = self._scheduler.plan_ahead(time.monotonic())
        self._port.computing(plan, self._gateway_of)
        return plan

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        self._faults.succeeded()
        if plan is self._faults.probe:
            self._blame(self._faults.end_probe())
            return
        completed = self._prefix.completed_by(plan)
        emissions = self._scheduler.finish_step(plan, output)
        self._prefix.stored(completed)
        for emission in emissions:
            seq = emission.seq
            first = emission.index == seq.num_prior_output
            if first:
                self._prefix.count(seq)
            event = token_event(
                seq,
                emission.index,
                emission.token,
                emission.finish,
                num_cached_tokens=seq.num_cached if first else None,
                prompt_logprobs=emission.prompt_logprobs,
            )
            gateway = self._gateway_of.get(seq.key)
            if gateway is not None:
                self._port.emit(gateway, event)
            if emission.finish is not None:
                self._gateway_of.pop(seq.key, None)
                self._prefix.ended(seq)
        self._port.flush()
        self._on_room()

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        if plan is self._faults.probe:
            self._faults.end_probe()
            self._give_up_device()
            return
        self._scheduler.abandon_step()
        self._on_room()
        if isinstance(error, StepSkippedError):
            return
        accused = self._faults.failed(plan, error)
        if accused is None:
            self._scheduler.suspect(plan)
            return
        self._scheduler.drop(accused.key)
        if not self._faults.begin_probe(accused):
            self._blame(accused)

    def _blame(self, seq: Sequence) -> None:
        """Its steps fail, and the device computes others."""
        self._fail(seq.key, f"its steps fail, alone as well: {self._faults.why}", True, "raised")
        self._on_room()

    def _give_up_device(self) -> None:
        """It computes nothing: everyone has to go elsewhere. Whose step it was may be the reason."""
        for key in list(self._gateway_of):
            cause: FailureCause = "broke" if self._faults.was_there(key) else "moved"
            self._fail(key, "the worker computes nothing any more", True, cause, flush=False)
            self._let_go(key)
        self._port.flush()
        self._on_room()
