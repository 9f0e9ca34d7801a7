"""Between the steps of a worker and its hand-offs: which tokens of which layer stand, told to `KvSender` as they do.

Every worker that computes prompts for others has one, prefill workers and decode workers alike. It is told of each step
before it is made and when it is over, and listens to the layers in between.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass

from engine.memory.streams import Event, MarkQueued
from engine.sequence import ScheduledSequence, Sequence, SequenceKey, StepPlan
from engine.steps.loop import OnLayer
from kv_transfer.handoff.sender import KvSender


@dataclass(eq=False, slots=True)
class _Step:
    """One that is under way. `items`: of sequences that are handed over, and from which token on each is reported: from
    the first on where the step brings a prefix hit to the device."""

    items: list[tuple[ScheduledSequence, int]]
    was_reported: bool = False  # anything of it


class LayerStream:
    """Reports to the sender which tokens of which layer have their KV: while a step computes them, at once for a hit.

    Calls `KvSender.layer_ready` for each token and layer of a prompt once, in the order of its tokens. The runner's
    thread calls what `listener` returns, all else happens on the main loop. On a device a step is queued faster than it
    is computed, so each word of tokens that stand comes with an event: they do when the device has come to that.
    """

    def __init__(
        self, sender: KvSender, num_layers: int, *, is_moving: Callable[[Sequence], bool], mark_queued: MarkQueued
    ) -> None:
        self._sender = sender
        self._num_layers = num_layers
        self._is_moving = is_moving
        self._mark_queued = mark_queued
        self._loop = asyncio.get_running_loop()
        self._steps: dict[int, _Step] = {}  # by the id of the plan, which is alive until the step is over

    def begin(self, plan: StepPlan) -> None:
        """The step is about to be made. What those who begin with it found cached goes out before anything computes."""
        items = [(item, item.start) for item in plan.items if self._sender.hands_over(item.seq.key)]
        for number, (item, start) in enumerate(items):
            if start == 0 or start != item.seq.num_cached or self._sender.has_begun(item.seq.key):
                continue
            if self._is_moving(item.seq):
                items[number] = (item, 0)
                continue
            stored = self._mark_queued()  # the steps that computed the hit have been taken in, but may still run
            for layer in range(self._num_layers):
                self._sender.layer_ready(item.seq.key, layer, 0, start, stored)
        if items:
            self._steps[id(plan)] = _Step(items)

    def listener(self, plan: StepPlan) -> OnLayer | None:
        """What to call when a layer of the step stands, or its storing is what the device was given last; None where
        nobody in it is handed over."""
        step = self._steps.get(id(plan))
        return None if step is None else functools.partial(self._on_layer, step)

    def end(self, plan: StepPlan) -> list[SequenceKey]:
        """The step is over. Of whom KV went out while it computed: if it failed, none of that is to be trusted."""
        step = self._steps.pop(id(plan), None)
        return [] if step is None or not step.was_reported else [item.seq.key for item, _ in step.items]

    def _on_layer(self, step: _Step, layer: int) -> None:
        self._loop.call_soon_threadsafe(self._report, step, layer, self._mark_queued())

    def _report(self, step: _Step, layer: int, stored: Event | None) -> None:
        step.was_reported = True
        for item, start in step.items:
            self._sender.layer_ready(item.seq.key, layer, start, item.stop - start, stored)
