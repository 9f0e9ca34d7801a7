"""What every worker is, whatever its role: what it is made of, and its life from its start to its stop.

`Worker` is the base of prefill and decode workers. It meets gateways and the scheduler, drives the steps, finds out who
makes them fail, drains, and reports itself; a role adds what is computed, and the KV that it sends or receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from engine.kv.allocation import BlockAllocator
from engine.memory.streams import queued_on
from engine.model.adapters import AdapterSlot, Need
from engine.model.config import ModelConfig
from engine.sampling.grammar import GrammarError
from engine.sequence import FinishReason, SampledToken, Sequence, SequenceKey, StepOutput, StepPlan
from engine.steps.calibration import calibrate, is_calibrated
from engine.steps.fault_finding import FaultFinder
from engine.steps.loading import LoadedModel
from engine.steps.loop import OVERDUE_S, StepLoop, StepSkippedError
from kernels.ops import arithmetic
from kv_transfer.connections.connection import Connection
from kv_transfer.connections.event_loops import LoopThread
from kv_transfer.connections.handshake import fingerprint
from kv_transfer.digest import DigestKind
from kv_transfer.handoff.sender import HandoffTimeline, KvSender, LayerStream
from kv_transfer.handoff.sender_state import KEPT_S
from kv_transfer.messages import Message
from kv_transfer.messages.fields import Role, Tier
from kv_transfer.messages.requests import Endpoint, FailureCause, RequestSpec
from kv_transfer.messages.workers import StepsReport, TierBlocks, TiersReport, WorkerInfo, WorkerSnapshot
from kv_transfer.tiers.base import tier_blocks
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.transports.base import Identity, Transport
from kv_transfer.worker.adapter_loading import LOAD_ENDS_S, AdapterLoading
from kv_transfer.worker.cost_report import cost_report
from kv_transfer.worker.port import GatewayId, GatewayPort, Registration, warn_of_order
from kv_transfer.worker.prefix_loading import PrefixLoading
from kv_transfer.worker.sequences import sequence_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker gets from its maker. The transport is its own, all else outlives it.

    `lower_tiers` and `events` are of the model's own pools. `on_order` gets what the scheduler sends. `home` and
    `home_model`: the role and model of the pool that it belongs to, whatever its own; None: its own. `models`: others
    that it may become a worker of. `load_s`: that the model took. `digest_kind`: what it would have for itself.
    """

    model: LoadedModel
    identity: Identity
    transport: Transport
    locate_scheduler: Callable[[], Awaitable[Endpoint]]
    host: str = "127.0.0.1"  # to listen on
    lower_tiers: PrefixTiers | None = None
    events: BlockEventLog | None = None
    on_order: Callable[[Message], None] = warn_of_order
    home: Role | None = None
    home_model: str | None = None
    models: Collection[str] = ()
    load_s: float = 0.0
    digest_kind: DigestKind = "xxh3_64"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`max_waiting` requests wait at most, further ones are refused; a snapshot goes out every `heartbeat_s`.
    `max_slab_bytes`: the most KV announced at a time, of a prompt that is computed for another worker.

    `calibration_s`: how long steps are tried out before the worker takes requests, unless it is known what they cost;
    0: they are learnt from requests.
    `overdue_s`: see `StepLoop`; gateways are told.
    `kept_s`: how long a prompt is kept that was computed here while its reservation waits for room at decode.
    `adapter_wait_s`: what waits so long for its adapter, without blocks or before its first token, is refused.
    """

    max_waiting: int = 256
    max_slab_bytes: int = 4 * 2**20
    heartbeat_s: float = 0.5
    calibration_s: float = 0.0
    overdue_s: float = OVERDUE_S
    kept_s: float = KEPT_S
    adapter_wait_s: float = 60.0


def block_allocator(model: LoadedModel) -> BlockAllocator:
    """The allocator that gives a scheduler's sequences their blocks, from the pools of this model."""
    return BlockAllocator(
        model.block_pool,
        layer_groups=model.layout.num_layer_groups,
        block_size=model.layout.block_size,
        prefix_caching=model.prefix_caching,
        host_pool=model.host_pool,
    )


