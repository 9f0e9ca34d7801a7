"""One reservation on the decode worker: the lease, and the attempt that it is promised to at present.

Knows what arrived for the attempt and whether it is whole and true. Knows nothing of copies in flight, of other
requests, or of how peers are answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.handoff.actions import ReceiverState
from kv_transfer.handoff.coverage import Coverage, RangeError
from kv_transfer.messages import Commit, Fence, RequestSpec, SlabHeader


class BrokenHandoffError(Exception):
    """This attempt cannot succeed any more; the message says why."""


@dataclass(eq=False, slots=True, kw_only=True)
class Landing:
    request: RequestSpec
    fence: Fence
    deadline: float
    coverage: Coverage
    peer_id: str | None = None  # who spoke last for this attempt and can be answered
    was_orphaned: bool = False
    why_abandoned: str | None = None
    commit: Commit | None = None
    waiting: list[tuple[int, SlabHeader]] = field(default_factory=list)  # deliveries behind an older attempt's copies

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def attempt(self) -> int:
        return self.fence.generation

    @property
    def lease_id(self) -> int:
        return self.fence.lease

    @property
    def state(self) -> ReceiverState:
        """Follows from what has happened, so that it cannot contradict it."""
        if self.why_abandoned is not None:
            return ReceiverState.ABANDONED
        if self.peer_id is None:
            return ReceiverState.ORPHANED if self.was_orphaned else ReceiverState.RESERVED
        return ReceiverState.RECEIVING if self.commit is None else ReceiverState.COMMITTED

    def lose_peer(self) -> None:
        self.peer_id = None
        self.was_orphaned = True

    def take_waiting(self) -> list[tuple[int, SlabHeader]]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def announce(self, header: SlabHeader) -> bool:
        """Whether the slab is new (True) or a repetition. Raises BrokenHandoffError if it cannot belong here."""
        try:
            return self.coverage.claim(header.layer, header.token_start, header.num_tokens, header.digest)
        except RangeError as error:
            raise BrokenHandoffError(f"a slab was announced wrongly: {error}") from error

    def take_commit(self, commit: Commit) -> None:
        """Raises BrokenHandoffError if the commit contradicts the reservation or an earlier commit."""
        index = len(self.request.output_token_ids)
        counts = (
            ("tokens", commit.num_tokens, self.request.num_tokens),
            ("layers", len(commit.layer_digests), self.coverage.num_layers),
        )
        for what, committed, reserved in counts:
            if committed != reserved:
                raise BrokenHandoffError(f"the commit is of {committed} {what}, but {reserved} were reserved")
        if commit.first_token_index != index:
            raise BrokenHandoffError(
                f"the commit's token has index {commit.first_token_index}, but the request goes on at {index}"
            )
        if self.commit not in (None, commit):
            raise BrokenHandoffError("two commits that contradict each other came for one attempt")
        self.commit = commit

    def settle(self, header: SlabHeader, digest: int) -> None:
        """The slab was copied and its bytes, read back in the blocks, have this digest."""
        if digest != header.digest:
            stop = header.token_start + header.num_tokens
            raise BrokenHandoffError(
                f"layer {header.layer}, tokens [{header.token_start}, {stop}): digest {header.digest:016x} was"
                f" announced, but what was copied has {digest:016x}; the slab was damaged, or reused before it"
                " had been read"
            )
        self.coverage.settle(header.layer, header.num_tokens, digest)

    def verified_commit(self) -> Commit | None:
        """The commit once every layer stands whole; None before. Raises BrokenHandoffError if the digests differ."""
        if self.commit is None or not self.coverage.is_complete:
            return None
        for layer, (landed, sent) in enumerate(
            zip(self.coverage.layer_digests, self.commit.layer_digests, strict=True)
        ):
            if landed != sent:
                raise BrokenHandoffError(
                    f"layer {layer} arrived with digest {landed:016x}, but was committed with {sent:016x}"
                )
        return self.commit
