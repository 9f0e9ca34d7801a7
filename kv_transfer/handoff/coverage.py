"""Which tokens of which layer a hand-off has announced, and which of them stand verified.

Both state machines keep one per attempt: the sender claims a range when it orders the slab and completes it when the
slab is sent, the receiver when it is announced and when it has been copied and read back.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

from kv_transfer.digest import combine


class BrokenHandoffError(Exception):
    """The attempt cannot succeed any more; the message says why."""


@dataclass(frozen=True, slots=True, order=True)
class _Claim:
    start: int
    stop: int
    digest: int | None  # None at the sending end, where it is known only once the slab is filled


class Coverage:
    """`num_layers` rows of `[0, num_tokens)`: each token of each layer is claimed once, then completed once."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        assert num_layers >= 1 and num_tokens >= 1, (
            f"{num_layers} layers of {num_tokens} tokens are nothing to hand over"
        )
        self.num_layers = num_layers
        self.num_tokens = num_tokens
        self._claims: list[list[_Claim]] = [[] for _ in range(num_layers)]
        self._sums = [0] * num_layers
        self._num_missing = num_layers * num_tokens

    @property
    def is_complete(self) -> bool:
        """Every token of every layer stands where it should."""
        return self._num_missing == 0

    @property
    def layer_digests(self) -> list[int]:
        """Per layer, the combined digest of its completed slabs."""
        return list(self._sums)

    def claim(self, layer: int, start: int, count: int, digest: int | None = None) -> bool:
        """Claim tokens [start, start + count) of a layer; False if this very claim was made before.

        Raises BrokenHandoffError if it lies outside the hand-off or overlaps a different claim.
        """
        self._require_inside(layer, start, count)
        claims, new = self._claims[layer], _Claim(start, start + count, digest)
        at = bisect_right(claims, start, key=lambda claim: claim.start)
        for other in claims[max(0, at - 1) : at + 1]:
            if other == new:
                return False
            if other.start < new.stop and new.start < other.stop:
                raise BrokenHandoffError(_conflict(layer, new, other))
        insort(claims, new)
        return True

    def complete(self, layer: int, count: int, digest: int) -> None:
        """`count` claimed tokens of the layer, digested to `digest`, now stand where they should."""
        self._sums[layer] = combine((self._sums[layer], digest))
        self._num_missing -= count
        assert self._num_missing >= 0, f"more tokens of layer {layer} were completed than claimed"

    def _require_inside(self, layer: int, start: int, count: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise BrokenHandoffError(f"layer {layer} does not exist: the model has layers 0 to {self.num_layers - 1}")
        if count < 1 or start < 0 or start + count > self.num_tokens:
            raise BrokenHandoffError(
                f"tokens [{start}, {start + count}) of layer {layer} do not lie in the reserved [0, {self.num_tokens})"
            )


def _conflict(layer: int, new: _Claim, other: _Claim) -> str:
    if (new.start, new.stop) == (other.start, other.stop):
        return f"tokens [{new.start}, {new.stop}) of layer {layer} were announced twice with different contents"
    return (
        f"tokens [{new.start}, {new.stop}) of layer {layer} overlap"
        f" [{other.start}, {other.stop}), which were announced before"
    )
