"""Reports to the sender which tokens of which layer have their KV: while a step computes them, and at once for a hit.

A prefill worker has one. The runner's thread calls `on_layer`, all else happens on the main loop.

On a device a step is queued faster than it is computed, so each word of tokens that stand comes with an event: they do
when the device has come to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from engine.memory.streams import Event, MarkQueued, nothing_queued
from engine.sequence import Sequence, SequenceKey, StepPlan

LayerReady = Callable[[SequenceKey, int, int, int, Event | None], None]
"""(sequence, layer, first token, number of tokens, when they stand; None: they do)"""


class LayerStream:
    """Calls `layer_ready` for each token and layer of a prompt once, in the order of its tokens."""

    def __init__(
        self,
        num_layers: int,
        layer_ready: LayerReady,
        *,
        is_moving: Callable[[Sequence], bool],
        mark_queued: MarkQueued = nothing_queued,
    ) -> None:
        self._num_layers = num_layers
        self._layer_ready = layer_ready
        self._is_moving = is_moving
        self._mark_queued = mark_queued
        self._loop = asyncio.get_running_loop()
        self._copied_in: frozenset[SequenceKey] = frozenset()  # by the step in flight: prefix hits
        self.was_reported = False  # anything of the step that was planned last

    def entered(self, seqs: Iterable[Sequence]) -> None:
        """These are new in the step that is about to be made. What they found goes out before anything is computed."""
        self.was_reported = False
        hits = [seq for seq in seqs if seq.num_cached]
        self._copied_in = frozenset(seq.key for seq in hits if self._is_moving(seq))
        stored = (
            self._mark_queued() if hits else None
        )  # the steps that computed them have been taken in, but may still run
        for seq in hits:
            for layer in range(self._num_layers) if seq.key not in self._copied_in else ():
                self._layer_ready(seq.key, layer, 0, seq.num_cached, stored)

    def on_layer(self, plan: StepPlan, layer: int) -> None:
        """A layer of the step stands, or its storing is what the device was given last.

        A hit that the step copies to the device is ready with the tokens that follow it.
        """
        ready = []
        for item in plan.items:
            start = 0 if item.seq.key in self._copied_in else item.start
            ready.append((item.seq.key, start, item.stop - start))
        self._loop.call_soon_threadsafe(self._report, layer, ready, self._mark_queued())

    def _report(self, layer: int, ready: list[tuple[SequenceKey, int, int]], stored: Event | None) -> None:
        self.was_reported = True
        for key, start, num_tokens in ready:
            self._layer_ready(key, layer, start, num_tokens, stored)
