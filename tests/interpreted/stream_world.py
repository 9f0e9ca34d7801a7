"""A runner that stages on a simulated device, and what may be done with it: what must come of that is in the tests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from engine.model.transformer import Model
from engine.offload.staging_plan import StagingConfig
from engine.offload.stream_staging import StreamStaging
from engine.sampling.pending_output import PendingOutput
from engine.sequence import BlockCopy, ScheduledSequence, Sequence, StepPlan
from tests.interpreted.device_schedules import Device, QueuedModel
from tests.support.small_models import random_prompts
from tests.support.staged_stepping import StagedStepper, staged_runner

PROMPTS = random_prompts((21, 9, 13), seed=3)
NUM_TOKENS = 4
CHUNK = 6
ALL, SOME = (0, 1, 2, 3), (1, 2, 3)  # groups of one layer each


class World(StagedStepper):
    """A runner on a simulated device. Steps are launched; who needs their results waits for them."""

    def __init__(self, folder: Path, eager: Collection[str], num_slots: int = 2) -> None:
        runner, self.sampler = staged_runner(folder, ring=StagingConfig(num_groups=num_slots, num_blocks=16))
        assert isinstance(runner.model, Model)
        super().__init__(runner)
        self.device = Device(eager)
        runner.close()
        assert runner.staging is not None
        runner.staging = StreamStaging(runner.staging.tiers, self.device.staging)
        for cache in (runner.kv_cache, self.host_cache):  # the rate of fetches was measured
            cache.tensor.fill_(torch.nan)
        runner.model = QueuedModel(runner.model, self.device)  # type: ignore[assignment]
        self.launched: list[PendingOutput] = []

    def place_new(self, prompt: list[int], host_groups: Collection[int]) -> Sequence:
        return self.place(self.add(prompt, str(len(prompt))), host_groups)

    def launch(
        self,
        seqs: list[Sequence],
        copies: tuple[BlockCopy, ...] = (),
        chunk: int = CHUNK,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """The next tokens of each, as far as they are known. What is sampled is taken in; for nothing else it waits."""
        plan = StepPlan(tuple(ScheduledSequence(seq, min(chunk, seq.num_uncomputed)) for seq in seqs), copies)
        for item in plan.items:
            self.reserve(item.seq, item.seq.num_computed + item.num_tokens)
        pending = self.runner.run(self.runner.prepare(plan), on_layer)
        for item in plan.items:
            item.seq.num_computed += item.num_tokens
        for index, token in zip(pending.sampling_items, pending.tokens.finish(), strict=True):
            assert token is not None
            plan.items[index].seq.output_token_ids.append(token.token_id)
        self.launched.append(pending)

    def finish(self) -> None:
        """Wait for what the steps have left to be waited for."""
        for pending in self.launched:
            pending.output()
        self.launched.clear()

    def decode(self, *seqs: Sequence) -> list[list[int]]:
        while unfinished := [seq for seq in seqs if len(seq.output_token_ids) < NUM_TOKENS]:
            self.launch(unfinished)
        self.finish()
        return [seq.output_token_ids for seq in seqs]


# --- what is done, and what must come of it ---

Scenario = Callable[[World], dict[int, list[int]]]
"""The tokens that came of some of the prompts, by the prompt's number."""


def prompts_in_chunks(world: World) -> dict[int, list[int]]:
    """Each chunk reads what the one before it wrote back; slots are used again within a step and in the next one."""
    seqs = [world.place_new(PROMPTS[0], ALL), world.place_new(PROMPTS[1], SOME), world.place_new(PROMPTS[2], ())]
    return dict(enumerate(world.decode(*seqs)))


def a_prefix_is_brought_and_used(world: World) -> dict[int, list[int]]:
    """Into blocks that a prompt which nobody waits for any more still computes in."""
    seq = world.place_new(PROMPTS[0], ALL)
    world.launch([seq])
    world.launch([seq])
    world.finish()
    left = world.place_new(PROMPTS[2], ())
    world.launch([left])
    assert left.lease is not None
    world.pool.release(left.lease)
    held = world.pool.lease(world.pool.num_available - 4 * 3)  # what that one had are the next ones to be given
    copies = tuple(world.to_device(seq, group) for group in (3, 0, 2, 1))
    world.pool.release(held)
    for copy in copies:
        world.moved(seq, copy)
    world.launch([seq], copies)
    world.finish()
    for copy in copies:
        world.give_back(seq, copy)
    return {0: world.decode(seq)[0]}


def a_prefix_is_brought_for_later(world: World) -> dict[int, list[int]]:
    """In a step that computes nothing."""
    seq = world.place_new(PROMPTS[0], ALL)
    world.launch([seq])
    copies = tuple(world.to_device(seq, group) for group in ALL)
    world.launch([], copies)
    for copy in copies:
        world.moved(seq, copy)
    world.launch([seq])
    world.finish()
    for copy in copies:
        world.give_back(seq, copy)
    return {0: world.decode(seq)[0]}


def a_sequence_is_moved_to_the_host(world: World) -> dict[int, list[int]]:
    """While what was computed last of it still computes, beside another one that is staged, and with nothing beside."""
    seq, other = world.place_new(PROMPTS[0], (0,)), world.place_new(PROMPTS[1], ALL)
    world.launch([seq])
    for beside, group in (([other], 1), ([], 3)):
        copy = world.to_host(seq, group)
        world.launch(beside, (copy,))
        world.finish()
        world.moved(seq, copy)
        world.give_back(seq, copy)
    first, second = world.decode(seq, other)
    return {0: first, 1: second}


def layers_are_told_and_read(world: World) -> dict[int, list[int]]:
    """Behind the event that is recorded where a layer is told, its KV stands where it rests, now and at the end."""
    seq = world.place_new(PROMPTS[0], SOME)
    told: list[int] = []
    seen: list[torch.Tensor] = []

    def read(layer: int) -> torch.Tensor:
        cache, table = (world.host_cache, seq.host_table) if layer in SOME else (world.runner.kv_cache, seq.block_table)
        slab = torch.empty(2, CHUNK, cache.layout.num_kv_heads, cache.layout.head_dim)
        assert table is not None
        cache.read_layer(layer, table.view[layer], 0, CHUNK, slab)
        return slab

    def on_layer(layer: int) -> None:
        told.append(layer)
        world.device.current.record().force()
        seen.append(read(layer))

    world.launch([seq], on_layer=on_layer)
    world.finish()
    assert told == list(ALL), "in the order of the layers"
    world.device.compute.record().force()
    kept = all(torch.equal(slab, read(layer)) for layer, slab in enumerate(seen))
    tokens = world.decode(seq)[0]
    return {0: tokens if kept and not torch.stack(seen).isnan().any() else []}


SCENARIOS: list[Scenario] = [
    prompts_in_chunks,
    a_prefix_is_brought_and_used,
    a_prefix_is_brought_for_later,
    a_sequence_is_moved_to_the_host,
    layers_are_told_and_read,
]
