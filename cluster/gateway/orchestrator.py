"""Runs requests on the cluster and makes them survive it: place, reserve, prefill, stream, and again if a worker dies.

Decode reserves before prefill computes; while it has no room, prefill computes all the same and keeps the prompt. A
dead prefill worker costs a new prefill under the same reservation; a dead decode worker costs a new placement with
prompt and emitted tokens. Either way the client sees one unbroken stream.
Knows nothing of HTTP, and no block ever crosses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from cluster.errors import (
    DeadlineError,
    FailedError,
    GenerationError,
    OverloadedError,
    PoisonRequestError,
    RequestTooLargeError,
)
from cluster.gateway.generator import ServingLimits, Tokens
from cluster.gateway.placing import Placer, sleep_within
from cluster.gateway.quarantine import Quarantine
from cluster.gateway.request_state import AttemptEnd, AttemptFailedError, RequestRun, RequestState
from cluster.gateway.scheduler_client import SchedulerClient
from cluster.gateway.timeline import SequenceTimeline
from cluster.gateway.worker_connections import SILENCE_S, WorkerConnections
from cluster.scheduler.placement.ledger import REPLACED_S
from kv_transfer.connections.connection import require_audible
from kv_transfer.messages import Message
from kv_transfer.messages.requests import (
    Cancel,
    Computing,
    Endpoint,
    FailureEvent,
    Preempted,
    Refused,
    RequestSpec,
    Reserve,
    Reserved,
    RoomAwaited,
    Start,
    StepFrame,
    StepOverdue,
    TokenEvent,
)
from kv_transfer.messages.scheduling import Placement, StandingRequest
from kv_transfer.messages.workers import WorkerInfo
from kv_transfer.transports.base import Identity

logger = logging.getLogger(__name__)

_NONE_REACHED: Final = "no decode worker can be reached"
_NONE_LEFT: Final = "all decode workers are gone"
_COPY_IS_TRIED: Final = "a copy of it is suspected of making workers fail"
LOOK_S: Final = 0.25  # how often to look whether workers give a sign of life
_LONGEST_DELAY: Final = 4  # between attempts, in units of `retry_delay_s`
_LONG_PROMPT_TOKENS: Final = 2_000  # 512 shorter prompts, as many as a gateway runs, are no backlog for a connection


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig:
    """How long to wait for workers and how often to try. A sequence that has begun to decode and gets no token for
    `stall_s` goes to another worker if there is one, and is taken for hung where its worker gives no sign of life; a
    worker that is silent for `silence_s` is left where there is another one, and a scheduler that is is not asked.

    A request fails after `max_attempts` faults without progress between them. The second attempt begins at once, the
    third after about `retry_delay_s`, the next ones after two, three and at most four times as long.
    """

    request_deadline_s: float = 600.0
    stall_s: float = 60.0
    link_timeout_s: float = 5.0
    max_attempts: int = 4
    retry_delay_s: float = 0.25
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        require_audible(self.silence_s)


class Orchestrator:
    """Implements `cluster.gateway.generator.Generator` over real workers."""

    def __init__(
        self,
        identity: Identity,
        config: OrchestratorConfig,
        locate_scheduler: Callable[[], Awaitable[Endpoint]],
        on_slo: Callable[[bytes], None] = lambda report: None,
    ) -> None:
        """Begin nothing yet; see `start`. `on_slo` is called with how requests fared at other gateways. Others may read
        the attributes `scheduler`, `connections`, `runs` (by request id) and `retries` (attempts that came to nothing
        and that another one follows, by why)."""
        self._config = config
        self.retries: Counter[AttemptEnd] = Counter()
        self.runs: dict[str, RequestRun] = {}
        self._quarantine = Quarantine()
        self._last_decodes: dict[str, tuple[int, float]] = {}  # by model: what they held at most, and when that was
        self._alone_on: dict[str, set[str]] = {}  # worker: the only requests of ours that may be in its step
        self.connections = WorkerConnections(
            identity, on_message=self._on_message, on_lost=self._on_worker_lost, silence_s=config.silence_s
        )
        self.scheduler = SchedulerClient(
            identity, locate_scheduler, self.connections, self._on_workers, on_slo, self._standing
        )
        self._placer = Placer(
            self.scheduler, self.connections, link_timeout_s=config.link_timeout_s, retry_delay_s=config.retry_delay_s
        )

    def start(self) -> None:
        self.scheduler.start()
        self._watching = asyncio.create_task(self._watch_workers(), name="watch-workers")

    async def stop(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.scheduler.stop()
        await self.connections.stop()

    def limits(self, model: str = "") -> ServingLimits | None:
        """What the connected decode workers of a model can serve; None while none is known. One that takes requests is
        enough to be ready: it computes prompts, too, where there is no prefill worker. Where all are gone, others like
        them are taken to be on their way for a while."""
        workers = self.scheduler.workers.values()
        decodes = [known for known in workers if known[0].role == "decode" and known[0].serves(model)]
        if not decodes:
            last = (found for name, found in self._last_decodes.items() if model in ("", name))
            gone = [longest for longest, at in last if time.monotonic() - at <= REPLACED_S]
            return ServingLimits(max_model_len=max(gone), ready=False, reason=_NONE_LEFT) if gone else None
        reached = [snapshot for info, snapshot in decodes if self.connections.is_up(info.worker_id)]
        ready = any(not snapshot.draining for snapshot in reached)
        reason = "all decode workers that can be reached are about to leave" if reached else _NONE_REACHED
        longest = max(info.max_model_len for info, _ in decodes)
        return ServingLimits(max_model_len=longest, ready=ready, reason="" if ready else reason)

    async def generate(
        self, request: RequestSpec, timeline: SequenceTimeline | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """Yields the tokens of one sequence, each index once and in order; see `Generator`."""
        deadline = None if timeline is None else timeline.terms.deadline
        run = RequestRun(request, deadline or time.monotonic() + self._config.request_deadline_s, timeline)
        assert run.request_id not in self.runs, f"request id {run.request_id} is in use"
        self.runs[run.request_id] = run
        try:
            while not run.ended:
                try:
                    async with contextlib.aclosing(self._attempt(run)) as arriving:
                        async for tokens in arriving:
                            yield tokens
                except AttemptFailedError as failure:
                    if ready := run.take_ready():  # the next attempt goes on behind them
                        yield ready
                    await self._prepare_retry(run, failure)
        except GenerationError:
            run.end(RequestState.FAILED)
            raise
        finally:
            run.end(RequestState.CANCELLED if run.timeline.finish_reason is None else RequestState.FINISHED)
            self._forget(run)

    # --- one attempt ---

    async def _attempt(self, run: RequestRun) -> AsyncGenerator[Tokens, None]:
        """Place the request, start it on its workers, and yield its tokens to the last one. Raises AttemptFailedError
        if another attempt may follow, GenerationError if none may."""
        await self._quarantine.admit(run)
        placement = await self._placer.place(run)
        self._leave_reservations(run, placement)
        # Decode computes for others only with a ticket. Asked now: it may be off the list for a moment later.
        needs_ticket = placement.prefill is None or not self._placer.is_prefill(placement.prefill)
        spec = run.spec()
        if placement.prefill is None:
            await self._start(run, placement.decode, Start(request=spec, ticket=None))
        else:
            run.state = RequestState.RESERVING
            await self._post(run, placement.decode, Reserve(request=spec))
        while True:
            while ready := run.take_ready():
                yield ready
                if ready[-1].finish_reason is not None:
                    return
            while (news := self._read_news(run)) is not None:
                assert placement.prefill is not None
                computed = replace(spec, prediction_token_ids=[])  # a prediction is of use only to decode
                if isinstance(news, Reserved):
                    await self._start(run, placement.prefill, Start(request=computed, ticket=news.ticket))
                elif not needs_ticket:
                    await self._start(run, placement.prefill, Start(request=computed, ticket=None))
            await self._arrival(run)

    def _leave_reservations(self, run: RequestRun, placement: Placement) -> None:
        """Give back what earlier attempts have reserved at workers that have no part in this one, as where the last one
        was late when this was placed: it would be kept until it lapses, or the request ends."""
        for worker_id in run.touched - {placement.decode, placement.prefill}:
            self.connections.post(worker_id, Cancel(request_id=run.request_id, attempt=run.attempt - 1))
            run.touched.discard(worker_id)

    async def _start(self, run: RequestRun, worker_id: str, start: Start) -> None:
        """Tell a worker to compute the prompt; or, if it has computed it already, to hand it over."""
        if not self._quarantine.allows(run):
            raise AttemptFailedError(_COPY_IS_TRIED, None, "moved")
        is_first = run.state in (RequestState.PLACING, RequestState.RESERVING)
        if is_first:
            run.state = RequestState.PREFILLING  # from here on it can be recalled from workers
        await self._post(run, worker_id, start)
        if is_first:
            run.timeline.started()

    def _read_news(self, run: RequestRun) -> Reserved | RoomAwaited | None:
        """Take the next good news out of the inbox; None: there is none, or the last token has come. Bad news that
        comes before is raised: what ends the attempt or the request."""
        while run.inbox and not run.ended:
            news = run.inbox.popleft()
            if isinstance(news, Reserved | RoomAwaited):
                return news
            if _ends(run, news):
                raise news
        return None

    async def _arrival(self, run: RequestRun) -> None:
        """Wait for tokens or news."""
        limit = run.deadline
        if run.state is RequestState.DECODING:
            limit = min(limit, time.monotonic() + self._config.stall_s)
        try:
            await run.wakeup.wait(limit)
        except TimeoutError:
            if time.monotonic() >= run.deadline:
                raise DeadlineError(
                    f"The request was not finished within {self._config.request_deadline_s:g} s. Ask for fewer tokens."
                ) from None
            assert run.placement is not None
            worker_id = run.placement.decode
            if worker_id in self.connections.unresponsive():
                self._lost_in_a_step(worker_id)
                raise AttemptFailedError("the worker is silent", worker_id) from None
            if self._has_another(run, worker_id):
                await self._leave_for_room(run, worker_id)

    async def _leave_for_room(self, run: RequestRun, worker_id: str) -> None:
        """Raise AttemptFailedError if another worker has room for a sequence that gets no token from one whose steps go
        on: it waits there, for blocks or for its adapter's slot, which is nobody's fault. Where there is no room
        either, or a token comes meanwhile, it would only lose its place, and all of its KV."""
        num_emitted = len(run.emitted)
        has_room = await self._placer.has_room(run, worker_id)
        if has_room and not run.ended and len(run.emitted) == num_emitted:
            raise AttemptFailedError(
                "it gets no token there, though the worker's steps go on", worker_id, "full"
            ) from None
        if has_room is not False and (standing := run.standing()) is not None:
            self.scheduler.stands(standing)  # it may be counted elsewhere

    async def _prepare_retry(self, run: RequestRun, failure: AttemptFailedError) -> None:
        """End the failed attempt on its workers, and wait until the next one may begin. Raises FailedError after too
        many faults, DeadlineError if the request's time is up first."""
        worker_id = failure.worker_id
        run.timeline.failed(failure.cause, worker_id)
        level = logging.INFO if failure.cause in ("moved", "full") else logging.WARNING
        told = (run.request_id, run.attempt, failure, worker_id)
        logger.log(level, "request %s attempt %d ended: %s (%s)", *told, extra=run.log_fields)
        if failure.cause in ("hung", "silent"):
            assert worker_id is not None
            self._lost_in_a_step(worker_id)
        # The decode worker's reservation is renewed, not cancelled: its KV blocks wait for another prefill. Where it
        # has taken over (what was lost is prefill's token) it would decode on beside the next attempt.
        computing = None if run.placement is None else run.placement.prefill
        ended, took_over = run.attempt, run.decode_took_over
        is_gone = worker_id is not None and not self.connections.is_up(worker_id)
        run.next_attempt(worker_id, failure.cause, is_gone)
        for touched in list(run.touched):
            if not self._placer.is_decode(touched) or touched in (*run.excluded, computing) or took_over:
                self.connections.post(touched, Cancel(request_id=run.request_id, attempt=ended))
                run.touched.discard(touched)  # it holds nothing any more: no reason to prefer it
        if run.num_faults >= self._config.max_attempts:
            if failure.cause == "adapter" and run.request.adapter is not None:
                raise FailedError(
                    f"No worker could load the adapter {run.request.adapter.name!r} as it was when the request came: it"
                    f" was replaced or taken away since, or workers cannot read it. {_what_to_do(run)}",
                    param="model",
                    code="adapter_not_loaded",
                )
            raise FailedError(f"The request failed {self._config.max_attempts} times. {_what_to_do(run)}")
        self.retries[failure.cause] += 1
        # All of a worker's requests come back at once: the second time not all in the same moment.
        delay_s = self._config.retry_delay_s * min(run.num_stumbles - 1, _LONGEST_DELAY) * random.uniform(0.5, 1.5)
        await sleep_within(run, delay_s)

    async def _post(self, run: RequestRun, worker_id: str, message: Reserve | Start) -> None:
        """Send a worker its part of the request. A long prompt waits until the connection has taken those before it:
        128 choices of one would otherwise be taken for a backlog.
        Raises AttemptFailedError if the worker is gone, and DeadlineError."""
        request = message.request
        if request.num_tokens + len(request.prediction_token_ids) <= _LONG_PROMPT_TOKENS:
            posted = self.connections.post(worker_id, message)
        else:
            posted = await self._post_in_turn(run, worker_id, message)
        if not posted:
            raise AttemptFailedError("the worker is gone", worker_id)

    async def _post_in_turn(self, run: RequestRun, worker_id: str, message: Reserve | Start) -> bool:
        """Send a long prompt once the connection has taken those before it. Returns False if the connection ends before
        that. Raises DeadlineError, and the bad news that comes meanwhile: that worker may be the silent one."""
        posting = asyncio.create_task(self.connections.post_large(worker_id, message))
        posting.add_done_callback(lambda _: run.wakeup.set())
        try:
            while not posting.done():
                await run.wakeup.wait(run.deadline)
                if run.ended:
                    return True
                for news in run.inbox:
                    if not isinstance(news, Reserved | RoomAwaited) and _ends(run, news):
                        raise news
            return posting.result()
        except TimeoutError:
            raise DeadlineError("The request's worker did not take it before its deadline.") from None
        finally:
            posting.cancel()
            run.wakeup.set()  # for whatever else has come

    def _forget(self, run: RequestRun) -> None:
        """Let go of a request that has ended, and cancel what workers still hold for it."""
        del self.runs[run.request_id]
        run.wakeup.close()
        self._quarantine.on_ended(run)
        self.scheduler.ended(run.request_id, run.num_output_tokens)
        finished_by_decode = run.has_last_token and run.decode_took_over
        if finished_by_decode and run.attempt == run.request.attempt:
            return  # every worker let go of it by itself
        for worker_id in run.touched:
            self.connections.post(worker_id, Cancel(request_id=run.request_id, attempt=run.attempt))

    def _standing(self) -> list[StandingRequest]:
        """All requests that are on workers now, for a scheduler that did not place them."""
        return [standing for run in self.runs.values() if (standing := run.standing()) is not None]

    # --- what comes in ---

    def _on_workers(self, workers: list[WorkerInfo]) -> None:
        longest: dict[str, int] = {}
        for info in workers:
            if info.role == "decode":
                longest[info.model] = max(info.max_model_len, longest.get(info.model, 0))
        self._last_decodes |= {model: (length, time.monotonic()) for model, length in longest.items()}
        self.connections.update(workers)
        self._placer.workers_changed()

    def _on_message(self, worker_id: str, message: Message) -> None:
        match message:
            case StepFrame(tokens=tokens, failures=failures, handoffs=handoffs):
                now = time.monotonic()
                for token in tokens:
                    self._deliver_token(worker_id, token, now)
                if tokens:
                    self._quarantine.on_tokens_from(worker_id)
                for handoff in handoffs:
                    if (run := self.runs.get(handoff.request_id)) is not None:
                        run.timeline.handed_off(handoff.attempt, handoff.exposed_s)
                        if run.on_handed_over(worker_id, handoff.attempt):
                            self.scheduler.part_computed(run.request_id)
                self._judge_failures(worker_id, failures)
                for failure in failures:
                    self._failed(worker_id, failure)
            case Computing(sequences=sequences, alone=alone):
                self._note_computing(worker_id, sequences, alone)
            case Reserved(ticket=ticket, attempt=attempt):
                if (run := self._current(ticket.request_id, attempt)) is not None:
                    run.notify(message)
            case RoomAwaited(request_id=request_id, attempt=attempt):
                if (run := self._current(request_id, attempt)) is not None:
                    run.notify(message)
            case Preempted(request_id=request_id, attempt=attempt, index=index):
                if (run := self._current(request_id, attempt)) is not None:
                    run.timeline.preempted(index)
            case Refused():
                self._refused(worker_id, message)
            case StepOverdue(is_overdue=is_overdue):
                self.connections.step_overdue(worker_id, is_overdue)
                if is_overdue and self._quarantine.was_recalled_from(worker_id):
                    self._lost_in_a_step(worker_id)
                self._leave_unresponsive()
            case _:
                logger.warning("worker %s sent %s to a gateway", worker_id, type(message).__name__)

    def _deliver_token(self, worker_id: str, token: TokenEvent, now: float) -> None:
        run = self.runs.get(token.request_id)
        if run is None:
            return
        was_prefilling = run.state is RequestState.PREFILLING
        if run.take(worker_id, token, now) and was_prefilling:
            self.scheduler.first_token(run.request_id)
        if run.alone:
            self._quarantine.on_tokens_of(run)

    def _current(self, request_id: str, attempt: int) -> RequestRun | None:
        """The request, if this is its present attempt; None: that attempt or the whole request is over."""
        run = self.runs.get(request_id)
        return run if run is not None and run.attempt == attempt else None

    def _failed(self, worker_id: str, failure: FailureEvent) -> None:
        """Pass a failure that a worker reports on to its request: as the end of the attempt, or of the request."""
        if (run := self._current(failure.request_id, failure.attempt)) is None:
            return
        if failure.retryable:
            run.notify(AttemptFailedError(failure.reason, worker_id, failure.cause))
        else:
            told = (run.request_id, failure.reason, worker_id)
            logger.error("request %s cannot go on: %s (%s)", *told, extra=run.log_fields)
            run.notify(FailedError(f"A worker cannot go on with the request. {_what_to_do(run)}"))

    def _refused(self, worker_id: str, refused: Refused) -> None:
        """Pass a worker's refusal on to its request. The request ends where it could never fit, or has not begun yet;
        otherwise only the attempt ends."""
        if (run := self._current(refused.request_id, refused.attempt)) is None:
            return
        told = (run.request_id, run.attempt, worker_id, refused.reason)
        logger.info("request %s attempt %d: %s refuses it: %s", *told, extra=run.log_fields)
        if refused.retry_after_s is None:
            advice = "Shorten the prompt, or lower max_tokens."
            run.notify(RequestTooLargeError(f"The workers have no room for so many tokens. {advice}"))
        elif run.attempt == run.request.attempt and not run.num_of_attempt:
            sentence = "Overloaded: the workers are full. Try again later."
            run.notify(OverloadedError(sentence, retry_after_s=refused.retry_after_s))
        else:
            run.notify(AttemptFailedError(refused.reason, worker_id, "full"))

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._leave_unresponsive()

    def _leave_unresponsive(self) -> None:
        """End the attempts that wait for a silent worker or an overdue step, where another worker is left. Called again
        and again for as long as there are such workers."""
        for worker_id in self.connections.unresponsive():
            for run in self.runs.values():
                if run.inbox or run.state is RequestState.PLACING or not self._may_leave(run, worker_id):
                    continue
                if self.connections.is_silent(worker_id):
                    run.notify(AttemptFailedError("the worker is silent", worker_id, "silent"))
                else:
                    run.notify(AttemptFailedError("the worker's step does not end", worker_id, "hung"))

    def _may_leave(self, run: RequestRun, worker_id: str) -> bool:
        """Whether the request needs this worker, another one could take it, and leaving could not make it guilty."""
        is_bound = self._is_in_step(run, worker_id) and self._quarantine.must_stay(run, worker_id)
        return run.concerns(worker_id) and not is_bound and self._has_another(run, worker_id)

    def _has_another(self, run: RequestRun, worker_id: str) -> bool:
        """Whether another worker could take over from this one; if none could, waiting is better. A decode worker can,
        since it computes prompts, too; a request to be pooled can go to any worker."""
        unresponsive = self.connections.unresponsive()
        length = len(run.request.prompt_token_ids) + (0 if run.is_pooled else run.request.params.max_tokens)
        return any(
            (info.role == "decode" or run.is_pooled)
            and info.serves(run.request.model)
            and info.worker_id != worker_id
            and info.worker_id not in unresponsive
            and self.connections.is_up(info.worker_id)
            and not snapshot.draining
            and info.max_model_len >= length
            for info, snapshot in self.scheduler.workers.values()
        )

    def _on_worker_lost(self, worker_id: str, in_order: bool) -> None:
        self.scheduler.worker_lost(worker_id)
        if not in_order:
            self._lost_in_a_step(worker_id)
        self._alone_on.pop(worker_id, None)
        for run in self.runs.values():
            if run.concerns(worker_id):
                run.notify(AttemptFailedError("the worker is gone", worker_id, "moved" if in_order else "fault"))

    # --- who is to blame ---

    def _note_computing(self, worker_id: str, sequences: list[tuple[str, int]], alone: bool) -> None:
        """Note which sequences, each (request id, attempt), are new in a worker's next step. `alone`: of this gateway's
        they are the only ones in it."""
        for request_id, attempt in sequences:
            if (run := self.runs.get(request_id)) is None:
                continue
            if run.attempt == attempt:
                run.computing_on.add(worker_id)
                run.timeline.computing()
            self._quarantine.on_computing(run, worker_id)
        if alone:
            self._alone_on[worker_id] = {request_id for request_id, _ in sequences}
        else:
            self._alone_on.pop(worker_id, None)

    def _is_in_step(self, run: RequestRun, worker_id: str) -> bool:
        """Whether the request may be in the worker's present step, by what the worker told before it."""
        alone = self._alone_on.get(worker_id)
        return worker_id in run.computing_on and (not run.alone if alone is None else run.request_id in alone)

    def _lost_in_a_step(self, worker_id: str) -> None:
        """Suspect all requests in the step of a worker that died or hangs: each of them may be the reason. Each of them
        tells of it, and only the first to do so changes anything."""
        if self._quarantine.is_lost(worker_id):
            return
        runs = [run for run in self.runs.values() if run.concerns(worker_id) and self._is_in_step(run, worker_id)]
        if self._quarantine.on_worker_lost(worker_id, runs):
            self._end_guilty()
        self._recall_copies()

    def _recall_copies(self) -> None:
        """End the attempts of all copies of suspected requests, so that one copy can be tried alone.

        This includes copies that a worker has received but not begun. If it begins one before the recall reaches it, it
        says so in its `Computing` message."""
        left: set[str] = set()
        for run in self.runs.values():
            if run.is_started and self._quarantine.recall(run, run.computing_on):
                left |= run.computing_on
                decode = None if run.placement is None else run.placement.decode
                run.notify(AttemptFailedError(_COPY_IS_TRIED, decode, "moved"))
        for worker_id in left & self.connections.unresponsive():  # it will not tell of its overdue step once more
            self._lost_in_a_step(worker_id)

    def _judge_failures(self, worker_id: str, failures: list[FailureEvent]) -> None:
        """Suspect, or convict, requests by the causes of the failures that a worker reports."""
        broke: list[RequestRun] = []
        found = False
        for failure in failures:
            run = self._current(failure.request_id, failure.attempt)
            if run is None or not run.concerns(worker_id):
                continue
            if failure.cause == "broke":
                broke.append(run)
            if failure.cause == "shared":
                self._quarantine.suspect(run)
            if failure.cause == "raised":
                found |= self._quarantine.on_raised(worker_id, run)
        if broke:
            found |= self._quarantine.on_worker_lost(worker_id, broke)
            self._recall_copies()
        if found:
            self._end_guilty()

    def _end_guilty(self) -> None:
        """End every request that is guilty, and all copies of it, even those that have done nothing yet."""
        for run in self.runs.values():
            if self._quarantine.is_guilty(run):
                run.notify(PoisonRequestError())


def _ends(run: RequestRun, news: AttemptFailedError | GenerationError) -> bool:
    """Whether bad news ends the attempt or the request, and is not of a worker that has done its part."""
    return isinstance(news, GenerationError) or news.worker_id is None or run.concerns(news.worker_id)


def _what_to_do(run: RequestRun) -> str:
    """The sentence that tells a client what to do. It names the request's id, by which the log has the reason: a
    worker's words, with its paths and addresses, are not for clients."""
    return f"Try again; if it fails again, tell whoever operates this service the request's id: {run.request_id}."
