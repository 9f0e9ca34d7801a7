"""What has been generated and no client has taken yet: it waits without holding up who generates, and within bounds.

Each answer has an `Outbox`; `Unread` counts what waits in all of them. Where that is too much, the answer with most of
it is ended: who reads has little waiting. What is sent only as a whole nobody can read sooner: of such answers some are
ended for now. Knows nothing of HTTP.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from cluster.errors import OverloadedError, UnreadError
from cluster.gateway.wakeup import Wakeup
from cluster.http.openai.choice import Delta

PIECE_BYTES: Final = 64 * 2**10  # the size of the pieces that an answer is sent in, roughly
_CHOICE_BYTES: Final = 4 * 2**10  # what is kept of a choice besides its output until its answer has been sent, roughly


class Unread:
    """Counts what waits to be read in one gateway, in bytes of its memory, estimated.
    One answer may have half of the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._outboxes: dict[Outbox, None] = {}  # the oldest first
        self.num_bytes = 0

    def open(self, num_choices: int, on_too_much: Callable[[], None], *, is_readable: bool = True) -> Outbox:
        """Open an outbox for one answer, which must be closed. `on_too_much` is called if too much waits and the answer
        is ended. `is_readable`: what waits is on its way to the client; else nothing is sent before `resize`."""
        outbox = Outbox(self, on_too_much, is_readable)
        self._outboxes[outbox] = None
        outbox.grow(num_choices * _CHOICE_BYTES)
        return outbox

    def changed(self, outbox: Outbox, num_bytes: int) -> None:
        """Note that `num_bytes` more (or fewer) wait in an outbox. Ends answers for as long as too much waits."""
        self.num_bytes += num_bytes
        if num_bytes > 0 and outbox.num_bytes > self._limit_bytes // 2:
            outbox.give_up(is_too_large=True)
        while self.num_bytes > self._limit_bytes:
            self._one_too_many().give_up()

    def _one_too_many(self) -> Outbox:
        """The answer to end where all of them together have too much: the one with most, if its client can read it.

        If not, the newest of those with the mean or more that nobody can read yet. They are asked for again at once. If
        it were the one with most, of many long ones none would ever be finished; if it were the newest of all, they
        would keep out the small ones of others."""
        most = max(self._outboxes, key=lambda candidate: candidate.num_bytes)
        if most.is_readable:
            return most
        mean = self.num_bytes / len(self._outboxes)
        return next(each for each in reversed(self._outboxes) if each.num_bytes >= mean and not each.is_readable)

    def closed(self, outbox: Outbox) -> None:
        self._outboxes.pop(outbox, None)
        self.num_bytes -= outbox.num_bytes


class Outbox:
    """A queue of one answer's deltas, from who generates them to who sends them. Made by `Unread.open`.

    Deltas of a choice that wait are merged, so that a client that reads slowly gets few events and large ones.
    """

    def __init__(self, unread: Unread, on_too_much: Callable[[], None], is_readable: bool) -> None:
        self._unread = unread
        self._on_too_much = on_too_much
        self.is_readable = is_readable
        self._waiting: deque[tuple[int, Delta]] = deque()
        self._newest: dict[int, Delta] = {}  # the newest delta that waits, by choice
        self._wakeup = Wakeup()
        self._error: Exception | None = None
        self._given_up: UnreadError | OverloadedError | None = None
        self._ended = self._closed = False
        self.num_bytes = 0

    def add(self, index: int, delta: Delta) -> None:
        """Add what follows of choice `index`. Never waits."""
        if self._closed:
            return
        newest = self._newest.get(index)
        if newest is not None and (before := newest.num_bytes) < PIECE_BYTES:
            newest.merge(delta)
            self.grow(newest.num_bytes - before)
        else:
            self._waiting.append((index, delta))
            self._newest[index] = delta
            self.grow(delta.num_bytes)
        self._wakeup.set()

    def end(self, error: Exception | None = None) -> None:
        """Note that nothing more comes. `take` gives what came before, and then raises `error` if there is one."""
        self._ended, self._error = True, self._error or error
        self._wakeup.set()

    async def take(self, deadline: float = math.inf) -> list[tuple[int, Delta]] | None:
        """Take about `PIECE_BYTES` of what waits, in order; wait if nothing does, until `deadline` on
        `time.monotonic`'s clock, after which it is None. Empty after the end.

        What is taken still counts as waiting until `shrink`. Raises what `end` was given, and as `shrink` does.
        """
        while not self._waiting and not self._ended:
            try:
                await self._wakeup.wait(deadline)
            except TimeoutError:
                return None
        taken: list[tuple[int, Delta]] = []
        num_bytes = 0
        while self._waiting and num_bytes < PIECE_BYTES:
            index, delta = self._waiting.popleft()
            if self._newest[index] is delta:
                del self._newest[index]
            num_bytes += delta.num_bytes
            taken.append((index, delta))
        if not taken and (error := self._given_up or self._error) is not None:
            raise error
        return taken

    def grow(self, num_bytes: int) -> None:
        """Note that `num_bytes` more wait for the client."""
        if not self._closed:
            self.num_bytes += num_bytes
            self._unread.changed(self, num_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Note that `num_bytes` of what waits have been sent. If the answer had to be ended, raises UnreadError, or
        OverloadedError where its client could not read it and it was not too large by itself."""
        self._require_going_on()
        self.grow(-num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Note that what waits is complete, has become something else, of `num_bytes`, and is sent from now on. Raises
        as `shrink` does, also if it has become too much."""
        self._require_going_on()
        self.grow(num_bytes - self.num_bytes)
        self._require_going_on()
        self.is_readable = True

    def _require_going_on(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    def give_up(self, *, is_too_large: bool = False) -> None:
        """End the answer, because too much waits: in all of them, or in this one (`is_too_large`)."""
        if is_too_large or self.is_readable:
            self._given_up = UnreadError(
                f"Too much of this answer waits to be read, {self.num_bytes >> 20} MiB. Read it faster, or ask for"
                " fewer choices, tokens or log probabilities."
            )
        else:
            self._given_up = OverloadedError(
                f"Answers of {self._unread.num_bytes >> 20} MiB wait here until they can be sent, and there is no room"
                " for this one. Try again shortly.",
                retry_after_s=1.0,
            )
        self._ended = True
        self.close()
        self._wakeup.set()
        self._on_too_much()

    def close(self) -> None:
        """Forget what waits, and count it no more; idempotent."""
        if not self._closed:
            self._closed = True
            self._wakeup.close()
            self._unread.closed(self)
            self._waiting.clear()
            self._newest.clear()
