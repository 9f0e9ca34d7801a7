"""Who makes a step fail: one of its sequences, or the device.

A step of several that failed says nothing of who it was, so its sequences compute alone from then on
(`Sequence.num_alone`). Where such a step fails as well, a step of one made-up token, the probe, tells whether the
device computes at all: if it does, the sequence is to blame. Plans no other steps, and ends no sequence.
"""

from __future__ import annotations

import numpy as np

from engine.kv.block_pool import BlockLease, OutOfBlocksError
from engine.sampling.grammar import GrammarError
from engine.sampling.params import SamplingParams
from engine.sequence import BlockTable, ScheduledSequence, Sequence, SequenceKey, StepPlan
from engine.steps.loading import LoadedModel

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, seed=0)


class FaultFinder:
    """One worker's. `probe` is to be made before any other step, when there is one; `why` the last step failed."""

    def __init__(self, model: LoadedModel) -> None:
        self._pool = model.block_pool
        self._layer_groups = model.layout.num_layer_groups
        self._failed: set[SequenceKey] = set()
        self._lease: BlockLease | None = None
        self._accused: Sequence | None = None
        self.probe: StepPlan | None = None
        self.why = ""

    def begin_anew(self) -> None:
        """A step succeeded, or everybody was sent away."""
        self._failed.clear()

    def failed(self, plan: StepPlan, error: Exception) -> Sequence | None:
        """A step did. Who is accused of it, because it was in it alone; None: all of them are to compute alone now."""
        self.why = f"{type(error).__name__}: {error}"
        # Who comes later may only have found the device broken. A grammar names its request, and says nothing of it.
        if not self._failed and not isinstance(error, GrammarError):
            self._failed.update(item.seq.key for item in plan.items)
        seq = plan.items[0].seq if plan.items else None
        return seq if seq is not None and seq.num_alone else None

    def was_there(self, key: SequenceKey) -> bool:
        """Whether the sequence was in the first step that failed since all began anew, but for a grammar."""
        return key in self._failed

    def is_accused(self, key: SequenceKey) -> bool:
        """Whether the probe that is to come, or is on its way, tells of this one."""
        return self._accused is not None and self._accused.key == key

    def begin_probe(self, accused: Sequence | None) -> bool:
        """Have the probe computed next. `accused` None: nobody is, and only the device is in question. False where no
        block is free for it: then the next steps of others tell."""
        assert self.probe is None, "one is accused at a time"
        try:
            lease = self._pool.lease(self._layer_groups)
        except OutOfBlocksError:
            return False
        table = BlockTable.of(np.array(lease.blocks, dtype=np.int32).reshape(self._layer_groups, 1))
        seq = Sequence(
            request_id="probe", attempt=0, params=_GREEDY, prompt_token_ids=[0], lease=lease, block_table=table
        )
        self._lease, self._accused = lease, accused
        self.probe = StepPlan((ScheduledSequence(seq, 1),))
        return True

    def end_probe(self) -> Sequence | None:
        """End the probe. Returns who was accused, if somebody was."""
        assert self._lease is not None
        self._pool.release(self._lease)
        accused = self._accused
        self._lease = self._accused = self.probe = None
        return accused
