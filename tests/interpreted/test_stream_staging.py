"""Staging on a device's streams: the tokens of the device alone, however early or late each stream is.

And every order that the code asks for is needed: without any one of them, some schedule gives other tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.memory.streams import Event
from engine.offload import block_copier, stream_staging
from engine.offload.block_copier import BlockCopier, ListedPairs
from engine.offload.staging_plan import BlockPairs
from engine.offload.stream_staging import StreamedStep, StreamStaging
from kernels import reference
from tests.interpreted.device_schedules import SCHEDULES, SimulatedStream
from tests.interpreted.stream_world import ALL, NUM_TOKENS, PROMPTS, SCENARIOS, SOME, Scenario, World, prompts_in_chunks
from tests.support.stepping import Stepper, recording_runner


@pytest.fixture(autouse=True)
def blocks_are_copied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By lists that are there when the device has come to them, else by what lies there, within the caches.

    The kernel has tests of its own, and its interpreter takes milliseconds for each launch.
    """
    monkeypatch.setattr(
        "kernels.triton.block_copies.copy_blocks",
        lambda source, sources, target, targets: reference.copy_blocks(
            source, sources % len(source), target, targets % len(target)
        ),
    )
    monkeypatch.setattr(block_copier, "_STRETCH_BYTES", 1 << 40)


@pytest.fixture(scope="module")
def expected(llama_folder: Path) -> list[list[int]]:
    """The tokens of each prompt, with all on the device."""
    plain = Stepper(recording_runner(llama_folder, layers_per_group=1)[0])
    return [plain.generate(plain.add(prompt), NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("eager", SCHEDULES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_are_those_of_the_device_alone(
    llama_folder: Path, expected: list[list[int]], scenario: Scenario, eager: tuple[str, ...]
) -> None:
    for num_slots in (1, 2) if scenario is prompts_in_chunks else (2,):
        found = scenario(World(llama_folder, eager, num_slots))
        assert found == {number: expected[number] for number in found}


# --- who waits, and what is told ---


def test_who_launches_a_step_waits_for_nothing(llama_folder: Path) -> None:
    world = World(llama_folder, ())
    seq = world.place_new(PROMPTS[0], ALL)
    world.device.num_host_waits, done = 0, [stream.num_done for stream in world.device.streams]
    world.launch([seq])
    world.launch([seq])
    assert world.device.num_host_waits == 0
    assert [stream.num_done for stream in world.device.streams] == done, "the device has not begun"
    assert not world.launched[0].is_known, "another thread is to wait"
    world.finish()
    assert world.device.compute.queued, "for the end of the copies alone"
    assert not world.device.outward.queued


def test_bytes_and_waits_are_counted_when_they_are_over(llama_folder: Path) -> None:
    world = World(llama_folder, ())
    stats, block_bytes = world.runner.transfer_stats, world.layout.block_bytes
    assert stats is not None and stats.host_bytes_per_s > 0
    seq = world.place_new(PROMPTS[0], ALL)
    world.launch([seq])  # 6 tokens, in blocks of 4
    assert (stats.fetched_bytes, stats.written_bytes, stats.exposed_s) == (0, 0, 0)
    world.finish()
    assert (stats.fetched_bytes, stats.written_bytes) == (0, 4 * 2 * block_bytes)
    world.launch([seq])
    world.finish()
    assert stats.fetched_bytes == 4 * 2 * block_bytes
    assert stats.written_bytes == 4 * (2 + 2) * block_bytes
    assert stats.exposed_s == pytest.approx(8e-3), "a thousandth for each group and step, as the device tells time"
    assert [stats.fetch_s, stats.write_s] == pytest.approx([8e-3, 8e-3])


@pytest.mark.parametrize("failing", ["load", "save"])
@pytest.mark.parametrize("eager", [(), ("inward", "outward")])
def test_a_step_that_fails_leaves_nothing_under_way(
    llama_folder: Path, expected: list[list[int]], eager: tuple[str, ...], failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are anyone's as soon as it has failed; the others go on."""
    world = World(llama_folder, eager)
    seq, other = world.place_new(PROMPTS[0], ALL), world.place_new(PROMPTS[1], SOME)
    world.launch([other])
    world.launch([seq])
    assert isinstance(world.runner.staging, StreamStaging)
    queue, num_queued = SimulatedStream.queue, 0

    def fail_at_the_third(stream: SimulatedStream, work: Callable[[], object]) -> None:
        nonlocal num_queued
        num_queued += stream.name == {"load": "inward", "save": "outward"}[failing]
        if num_queued == 3:
            raise RuntimeError("the device is out of order")
        queue(stream, work)

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedStream, "queue", fail_at_the_third)
        with pytest.raises(RuntimeError, match="out of order"):
            world.launch([seq])
    assert world.device.is_idle
    assert seq.host_lease is not None
    world.host_cache.tensor[list(seq.host_lease.blocks)] = torch.nan
    assert world.decode(other) == [expected[1]]
    world.launch([again := world.place_new(PROMPTS[0], ALL)])
    assert world.decode(again) == [expected[0]]


def test_closing_waits_for_what_is_under_way(llama_folder: Path) -> None:
    world = World(llama_folder, ())
    world.launch([world.place_new(PROMPTS[0], ALL)])
    assert not world.device.is_idle
    world.runner.close()
    assert world.device.is_idle


# --- what is asked for is needed ---


def gives_other_tokens(llama_folder: Path, expected: list[list[int]]) -> bool:
    """In some schedule."""
    for scenario in SCENARIOS:
        for eager in SCHEDULES:
            found = scenario(World(llama_folder, eager))
            if found != {number: expected[number] for number in found}:
                return True
    return False


def orders() -> Iterator[tuple[str, int]]:
    """Each line of a step that makes one stream follow another."""
    lines, first = inspect.getsourcelines(stream_staging.StreamedStep)
    for number, line in enumerate(lines, first):
        if ".follow(" in line:
            yield line.strip(), number


@pytest.mark.parametrize(("line", "number"), list(orders()))
def test_every_order_is_needed(
    llama_folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, line: str, number: int
) -> None:
    follow = SimulatedStream.follow

    def follow_elsewhere(stream: SimulatedStream, event: Event) -> None:
        caller = sys._getframe(1)
        if (caller.f_code.co_filename, caller.f_lineno) != (stream_staging.__file__, number):
            follow(stream, event)

    monkeypatch.setattr(SimulatedStream, "follow", follow_elsewhere)
    assert gives_other_tokens(llama_folder, expected), f"without {line}"


@pytest.mark.parametrize("end", [0, 1])
def test_both_ends_are_waited_for(
    llama_folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    def wait_for_the_other(step: StreamedStep) -> None:
        step.ends[1 - end].wait()

    monkeypatch.setattr(StreamedStep, "wait", wait_for_the_other)
    assert gives_other_tokens(llama_folder, expected)


def test_lists_of_blocks_come_by_what_all_copies_follow(
    llama_folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = BlockCopier.listed

    def by_another_stream(copier: BlockCopier, lists: list[BlockPairs], queue: Any) -> list[ListedPairs]:
        return listed(copier, lists, queue.__self__.device.outward.queue)

    monkeypatch.setattr(BlockCopier, "listed", by_another_stream)
    assert gives_other_tokens(llama_folder, expected)


def test_layers_are_told_on_the_stream_that_they_rest_by(
    llama_folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedStream, "is_current", lambda stream: nullcontext())
    assert gives_other_tokens(llama_folder, expected)
