"""What a gateway remembers of one request: its state, what was emitted, which workers are on it.

Pure bookkeeping: merges the events of prefill, decode and their successors into one stream in which every index appears
once and in order. Waits for nothing and does no I/O.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from typing import Final, Literal

from cluster.errors import GenerationError
from cluster.gateway.timeline import SequenceEnd, SequenceTimeline
from cluster.gateway.wakeup import Wakeup
from kv_transfer.messages.requests import FailureCause, RequestSpec, Reserved, RoomAwaited, TokenEvent
from kv_transfer.messages.scheduling import Place, Placement, StandingRequest


class RequestState(Enum):
    PLACING = "the scheduler is asked where to run it, or workers are awaited"
    RESERVING = "a decode worker is asked for blocks; nothing is computed yet"
    PREFILLING = "the prompt is being computed; no token of this attempt has come"
    DECODING = "tokens come"
    FINISHED = "the last token has come, or a stop string was found (terminal)"
    FAILED = "no attempt could finish it (terminal)"
    CANCELLED = "the client is gone (terminal)"


TERMINAL: Final[dict[RequestState, SequenceEnd]] = {
    RequestState.FINISHED: "finished",
    RequestState.FAILED: "failed",
    RequestState.CANCELLED: "cancelled",
}


AttemptEnd = FailureCause | Literal["full", "silent", "hung"]
"""Why an attempt ended: what a worker says, or what the gateway finds. `full`: the worker has done nothing for it.
`silent`: nothing is heard of the worker. `hung`: its step does not end.
The last two only while there is another one."""


class AttemptFailedError(Exception):
    """Ends an attempt, but not the request. `worker_id`: whose doing it was, if anybody's."""

    def __init__(self, reason: str, worker_id: str | None, cause: AttemptEnd = "fault") -> None:
        super().__init__(reason)
        self.worker_id = worker_id
        self.cause = cause


News = Reserved | RoomAwaited | AttemptFailedError | GenerationError
"""What a gateway hears of an attempt besides its tokens."""


