"""All reservations of a decode worker: the one owner of their leases, of the copies into them, and of how they ended.

Decides when a copy may start and when a lease goes back. Knows nothing of messages' meaning: `HandoffReceiver` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.handoff.actions import Action, Admit, Copy, Drop, Fail, ReceiverState, Send
from kv_transfer.handoff.copies import CopiesInFlight
from kv_transfer.handoff.reservation import Landing
from kv_transfer.messages import Commit, Fence, Rejected, Verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the newest attempt of a request that is over on this worker ended."""

    attempt: int
    state: ReceiverState
    reason: str
    fence: Fence | None = None  # None: the attempt was called off before anything was reserved
    commit: Commit | None = None  # of an admitted attempt


class Reservations:
    """Each is open until it is admitted, failed or cancelled; the last `num_remembered` endings are remembered."""

    def __init__(self, num_remembered: int = 4096) -> None:
        self._open: dict[str, Landing] = {}
        self._copies = CopiesInFlight()
        self._endings: OrderedDict[str, Ending] = OrderedDict()
        self._num_remembered = num_remembered

    def __iter__(self) -> Iterator[Landing]:
        return iter(list(self._open.values()))

    def get(self, request_id: str) -> Landing | None:
        return self._open.get(request_id)

    def ending(self, request_id: str) -> Ending | None:
        return self._endings.get(request_id)

    def admitted(self, request_id: str, fence: Fence) -> Commit | None:
        """The commit under which this very attempt was admitted, if it was."""
        ending = self.ending(request_id)
        return ending.commit if ending is not None and ending.fence == fence else None

    def open(self, landing: Landing) -> None:
        assert landing.request_id not in self._open, f"{landing.request_id} holds a reservation already"
        self._open[landing.request_id] = landing

    def supersede(self, landing: Landing) -> list[Action]:
        """The lease is promised to a newer attempt; what waited for the older one is dropped."""
        old = self._open[landing.request_id]
        assert old.lease_id == landing.lease_id and old.attempt < landing.attempt, "only a newer attempt takes over"
        self._open[landing.request_id] = landing
        return [*drop_waiting(old), *_reject(old, f"attempt {landing.attempt} has taken over")]

    def start_copies(self, landing: Landing) -> list[Action]:
        """Order the landing's waiting copies, unless an older attempt's copies still write into its lease."""
        if not self._copies.only_of(landing.fence):
            return []
        copies = [Copy(d, landing.request_id, landing.lease_id, header) for d, header in landing.take_waiting()]
        for copy in copies:
            self._copies.start(copy)
        return list(copies)

    def finish_copy(self, delivery_id: int) -> tuple[Copy, list[Action]]:
        """The copy that ended, with what waited for its end: the lease's release, or a newer attempt's copies."""
        copy, released = self._copies.finish(delivery_id)
        landing = self.get(copy.request_id)
        started = [] if landing is None else self.start_copies(landing)
        return copy, [*released, *started]

    def landing_of(self, copy: Copy) -> Landing | None:
        """The landing that the copy still counts for."""
        landing = self.get(copy.request_id)
        if landing is None or landing.fence != copy.header.fence or landing.state is ReceiverState.ABANDONED:
            return None
        return landing

    def admit(self, landing: Landing, commit: Commit) -> list[Action]:
        assert self._copies.is_idle(landing.lease_id) and not landing.waiting, "verified while bytes still move"
        self._close(landing, ReceiverState.ADMITTED, "its sequence was admitted and is being decoded", commit=commit)
        verified = Verified(request_id=landing.request_id, fence=landing.fence)
        answer = [] if landing.peer_id is None else [Send(landing.peer_id, verified)]
        return [Admit(landing.request, landing.lease_id, commit), *answer]

    def fail(self, landing: Landing, reason: str) -> list[Action]:
        self._close(landing, ReceiverState.FAILED, reason)
        failed = Fail(landing.request_id, landing.attempt, reason)
        return [*drop_waiting(landing), *_reject(landing, reason), failed, *self._copies.release(landing.lease_id)]

    def cancel(self, request_id: str, attempt: int, reason: str) -> list[Action]:
        """End, or forbid in advance, every attempt up to this one."""
        landing, ending = self.get(request_id), self.ending(request_id)
        if landing is not None and landing.attempt <= attempt:
            self._close(landing, ReceiverState.CANCELLED, reason, up_to=attempt)
            return [*drop_waiting(landing), *_reject(landing, reason), *self._copies.release(landing.lease_id)]
        if landing is None and (ending is None or ending.attempt < attempt):
            self._remember(request_id, Ending(attempt=attempt, state=ReceiverState.CANCELLED, reason=reason))
        return []

    def _close(
        self,
        landing: Landing,
        state: ReceiverState,
        reason: str,
        *,
        up_to: int | None = None,
        commit: Commit | None = None,
    ) -> None:
        del self._open[landing.request_id]
        attempt = landing.attempt if up_to is None else up_to
        ending = Ending(attempt=attempt, state=state, reason=reason, fence=landing.fence, commit=commit)
        self._remember(landing.request_id, ending)

    def _remember(self, request_id: str, ending: Ending) -> None:
        self._endings[request_id] = ending
        self._endings.move_to_end(request_id)
        if len(self._endings) > self._num_remembered:
            self._endings.popitem(last=False)


def drop_waiting(landing: Landing) -> list[Action]:
    return [Drop(delivery_id) for delivery_id, _ in landing.take_waiting()]


def _reject(landing: Landing, reason: str) -> list[Action]:
    """Tell the landing's prefill, if one can be reached, to spare itself the rest."""
    if landing.peer_id is None:
        return []
    return [Send(landing.peer_id, Rejected(request_id=landing.request_id, fence=landing.fence, reason=reason))]