class WorkerScheduler(Protocol):
    """What both roles' schedulers have for the worker that drives them."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_uncomputed_tokens(self) -> int: ...

    @property
    def num_in_host(self) -> int: ...

    @property
    def oldest_wait_s(self) -> float: ...

    num_host_landings: int

    def adapter_users(self) -> Iterator[tuple[Sequence, Need]]: ...

    def abandon_step(self) -> None: ...

    def suspect(self, plan: StepPlan, whom: SequenceKey | None) -> list[Sequence]: ...

    def release(self, key: SequenceKey) -> None: ...


class Worker(ABC):
    """One worker of a replica, on the main loop. A role makes `scheduler` in its constructor.

    `gateway_of` holds the requests that a gateway waits for; what is here beyond them is on its way out. Prompts that
    it computes for a decode worker elsewhere are handed over by `sender`, whose `SourceOwner` it is.
    """

    role: ClassVar[Role]
    scheduler: WorkerScheduler
    steps: StepLoop  # from `start` on
    info: WorkerInfo  # once it has started

    def __init__(self, parts: WorkerParts, config: WorkerConfig, *, step_tokens: int) -> None:
        """`step_tokens`: what one step may compute at most."""
        model = self.model = parts.model
        self.parts = parts
        self._config = config
        self._step_tokens = step_tokens
        self.allocator = block_allocator(model)
        self.prefix = PrefixLoading(
            parts.lower_tiers,
            self.allocator,
            prefill_s=self._prefill_s,
            on_over=self._on_prefix,
            on_room=self._on_room,
        )
        self.adapters = AdapterLoading(
            model.adapters,
            users=self._adapter_users,
            on_loaded=self._on_adapter,
            on_failed=self._on_no_adapter,
            on_late=self._on_late_adapter,
            wait_s=config.adapter_wait_s,
        )
        self.gateway_of: dict[SequenceKey, GatewayId] = {}
        self._faults = FaultFinder(model)
        self._is_leaving = False
        self._is_stopping = False
        self._has_left = asyncio.Event()
        self._num_snapshots = 0

    async def start(self) -> None:
        """Listen, register, run. Returns when the worker can take requests."""
        self._thread = LoopThread("kv")
        self._port = GatewayPort(self.parts.identity, on_message=self._on_message, on_lost=self._on_gateway_lost)
        self.sender = KvSender(
            self.model.sequence_kv,
            self.parts.transport,
            self._thread,
            host_cache=self.model.host_cache,
            max_slab_bytes=self._config.max_slab_bytes,
            digest_kind=self.parts.digest_kind,
            kept_s=self._config.kept_s,
            owner=self,
        )
        self._stream = LayerStream(
            self.sender,
            self.model.layout.num_layers,
            is_moving=self.allocator.is_moving,
            mark_queued=queued_on(self.model.kv_cache.tensor.device),
        )
        self.steps = await self._open()
        if (calibration_s := self._config.calibration_s) and not is_calibrated(self.model):
            await self.steps.calibrate(lambda: calibrate(self.model, budget_s=calibration_s))
        endpoint = await self._port.start(self.parts.host)
        self.info = self._introduction(endpoint)
        self._registration = Registration(
            self.parts.identity,
            self.info,
            locate_scheduler=self.parts.locate_scheduler,
            snapshot=self.snapshot,
            period_s=self._config.heartbeat_s,
            events=self.parts.events,
            on_order=self.parts.on_order,
        )
        self.prefix.open()
        self.steps.start()
        self._registration.start()

    @property
    def is_healthy(self) -> bool:
        """False: it cannot be helped, the replica should be replaced."""
        return self.steps.is_healthy and self.model.runner.is_healthy

    @property
    def connections(self) -> list[Connection]:
        """The connections to the gateways that are here now."""
        return list(self._port.connections.values())

    def snapshot(self) -> WorkerSnapshot:
        """What the scheduler is told of this moment. Each has a number, so that of two the later one is known."""
        self._num_snapshots += 1
        prefill, decode = self.steps.counts["prefill"], self.steps.counts["decode"]
        return WorkerSnapshot(
            worker_id=self.parts.identity.worker_id,
            sequence_number=self._num_snapshots,
            draining=self._is_leaving or not self.is_healthy,  # until it is replaced
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            num_handing_over=self.sender.num_handing_over,
            oldest_wait_s=self.scheduler.oldest_wait_s,
            steps=StepsReport(
                num_prefill=prefill.num_steps,
                prefill_tokens=prefill.num_tokens,
                num_decode=decode.num_steps,
                decode_tokens=decode.num_tokens,
            ),
            links=dict(self.sender.links),
            num_failed_handoffs=self.sender.num_failed,
            unreachable=self.sender.unreachable,
            blocks_available=self.model.block_pool.num_available,
            num_leases=self.model.block_pool.num_leases,
            step_cost=cost_report(self.steps.costs),
            tiers=self._tiers_report(),
            adapters=self.adapters.loaded,
            adapter_load_s=self.adapters.load_s,
            stopping=self._is_stopping,
        )

    async def drain(self, timeout_s: float, *, stops: bool = False) -> bool:
        """Take nothing new and wait until nothing is held here, at most so long; whether that is so. `stops`: as this
        process is to end."""
        self._is_leaving = True
        self._is_stopping |= stops
        self._note_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_left.wait()
        return self._has_left.is_set()

    def migrate_all(self, reason: str) -> None:
        """Abort all that is left, for other workers to go on with. `drain` first, and again until it is gone."""
        for key in list(self.gateway_of):
            self._fail(key, reason, True, "moved")
            self._abort(key, reason)
        self._on_room()

    async def stop(self, *, changes: bool = False) -> None:
        """Leave at once: what is unfinished fails over to other workers. `changes`: a worker of another role or model
        takes its place in this process, as the scheduler has ordered; else it expects another process."""
        await self._registration.stop(changes=changes)
        await self._port.close(f"the {self.role} worker stops")
        await self.steps.stop()
        if self._faults.probe is not None:  # has blocks, which the next worker is to have
            self._faults.end_probe()
        self.prefix.close()
        # The next worker of this process is to have the place that it is read into.
        await self.adapters.close(None if changes else LOAD_ENDS_S)
        self.sender.stop()
        self._close()
        await self._thread.run(self.parts.transport.close())
        self._thread.stop()

    # --- what a role adds ---

    @abstractmethod
    async def _open(self) -> StepLoop:
        """Make what receives KV, on `_thread`, if anything does, and the loop of steps."""

    def _close(self) -> None:  # noqa: B027
        """Stop what `_open` made, except for the steps, which have stopped."""

    @abstractmethod
    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        """A gateway has sent this."""

    @abstractmethod
    def _on_gateway_lost(self, gateway: GatewayId) -> None:
        """Drop the requests of a gateway that is gone: nobody waits for them any more."""

    @abstractmethod
    def _on_prefix(self, seq: Sequence) -> None:
        """What could be had of the sequence's prefix is in host memory."""

    @abstractmethod
    def _plan(self) -> StepPlan:
        """The next step."""

    @abstractmethod
    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        """Take in what a step brought; what there is for gateways is sent by the caller."""

    @abstractmethod
    def _set_aside(self, accused: Sequence) -> None:
        """Compute a sequence no further whose step failed, and which was alone in it."""

    @abstractmethod
    def _abort(self, key: SequenceKey, reason: str) -> None:
        """Drop a sequence that nobody wants any more: its blocks are free as soon as nothing uses them."""

    @abstractmethod
    def _is_idle(self) -> bool:
        """Whether nothing is held here."""

    @property
    def _max_num_seqs(self) -> int:
        """How many sequences may be held at once; 0: their number is not bounded."""
        return 0

    # --- for roles ---

    def _prefill_s(self, num_tokens: int) -> float:
        """Predicted, for computing so many tokens here."""
        return self.model.costs.prefill_s(num_tokens, self._step_tokens)

    def _queue_s(self, num_tokens: int) -> float:
        """Predicted, for computing so many tokens of many prompts, whose tokens attend to no other's."""
        return num_tokens / self._step_tokens * self._prefill_s(self._step_tokens)

    def _step_loop(
        self,
        *,
        plan_ahead: Callable[[], StepPlan] | None = None,
    ) -> StepLoop:
        return StepLoop(
            self.model.runner,
            costs=self.model.costs,
            plan=self._plan_step,
            plan_ahead=plan_ahead,
            finish=self._finish_step,
            failed=self._step_failed,
            listener=self._stream.listener,
            on_overdue=self._port.step_overdue,
            overdue_s=self._config.overdue_s,
        )

    def _introduction(self, endpoint: Endpoint) -> WorkerInfo:
        """What the scheduler is told of the worker once."""
        model, identity = self.model, self.parts.identity
        return WorkerInfo(
            worker_id=identity.worker_id,
            role=self.role,
            endpoint=endpoint,
            pid=os.getpid(),
            model=model.name,
            compatibility=fingerprint(identity.compatibility),
            max_model_len=model.max_model_len,
            num_blocks=model.block_pool.num_blocks,
            block_size=model.layout.block_size,
            layer_groups=model.layout.num_layer_groups,
            chunk_tokens=self._step_tokens,
            max_num_seqs=self._max_num_seqs,
            home=self.parts.home,
            home_model=self.parts.home_model,
            models=list(self.parts.models),
            load_s=self.parts.load_s,
            keeps_prefixes=model.prefix_caching,
            arithmetic=arithmetic(
                model.kv_cache.device,
                model.layout.dtype,
                beside_torch=not isinstance(model.runner.config, ModelConfig),  # norms, say, of transformers' code
            ),
        )

    def _tiers_report(self) -> TiersReport:
        """What a snapshot says of the model's memory tiers and those below. Never waits for a disk."""
        model, lower = self.model, self.prefix.tiers
        disk = None if lower is None else lower.disk
        blocks: dict[Tier, TierBlocks] = {"device": tier_blocks(model.block_pool)}
        if model.host_pool is not None:
            blocks["host"] = tier_blocks(model.host_pool)
        if disk is not None:
            blocks["disk"] = disk.blocks()
        return TiersReport(
            blocks=blocks,
            num_in_host=self.scheduler.num_in_host,
            host_bytes_per_s=model.host_bytes_per_s(),
            num_host_landings=self.scheduler.num_host_landings,
            hit_tokens=dict(self.prefix.hit_tokens),
            missed_tokens=self.prefix.missed_tokens,
            loaded_columns={} if lower is None else dict(lower.loaded_columns),
            failed_columns={} if lower is None else dict(lower.failed_columns),
            host_stored_columns=0 if lower is None else lower.write_through.copied_columns,
            host_dropped_columns=0 if lower is None else lower.write_through.skipped_columns,
            disk=None if disk is None else disk.report(),
        )

    def _hand_over(self, key: SequenceKey, first: SampledToken | None, index: int, finish: FinishReason | None) -> None:
        """A prompt for another worker is computed, and its gateway has the first token, output token `index`; or,
        without one, that part of it which is computed here."""
        if finish is None:
            self.sender.computed(key, None if first is None else (first.token_id, index))
        else:
            self.gateway_of.pop(key, None)
            self.sender.cancel(key, "the request ended with its first token")

    def _sequence(self, request: RequestSpec, *, hands_over: bool = False) -> Sequence:
        """The sequence of a request that is not refused. Its adapter is loaded as soon as may be."""
        seq = sequence_of(request, hands_over=hands_over)
        if request.adapter is not None:
            seq.adapter = self.adapters.want(request.adapter)
        return seq

    def _adapter_users(self) -> Iterator[tuple[Sequence, Need]]:
        yield from self.scheduler.adapter_users()
        yield from ((seq, Need.LATER) for seq in self.prefix.loading)

    def _on_adapter(self) -> None:
        self.steps.wake()

    def _on_no_adapter(self, slot: AdapterSlot, reason: str) -> None:
        for seq in [seq for seq, _ in self._adapter_users() if seq.adapter is slot]:
            self._end(seq.key, f"its adapter cannot be loaded: {reason}", "adapter")

    def _on_late_adapter(self, seq: Sequence, retry_after_s: float) -> None:
        gateway = self.gateway_of.pop(seq.key, None)
        if gateway is not None:
            reason = f"no place for its adapter within {self._config.adapter_wait_s:g} s"
            self._port.refuse(gateway, seq.key, reason, retry_after_s)
        self._abort(seq.key, "its adapter has no place")
        self._on_room()

    def _refused_adapter(self, gateway: GatewayId, request: RequestSpec) -> bool:
        """Whether the request names an adapter here, where there are none."""
        is_refused = request.adapter is not None and not self.adapters.is_possible
        if is_refused:
            key = SequenceKey(request.request_id, request.attempt)
            self._port.fail(gateway, key, "adapters are off here (adapters.folder is not set)", retryable=False)
        return is_refused

    def _on_room(self) -> None:
        """Something left, or blocks are free: whoever waits for that may go on, also when no step is going on."""
        self._note_idle()
        self.adapters.retry()
        self.steps.wake()

    def _refused_as_leaving(self, gateway: GatewayId, key: SequenceKey) -> bool:
        """Send a newcomer elsewhere if the worker drains; it was placed before that was known."""
        if self._is_leaving:
            reason = f"the {self.role} worker is about to stop"
            self._port.fail(gateway, key, reason, retryable=True, cause="moved")
        return self._is_leaving

    def _fail(
        self, key: SequenceKey, reason: str, retryable: bool, cause: FailureCause = "fault", flush: bool = True
    ) -> None:
        """Tell its gateway, if one waits for it, that the attempt ends here."""
        gateway = self.gateway_of.pop(key, None)
        if gateway is not None:
            self._port.fail(gateway, key, reason, retryable=retryable, cause=cause, flush=flush)

    def _end(self, key: SequenceKey, reason: str, cause: FailureCause) -> None:
        """Fail an attempt here and now, to go on elsewhere."""
        self._fail(key, reason, True, cause)
        self._abort(key, reason)
        self._on_room()

    # --- what the step loop calls ---

    def _plan_step(self) -> StepPlan:
        if self._faults.probe is not None:
            return self._faults.probe
        plan = self._begin_step(self._plan())
        if plan.is_empty:  # who lacks its adapter may need it more than before, and no step's end would ask
            self.adapters.retry()
        return plan

    def _begin_step(self, plan: StepPlan) -> StepPlan:
        """Whoever is to know of a step before it is made hears of it. Where none is to be made, the one in flight may
        still be what takes this process down."""
        if not plan.is_empty:
            self._stream.begin(plan)
            self._port.computing(plan, self.gateway_of)
        return plan

    def _finish_step(self, plan: StepPlan, output: StepOutput) -> None:
        self._faults.begin_anew()
        if plan is self._faults.probe:
            accused = self._faults.end_probe()
            if accused is not None:
                self._blame(accused)
            self._on_room()
            return
        self._stream.end(plan)
        self._finish(plan, output)
        self._port.flush()
        self._on_room()

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        if plan is self._faults.probe:
            if self._faults.end_probe() is None:
                self._probe_device()
            self._give_up_device()
            return
        self.scheduler.abandon_step()
        sent = self._stream.end(plan)  # not to be trusted, and nothing goes out twice
        self._on_room()
        if isinstance(error, StepSkippedError):
            for key in sent:
                if not self._faults.is_accused(key):  # its end comes with the probe's
                    self._end(key, "a step of it was computed in vain", "moved")
            return
        culprit = error.key if isinstance(error, GrammarError) else None
        accused = self._faults.failed(plan, error)
        if accused is None:
            for key in dict.fromkeys([*sent, *(seq.key for seq in self.scheduler.suspect(plan, culprit))]):
                is_cleared = culprit is not None and key != culprit
                self._end(key, "a step of it and others failed", "moved" if is_cleared else "shared")
            if culprit is None and not any(item.seq.key in self.gateway_of for item in plan.items):
                self._probe_device()
            return
        self._set_aside(accused)
        if culprit is not None or not self._faults.begin_probe(accused):
            self._blame(accused)

    def _probe_device(self) -> None:
        """See whether the device computes at all, where none of those in a step that failed is left to compute alone,
        as all were recalled meanwhile. Tried until it computes, or the worker has failed often enough to be replaced.
        """
        if self.is_healthy:
            self._faults.begin_probe(None)

    def _blame(self, seq: Sequence) -> None:
        """End a sequence whose steps fail, while the device computes others."""
        self._end(seq.key, f"its steps fail, alone as well: {self._faults.why}", "raised")

    def _give_up_device(self) -> None:
        """Stop computing, as the device is broken: every request has to go elsewhere. Whose step it was may be the
        reason."""
        reason = "the worker computes nothing any more"
        for key in list(self.gateway_of):
            cause: FailureCause = "broke" if self._faults.was_there(key) else "moved"
            self._fail(key, reason, True, cause, flush=False)
            self._abort(key, reason)
        self._faults.begin_anew()
        self._port.flush()
        self._on_room()

    def _note_idle(self) -> None:
        if self._is_leaving and self._is_idle():
            self._has_left.set()

    # --- what becomes of hand-offs (`SourceOwner`) ---

    def on_handed_over(self, timeline: HandoffTimeline) -> None:
        gateway = self.gateway_of.get(timeline.key)
        if gateway is not None:
            self._port.handed_over(gateway, timeline.key, timeline.exposed_s)

    def on_handoff_failed(self, key: SequenceKey, reason: str) -> None:
        self._fail(key, reason, retryable=True)

    def on_source_released(self, key: SequenceKey) -> None:
        self.gateway_of.pop(key, None)
        self.prefix.cancel(key)
        self.scheduler.release(key)
        self._on_room()


WorkerRole = Callable[[WorkerParts], Worker]
"""How a replica makes its workers of one role, such as `partial(DecodeWorker, config=...)`; it can be pickled."""
