"""Which requests make workers fail, and which only were there.

Workers tell who is in a step before it computes (`kv_transfer.messages.requests.Computing`). Where a worker dies or
hangs, everyone in its step is a suspect: it is placed again marked `alone`, so that workers compute it in steps of its
own until it has brought some tokens, which clears it. Who was in the steps of two workers that were lost, and is the
only one of whom that can be said, is guilty: its request is ended, and copies of it are refused. So is one whose own
steps fail on two workers while these compute others'.

Copies are told by a keyed hash of all that decides what is computed, but for the seed. While one is suspected, its
copies on other workers are recalled, and all wait until the one that had come furthest has been tried. Pure bookkeeping
but for that wait; places nothing and ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

from cluster.errors import DeadlineError, PoisonRequestError
from cluster.gateway.request_state import RequestRun, RequestState
from kv_transfer.worker.sequences import NUM_ALONE

REMEMBERED_S: Final = 600.0
_MAX_RECORDS: Final = 1024
_MAX_LOST: Final = 256
_LAST_TOKENS: Final = 64  # of a prompt, which tell it from most others
_HASH_BYTES: Final = 16
_LOSSES: Final = 2  # of workers in steps of a request, after which it is placed no more
# After copies were recalled: workers that they have taken down already are known by then. A broken device shows by
# three steps that fail, each of which may take its time.
_SETTLING_S: Final = 3.0
_LOOK_S: Final = 60.0  # at most so often admitting a request looks for what has expired of others


@dataclass(slots=True)
class _Record:
    """What is held against a request and its copies."""

    expires_at: float
    num_losses: int = 0  # workers that were lost in steps of it
    raised_on: set[str] = field(default_factory=set)  # workers whose steps fail with it alone
    suspects: set[str] = field(default_factory=set)  # ids of the copies that have yet to show that they are harmless
    on_trial: str | None = None  # the copy that may be placed
    one_is_cleared: bool = False  # a copy has shown it, so all may be placed
    was_on: set[str] = field(default_factory=set)  # workers that copies were recalled from
    not_before: float = 0.0  # when the next trial may begin
    is_guilty: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def has_expired(self, now: float) -> bool:
        """Whether it is so long ago that nothing is held against them any more."""
        return self.expires_at < now and not self.suspects

    def note_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Quarantine:
    """Keeps, for one gateway, which requests are suspected of making workers fail,
    which are on trial alone, and which are guilty."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # by fingerprint
        self._beginnings: Counter[bytes] = Counter()  # of their fingerprints
        self._lost: OrderedDict[str, None] = OrderedDict()  # workers, and silent ones until they are heard
        self._look_at = 0.0

    def __len__(self) -> int:
        """How many requests are suspected or guilty; a request and its copies count as one."""
        return len(self._records)

    async def admit(self, run: RequestRun) -> None:
        """Let an attempt begin, once no copy of the request is on trial. Sets `run.alone` if the request is suspected.
        Raises PoisonRequestError if it is guilty, DeadlineError if the wait lasts until its deadline."""
        if self._records and time.monotonic() >= self._look_at:
            self._forget_expired()  # of which no copy comes again
        while (record := self._record_of(run)) is not None:
            if record.is_guilty:
                raise PoisonRequestError
            now = time.monotonic()
            has_settled = now >= record.not_before
            if has_settled and (record.one_is_cleared or record.on_trial in (None, run.request_id)):
                record.on_trial = record.on_trial or run.request_id
                record.was_on.clear()
                record.suspects.add(run.request_id)
                run.alone = True
                return
            if now >= run.deadline:
                raise DeadlineError("The request waited for a copy of itself until its deadline.")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(run.deadline if has_settled else min(record.not_before, run.deadline)):
                    await record.changed.wait()
        run.alone = False

    def allows(self, run: RequestRun) -> bool:
        """Whether the request may still be started as it was admitted: it is not suspected, or is the one on trial."""
        record = self._record_of(run)
        return record is None or (run.alone and not record.is_guilty)

    def is_guilty(self, run: RequestRun) -> bool:
        record = self._record_of(run)
        return record is not None and record.is_guilty

    def must_stay(self, run: RequestRun, worker_id: str) -> bool:
        """Whether losing this worker would make the request guilty. A step that is only late must not do that, so the
        request waits until the step ends or the worker is replaced."""
        record = self._record_of(run)
        return record is not None and record.num_losses >= _LOSSES - 1 and not self.is_lost(worker_id)

    def recall(self, run: RequestRun, workers: Collection[str]) -> bool:
        """Whether the request must leave its workers because a copy of it is suspected. `workers`: those that may be in
        a step of it and others; they are noted as workers that had a copy."""
        record = self._record_of(run)
        if record is None or run.alone or run.request_id in record.suspects:
            return False
        record.was_on.update(workers)
        record.not_before = time.monotonic() + _SETTLING_S
        return True

    def on_computing(self, run: RequestRun, worker_id: str) -> None:
        """Note that a worker has begun to compute this request. If copies were recalled a moment ago, it had not heard
        of that yet, and counts as one that had a copy."""
        record = self._record_of(run)
        if record is not None and not run.alone and time.monotonic() < record.not_before:
            record.was_on.add(worker_id)

    def was_recalled_from(self, worker_id: str) -> bool:
        """Whether this worker had copies of a suspected request that were recalled just now."""
        self._forget_expired()
        return any(worker_id in record.was_on for record in self._records.values())

    def is_lost(self, worker_id: str) -> bool:
        """Whether the worker's loss has been counted and no token has come from it since."""
        return worker_id in self._lost

    def on_worker_lost(self, worker_id: str, runs: Collection[RequestRun]) -> bool:
        """Note that a worker died, or is silent, in a step of `runs`: all of them are suspected.

        Returns whether this loss convicted a request. A worker's loss counts once until it is heard again."""
        if self.is_lost(worker_id):
            return False
        self._lost[worker_id] = None
        if len(self._lost) > _MAX_LOST:
            self._lost.popitem(last=False)
        self._forget_expired()
        copies: dict[bytes, list[RequestRun]] = {
            fingerprint: [] for fingerprint, record in self._records.items() if worker_id in record.was_on
        }
        for run in runs:
            copies.setdefault(self.fingerprint(run), []).append(run)
        twice: list[_Record] = []
        for fingerprint, suspects in copies.items():
            record = self._open(fingerprint)
            record.num_losses += 1
            if record.num_losses >= _LOSSES:
                twice.append(record)
            names = {run.request_id for run in suspects}
            record.suspects |= names
            if suspects and (record.on_trial is None or record.on_trial in names):
                # All go the same way, and who is furthest on it is the first to come to where it ends.
                record.on_trial = max(suspects, key=lambda run: len(run.emitted)).request_id
        return len(twice) == 1 and self._convict(twice[0])

    def on_tokens_from(self, worker_id: str) -> None:
        """Note that tokens came from a worker: if it is lost after this, that is another loss."""
        self._lost.pop(worker_id, None)

    def suspect(self, run: RequestRun) -> None:
        """Suspect this request, because a step of it and others failed."""
        self._open(self.fingerprint(run)).suspects.add(run.request_id)

    def on_raised(self, worker_id: str, run: RequestRun) -> bool:
        """Note that this request's own steps fail on the worker while others' do not.
        Returns whether it is guilty now."""
        record = self._open(self.fingerprint(run))
        record.suspects.add(run.request_id)
        record.on_trial = record.on_trial or run.request_id
        record.raised_on.add(worker_id)
        run.num_raised += 1
        return max(len(record.raised_on), run.num_raised) >= _LOSSES and self._convict(record)

    def on_tokens_of(self, run: RequestRun) -> None:
        """Note that tokens of a suspect came. It is cleared once it has all that come of steps of its own: the next
        token is of a step that it shares."""
        if run.placement is None:
            return  # between two attempts: it was a late one of the last
        # A prefill worker's token comes of such steps, too; of the first part of a prompt there is none.
        num_alone = NUM_ALONE + (run.placement.prefill is not None and not run.placement.split_at)
        if run.ended or (run.decode_took_over and run.num_of_attempt >= num_alone):
            self._release(run, is_cleared=True)

    def on_ended(self, run: RequestRun) -> None:
        """Take the request off trial: it is over. Only one that has finished is cleared."""
        self._release(run, is_cleared=run.state is RequestState.FINISHED)

    def _release(self, run: RequestRun, *, is_cleared: bool) -> None:
        """Take a request off trial and from among the suspects. `is_cleared`: it has shown that it is harmless, and so
        have its copies."""
        run.alone = False
        record = self._record_of(run)
        if record is None or run.request_id not in record.suspects:
            return
        record.suspects.discard(run.request_id)
        if record.on_trial == run.request_id:
            record.on_trial = None
        record.one_is_cleared |= is_cleared
        if is_cleared and not (record.suspects or record.is_guilty):
            self._drop(self.fingerprint(run))
        record.note_change()

    @staticmethod
    def _convict(record: _Record) -> bool:
        """Hold a request and its copies guilty for `REMEMBERED_S`. Returns True."""
        record.is_guilty = True
        record.expires_at = time.monotonic() + REMEMBERED_S
        record.note_change()
        return True

    def _open(self, fingerprint: bytes) -> _Record:
        """The record of a request, made if there is none, and kept for another `REMEMBERED_S` unless it is guilty. Of
        too many the oldest is forgotten."""
        if (record := self._records.get(fingerprint)) is None:
            record = self._records[fingerprint] = _Record(0.0)
            self._beginnings[fingerprint[:_HASH_BYTES]] += 1
        self._records.move_to_end(fingerprint)
        if not record.is_guilty:
            record.expires_at = time.monotonic() + REMEMBERED_S
        if len(self._records) > _MAX_RECORDS:
            self._drop(next(iter(self._records))).note_change()
        return record

    def _drop(self, fingerprint: bytes) -> _Record:
        beginning = fingerprint[:_HASH_BYTES]
        self._beginnings[beginning] -= 1
        if not self._beginnings[beginning]:
            del self._beginnings[beginning]
        return self._records.pop(fingerprint)

    def _record_of(self, run: RequestRun) -> _Record | None:
        """What is held against a request and its copies. None: nothing, or it has expired."""
        if not self._records:
            return None  # the usual case, in which no prompt is hashed
        if run.fingerprint is None and self._beginning_of_fingerprint(run) not in self._beginnings:
            return None  # at a worker's loss, when this is asked of all requests at once, most are of no record
        record = self._records.get(self.fingerprint(run))
        if record is not None and record.has_expired(time.monotonic()):
            self._drop(self.fingerprint(run))
            return None
        return record

    def _forget_expired(self) -> None:
        """Forget what has expired of all requests, so that nothing of it counts in what comes."""
        now = time.monotonic()
        self._look_at = now + _LOOK_S
        for fingerprint in [each for each, record in self._records.items() if record.has_expired(now)]:
            self._drop(fingerprint).note_change()

    def fingerprint(self, run: RequestRun) -> bytes:
        """A keyed hash that all copies of a request share. Nobody without this gateway's key can compute it."""
        if run.fingerprint is None:
            request = run.request
            wishes = repr((request.model, request.prefix_salt, replace(request.params, seed=0))).encode()
            whole = self._hash(wishes + b"\n", request.prompt_token_ids)
            run.fingerprint = self._beginning_of_fingerprint(run) + whole
        return run.fingerprint

    def _beginning_of_fingerprint(self, run: RequestRun) -> bytes:
        """What the fingerprint begins with. It takes 6 us, where all of it takes 35 to 50 for each thousand tokens."""
        if run.beginning_of_fingerprint is None:
            tokens = run.request.prompt_token_ids
            run.beginning_of_fingerprint = self._hash(len(tokens).to_bytes(8), tokens[-_LAST_TOKENS:])
        return run.beginning_of_fingerprint

    def _hash(self, before: bytes, tokens: list[int]) -> bytes:
        return blake2b(before + array("q", tokens).tobytes(), key=self._key, digest_size=_HASH_BYTES).digest()