class RequestRun:
    """One choice of a request, from arrival to its terminal state, over all attempts."""

    def __init__(self, request: RequestSpec, deadline: float, timeline: SequenceTimeline | None = None) -> None:
        self.request = request
        self.deadline = deadline
        self.timeline = timeline or SequenceTimeline(request=request)
        self.terms = self.timeline.terms
        self.state = RequestState.PLACING
        self.attempt = request.attempt
        self.emitted: list[int] = list(request.output_token_ids)
        self.ended = False
        self.has_last_token = False  # a worker ended it; else a stop string does, of which workers know nothing
        self.ready: list[TokenEvent] = []  # merged, and not yet given on
        self.inbox: deque[News] = deque()  # what came for this attempt besides tokens
        self.wakeup = Wakeup()  # set when `ready` or `inbox` grows
        self.placement: Placement | None = None
        self.touched: set[str] = set()  # workers that may hold something for it
        self.decode_took_over = False  # decode has all that prefill had of this attempt, whose fate matters no more
        self.excluded: set[str] = set()
        # By decode worker: those whose attempts to hand the prompt over to it failed, since one that made progress.
        self._could_not_hand_over: dict[str, set[str]] = {}
        self.num_faults = 0  # attempts that faults ended since one that made progress
        self.num_stumbles = 0  # attempts that ended for any reason since one that made progress
        self.computing_on: set[str] = set()  # workers that may be in a step of this attempt
        # The next four are for `cluster.gateway.quarantine`.
        self.alone = False  # it is suspected of making workers fail
        self.num_raised = 0  # attempts that failed by its own doing
        self.fingerprint: bytes | None = None
        self.beginning_of_fingerprint: bytes | None = None
        self._num_before = len(self.emitted)  # tokens of earlier attempts
        self._early: dict[int, TokenEvent] = {}  # tokens of this attempt that came ahead of the next index

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def log_fields(self) -> dict[str, object]:
        """What names this request in a log record: the record's `extra`."""
        return {"request": self.request_id}

    def notify(self, news: News) -> None:
        """Put news of this attempt into the inbox: its reservation, or what ends it, but no token."""
        self.inbox.append(news)
        self.wakeup.set()

    def take(self, worker_id: str, event: TokenEvent, now: float) -> bool:
        """Take in a token from a worker. Returns whether it made any token ready to go out."""
        ready = self.merge(worker_id, event)
        if not ready:
            return False
        for _ in ready:
            self.timeline.token(now)
        self.ready += ready
        self.wakeup.set()
        return True

    def take_ready(self) -> list[TokenEvent]:
        ready, self.ready = self.ready, []
        return ready

    @property
    def num_of_attempt(self) -> int:
        """Tokens that this attempt has brought."""
        return len(self.emitted) - self._num_before

    @property
    def num_output_tokens(self) -> int | None:
        """How many tokens the request has, if it has finished. None: it has not, or a vector was wanted."""
        return len(self.emitted) if self.state is RequestState.FINISHED and not self.is_pooled else None

    def end(self, state: RequestState) -> None:
        """Enter a terminal state; only the first one counts."""
        assert state in TERMINAL
        if not self.ended:
            self.state, self.ended = state, True
            self.timeline.ended(TERMINAL[state])

    @property
    def is_pooled(self) -> bool:
        """Whether a vector is wanted. It comes in place of the first token, and nothing follows it."""
        return self.request.pooling is not None

    def spec(self) -> RequestSpec:
        """The request as this attempt should run it: it goes on from the tokens that were emitted."""
        slo = self.terms.slo
        return replace(
            self.request,
            attempt=self.attempt,
            output_token_ids=list(self.emitted),
            alone=self.alone,
            tpot_s=slo.tpot_s,
            gap_s=slo.gap_s,
            split_at=0 if self.placement is None else self.placement.split_at,
        )

    @property
    def _must_be_whole(self) -> bool:
        """Whether one worker must compute the whole prompt, because its logprobs are still to be sent all at once."""
        return self.request.params.prompt_logprobs is not None and not self.emitted

    def place_query(self, *, prefer_decode: str | None, avoid: Collection[str] = ()) -> Place:
        """The question to the scheduler where this attempt should run. `prefer_decode`: a worker that may hold a
        reservation for it. `avoid`: workers to exclude besides `excluded`."""
        slo, is_pooled = self.terms.slo, self.is_pooled  # what is pooled has one event: no TPOT or gap is promised
        return Place(
            request_id=self.request_id,
            attempt=self.attempt,
            num_tokens=len(self.request.prompt_token_ids) + len(self.emitted),
            max_new_tokens=0 if is_pooled else max(1, self.request.params.max_tokens - len(self.emitted)),
            exclude=sorted(self.excluded.union(avoid)),
            prefer_decode=None if is_pooled else prefer_decode,
            slo_class=slo.name,
            tenant=self.terms.tenant,
            ttft_s=slo.ttft_s,
            tpot_s=None if is_pooled else slo.tpot_s,
            gap_s=None if is_pooled else slo.gap_s,
            waited_s=max(0.0, time.monotonic() - self.terms.arrived_at),
            prefix_hashes=self.timeline.prefix_hashes,
            prompt_hash=self.timeline.prompt_hash,
            adapter="" if self.request.adapter is None else self.request.adapter.digest,
            model=self.request.model,
        )

    def standing(self) -> StandingRequest | None:
        """What is on which workers, for a scheduler that did not place this request. None: it is on no worker."""
        if self.placement is None or self.ended:
            return None
        now, ttft_s = time.monotonic(), self.terms.slo.ttft_s
        first_after_s = (self.timeline.first_token_at or now) - self.terms.arrived_at
        is_late = ttft_s is not None and first_after_s > ttft_s
        num_emitted = self.num_of_attempt
        asked = self.place_query(prefer_decode=None)
        return StandingRequest(
            place=replace(
                asked,
                num_tokens=asked.num_tokens - num_emitted,
                max_new_tokens=asked.max_new_tokens + num_emitted,
                exclude=[],
                prefix_hashes=b"",
            ),
            prefill=self.placement.prefill,
            decode=self.placement.decode,
            num_emitted=num_emitted,
            since_first_s=now - (self.timeline.decoding_since or now),
            slo_probability=0.0 if is_late else 1.0,
        )

    def placed(self, placement: Placement) -> None:
        if self._must_be_whole:
            placement = replace(placement, split_at=0)
        self.placement = placement
        self.timeline.placed(placement)
        self.touched.add(placement.decode)
        if placement.prefill is not None:
            self.touched.add(placement.prefill)

    def concerns(self, worker_id: str) -> bool:
        """Whether this attempt cannot finish without that worker."""
        if self.placement is None or self.ended:
            return False
        if worker_id == self.placement.decode:
            return True
        is_first_lost = self.state is RequestState.PREFILLING and bool(self._early)  # unless it is still on its way
        return worker_id == self.placement.prefill and (not self.decode_took_over or is_first_lost)

    @property
    def is_started(self) -> bool:
        """Whether workers have this attempt, and may begin with it at any moment."""
        return self.placement is not None and self.state in (RequestState.PREFILLING, RequestState.DECODING)

    def on_handed_over(self, worker_id: str, attempt: int) -> bool:
        """Note that decode has verified the KV that this worker computed.

        Returns whether no token of the attempt has come: then this worker computed only the first part of the prompt,
        and its work is done all the same."""
        if attempt != self.attempt or self.ended:
            return False
        self.decode_took_over = True
        self.computing_on.discard(worker_id)
        return self.state is RequestState.PREFILLING

    def next_attempt(self, failed_worker: str | None, cause: AttemptEnd = "fault", is_gone: bool = False) -> None:
        """Go on to the next attempt: forget the last one, but keep its tokens. `is_gone`: the worker that failed is."""
        if len(self.emitted) > self._num_before + 1:  # progress: one token each comes of computing the prompt again
            self.num_faults = self.num_stumbles = 0
            self._could_not_hand_over.clear()
        self.num_faults += cause in ("fault", "raised", "broke", "adapter")
        self.num_stumbles += 1
        self.excluded = self._to_exclude(failed_worker, cause, is_gone)
        self.attempt += 1
        self.state = RequestState.PLACING
        self.placement = None
        self.decode_took_over = False
        self.computing_on.clear()
        self._num_before = len(self.emitted)
        self.inbox.clear()
        self._early.clear()

    def _to_exclude(self, failed_worker: str | None, cause: AttemptEnd, is_gone: bool) -> set[str]:
        """Workers that should not have the next attempt. If decode reports a failed hand-off, the prefill worker is one
        of them, since it may be at fault. If prefill does, it alone is, as decode keeps a reservation for another one;
        where that one fails as well, decode is too, which may take KV from nobody, and all who tried are. The death of
        prefill says nothing of decode."""
        if failed_worker is None:
            return set()
        started = self.state in (RequestState.PREFILLING, RequestState.DECODING) and not self.decode_took_over
        if self.placement is None or self.placement.prefill is None or not started or cause != "fault":
            return {failed_worker}
        prefill, decode = self.placement.prefill, self.placement.decode
        if failed_worker != prefill:
            return {failed_worker, prefill}
        if is_gone:
            return {prefill}
        tried = self._could_not_hand_over.setdefault(decode, set())
        tried.add(prefill)
        return {decode, *tried} if len(tried) > 1 else {prefill}

    def merge(self, worker_id: str, event: TokenEvent) -> list[TokenEvent]:
        """Take in a token and return the tokens that can go out now, in order.
        Repetitions and tokens of older attempts bring none."""
        if event.attempt != self.attempt or self.ended:
            return []
        if self.placement is not None and worker_id == self.placement.decode:
            self.decode_took_over = True
            self.computing_on.intersection_update({worker_id})  # prefill's part is done
        else:
            self.computing_on.discard(worker_id)  # its part is done
        if event.index >= len(self.emitted):
            self._early[event.index] = event
        ready = []
        while not self.ended and (head := self._early.pop(len(self.emitted), None)) is not None:
            self.state = RequestState.DECODING
            self.emitted.append(head.token_id)
            if head.waited_s is not None:
                self.timeline.waited(head.waited_s)
            if head.drafted is not None:
                self.timeline.drafted(*head.drafted)
            ready.append(head)
            if head.finish_reason is not None:
                self.has_last_token = True
                self.end(RequestState.FINISHED)
        return ready
