"""Sequences whose layers rest partly in host memory compute what they would compute on the device, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.kv.cache
from engine.kv.cache import GroupRow, KVCache, copy_blocks
from engine.offload.staging import StagedStep, ThreadStaging
from engine.offload.staging_plan import StagingConfig
from engine.sequence import ScheduledSequence, Sequence, StepPlan
from engine.text.tokenizer import Tokenizer
from tests.support.exactness import FACTS, STORY, count_near_ties, hf_reference
from tests.support.model_families import build_oracle
from tests.support.small_models import random_prompts
from tests.support.staged_stepping import StagedStepper, staged_runner
from tests.support.stepping import Stepper, recording_runner
from tests.support.waiting import HANGS_S, wait_until

NUM_GROUPS = 4  # the small models have as many layers
PLACEMENTS: dict[str, tuple[int, ...]] = {"none": (), "first half": (0, 1), "interleaved": (1, 3), "all": (0, 1, 2, 3)}
PROMPTS = random_prompts((21, 1, 34, 8), seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in ("llama", "mistral", "gemma3")}
    for family, folder in folders.items():
        build_oracle(family, folder)
    return folders


@pytest.fixture
def stepper(folders: dict[str, Path]) -> Iterator[StagedStepper]:
    runner, _ = staged_runner(folders["llama"], ring=StagingConfig(num_groups=2, num_blocks=32))
    yield StagedStepper(runner)
    runner.close()


def slow_copies(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> list[float]:
    """Each copy takes so much longer; the list gets the time at which each ended."""
    ends: list[float] = []

    def slow(source: KVCache, sources: GroupRow, target: KVCache, targets: GroupRow) -> None:
        time.sleep(delay_s)
        copy_blocks(source, sources, target, targets)
        ends.append(time.perf_counter())

    monkeypatch.setattr(engine.kv.cache, "copy_blocks", slow)
    return ends


def plain_tokens(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    plain = Stepper(recording_runner(folder, layers_per_group=1)[0])
    return plain.generate(plain.add(prompt), num_tokens)


def staged(stepper: StagedStepper, prompt: list[int], host_groups: Collection[int], name: str = "") -> Sequence:
    return stepper.place(stepper.add(prompt, name), host_groups)


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("num_slots", [1, 2, NUM_GROUPS])
def test_logits_are_those_of_the_device_alone(folders: dict[str, Path], family: str, num_slots: int) -> None:
    """Mixed batches in random chunks: sequences on the device, on the host, and in parts on both."""
    plain_runner, expected = recording_runner(folders[family], layers_per_group=1)
    runner, sampler = staged_runner(folders[family], ring=StagingConfig(num_groups=num_slots, num_blocks=64))
    plain, ours = Stepper(plain_runner, seed=5), StagedStepper(runner, seed=5)
    prompts = dict(zip(PLACEMENTS, PROMPTS, strict=True))
    plain_seqs = [plain.add(prompt, name) for name, prompt in prompts.items()]
    plain.random.seed(7)
    plain.generate_mixed(plain_seqs, 9)
    seqs = [staged(ours, prompt, PLACEMENTS[name], name) for name, prompt in prompts.items()]
    ours.random.seed(7)
    ours.generate_mixed(seqs, 9)
    runner.close()
    for name in prompts:
        assert torch.equal(torch.stack(sampler.sampled[name]), torch.stack(expected.sampled[name])), name
    assert [s.output_token_ids for s in seqs] == [s.output_token_ids for s in plain_seqs]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    host_groups=st.lists(st.frozensets(st.integers(0, 1)), min_size=3, max_size=3),
    num_slots=st.integers(1, 2),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_placement_computes_the_same(
    folders: dict[str, Path], host_groups: list[frozenset[int]], num_slots: int, chunk: int, seed: int
) -> None:
    """With groups of three layers, so that the last one is not full."""
    prompts = random_prompts((5, 13, 9), seed=seed)
    plain = Stepper(recording_runner(folders["llama"], layers_per_group=3, num_blocks=80)[0], seed)
    ring = StagingConfig(num_groups=num_slots, num_blocks=16)
    runner, _ = staged_runner(folders["llama"], ring=ring, layers_per_group=3, num_blocks=80)
    ours = StagedStepper(runner, seed)
    expected, seqs = [plain.add(prompt) for prompt in prompts], [ours.add(prompt) for prompt in prompts]
    for seq, groups in zip(seqs, host_groups, strict=True):
        ours.place(seq, groups)
    for _ in range(8):
        for driver, driven in ((plain, expected), (ours, seqs)):
            driver.step([(seq, min(chunk, seq.num_uncomputed)) for seq in driven])
    runner.close()
    assert [seq.output_token_ids for seq in seqs] == [seq.output_token_ids for seq in expected]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_are_hugging_faces(folders: dict[str, Path], family: str) -> None:
    runner, _ = staged_runner(folders[family], ring=StagingConfig(num_groups=2, num_blocks=32))
    ours = StagedStepper(runner)
    tokens = [
        ours.generate(staged(ours, prompt, PLACEMENTS["interleaved"]), 12, chunk=5)
        for prompt in (PROMPTS[0], PROMPTS[2])
    ]
    runner.close()
    for prompt, generated in zip((PROMPTS[0], PROMPTS[2]), tokens, strict=True):
        assert not count_near_ties([generated], hf_reference(folders[family], [prompt], 12))


def test_real_weights(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    prompts = [tokenizer.encode(text) for text in (STORY * 2, FACTS[0], FACTS[2])]
    runner, _ = staged_runner(
        smollm2_folder, ring=StagingConfig(num_groups=2, num_blocks=24), layers_per_group=3, block_size=16
    )
    ours = StagedStepper(runner)
    seqs = [staged(ours, prompt, groups) for prompt, groups in zip(prompts, (range(10), (), (1, 3, 9)), strict=True)]
    ours.generate_mixed(seqs, 8)
    runner.close()
    references = hf_reference(smollm2_folder, prompts, 8)
    assert not count_near_ties([seq.output_token_ids[:8] for seq in seqs], references)


# --- copies of a step ------------------------------------------------------------------------------------------------


def test_what_a_step_brings_to_the_device_is_used_in_it(stepper: StagedStepper, folders: dict[str, Path]) -> None:
    seq = staged(stepper, PROMPTS[0], PLACEMENTS["all"])
    stepper.generate(seq, 3)
    for groups in ((2, 0), (1,), (3,)):
        copies = tuple(stepper.to_device(seq, group) for group in groups)
        for copy in copies:
            stepper.moved(seq, copy)
        for copy in copies:  # what the step must read is not there before it
            assert stepper.runner.kv_cache.tensor[copy.destination.tolist()].isnan().all()
        stepper.step([(seq, 1)], copies)
        for copy in copies:
            stepper.give_back(seq, copy)
    assert not seq.host_groups
    assert stepper.generate(seq, 10) == plain_tokens(folders["llama"], PROMPTS[0], 10)


def test_a_sequence_goes_on_after_it_was_moved_to_the_host(stepper: StagedStepper, folders: dict[str, Path]) -> None:
    seq, other = staged(stepper, PROMPTS[0], (0,)), staged(stepper, PROMPTS[3], (1,))
    stepper.generate(seq, 3)
    copies = tuple(stepper.to_host(seq, group) for group in (1, 3))
    stepper.step([(other, 8)], copies)
    for copy in copies:
        stepper.moved(seq, copy)
        stepper.give_back(seq, copy)
    assert seq.host_groups == {0, 1, 3}
    assert stepper.generate(seq, 10) == plain_tokens(folders["llama"], PROMPTS[0], 10)
    assert stepper.generate(other, 5) == plain_tokens(folders["llama"], PROMPTS[3], 5)


def test_a_plan_of_copies_alone(stepper: StagedStepper) -> None:
    seq = staged(stepper, PROMPTS[0], ())
    stepper.generate(seq, 1)
    copy = stepper.to_host(seq, 2)
    assert stepper.step([], (copy,)) == []
    assert torch.equal(
        stepper.host_cache.tensor[copy.destination.tolist()].nan_to_num(7),
        stepper.runner.kv_cache.tensor[copy.source.tolist()].nan_to_num(7),
    )


# --- who waits for whom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_slow_copies_change_no_token(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, num_slots: int) -> None:
    runner, _ = staged_runner(folders["llama"], ring=StagingConfig(num_groups=num_slots, num_blocks=16))
    ours = StagedStepper(runner)
    ends = slow_copies(monkeypatch, 0.004)
    tokens = ours.generate(staged(ours, PROMPTS[0], PLACEMENTS["all"]), 6, chunk=8)
    assert len(ends) == 2 * NUM_GROUPS * 8, "a fetch and a write-back for each group and step"
    assert tokens == plain_tokens(folders["llama"], PROMPTS[0], 6)
    assert runner.transfer_stats is not None
    assert runner.transfer_stats.exposed_s > 0.004, "every step ends with a write-back that nothing computes beside"
    runner.close()


def test_a_group_is_fetched_while_the_one_before_it_computes(
    stepper: StagedStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's computation lasts until the second group's fetch has ended."""
    seq = staged(stepper, PROMPTS[0], PLACEMENTS["all"])
    stepper.generate(seq, 1)
    second_fetched = threading.Event()
    staging = stepper.runner.staging
    assert isinstance(staging, ThreadStaging)
    fetch, attend, met = staging.fetch_group, stepper.runner.model._attend, []  # type: ignore[union-attr]

    def watched_fetch(staging_plan: object, group: int) -> None:
        fetch(staging_plan, group)  # type: ignore[arg-type]
        if group == 1:
            second_fetched.set()

    def lasting_attend(*args: object) -> torch.Tensor:
        met.append(second_fetched.wait(HANGS_S))
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(staging, "fetch_group", watched_fetch)
    monkeypatch.setattr(stepper.runner.model, "_attend", lasting_attend)
    stepper.step([(seq, 1)])
    assert met == [True] * NUM_GROUPS


def test_a_step_that_fails_leaves_no_copy_behind(
    stepper: StagedStepper, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    seq, moving = staged(stepper, PROMPTS[0], PLACEMENTS["all"]), staged(stepper, PROMPTS[2], ())
    stepper.generate(seq, 1)
    stepper.generate(moving, 1)
    staging, jobs, ends, may_begin = stepper.runner.staging, list[Future[None]](), list[float](), threading.Event()
    assert isinstance(staging, ThreadStaging)
    submit, before_store = staging.submit, StagedStep.before_store
    staging.submit(-2, lambda: wait_until(may_begin.is_set))  # or the copy that comes last may begin first

    def noted(urgency: int, job: Callable[[], None]) -> Future[None]:
        jobs.append(submit(urgency, job))
        return jobs[-1]

    def begin(step: StagedStep, layer: int) -> None:
        may_begin.set()
        before_store(step, layer)

    def slow(source: KVCache, sources: GroupRow, target: KVCache, targets: GroupRow) -> None:
        if ends:  # this one is under way when the step fails
            wait_until(jobs[0].cancelled)
            time.sleep(0.05)
        copy_blocks(source, sources, target, targets)
        ends.append(time.perf_counter())

    with monkeypatch.context() as patched:
        patched.setattr(engine.kv.cache, "copy_blocks", slow)
        patched.setattr(staging, "submit", noted)
        patched.setattr(StagedStep, "before_store", begin)

        def fail(*args: object) -> torch.Tensor:
            raise RuntimeError("out of luck")

        patched.setattr(stepper.runner.model, "_attend", fail)
        stepper.reserve(seq, seq.num_tokens)
        copy = stepper.to_host(moving, 3)
        with pytest.raises(RuntimeError, match="out of luck"):
            stepper.runner.execute(StepPlan((ScheduledSequence(seq, 1),), (copy,)))
        failed_at = time.perf_counter()
        time.sleep(0.2)  # a copy left behind would end in this time
        assert len(ends) == 2
        assert all(end < failed_at for end in ends)
        assert stepper.host_cache.tensor[copy.destination.tolist()].isnan().all(), "the last copy had not begun"
    assert stepper.generate(seq, 5) == plain_tokens(folders["llama"], PROMPTS[0], 5)


@pytest.mark.parametrize("failing", ["fetch", "write-back"])
def test_a_copy_that_fails_fails_the_step(
    stepper: StagedStepper, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    seq = staged(stepper, PROMPTS[0], (3,))
    stepper.generate(seq, 1)

    def fail(source: KVCache, sources: GroupRow, target: KVCache, targets: GroupRow) -> None:
        if (target is stepper.host_cache) == (failing == "write-back"):
            raise OSError("the mapping is gone")
        copy_blocks(source, sources, target, targets)

    with monkeypatch.context() as patched:
        patched.setattr(engine.kv.cache, "copy_blocks", fail)
        with pytest.raises(OSError, match="the mapping is gone"):
            stepper.step([(seq, 1)])
    assert stepper.step([(seq, 1)]) != [None]


def test_a_step_that_needs_more_of_the_ring_than_there_is_is_refused(stepper: StagedStepper) -> None:
    seqs = [staged(stepper, PROMPTS[2], (0,)), staged(stepper, PROMPTS[2] * 3, (1,))]
    with pytest.raises(ValueError, match="need 35 block columns, and the staging ring has 32"):
        stepper.step([(seq, seq.num_tokens) for seq in seqs])


def test_without_a_ring_blocks_can_be_copied_and_nothing_staged(folders: dict[str, Path]) -> None:
    runner, _ = staged_runner(folders["llama"], ring=None)
    stepper = StagedStepper(runner)
    seq = staged(stepper, PROMPTS[0], ())
    stepper.generate(seq, 2)
    copy = stepper.to_host(seq, 2)
    stepper.step([], (copy,))
    stepper.moved(seq, copy)
    stepper.give_back(seq, copy)
    with pytest.raises(ValueError, match="the staging ring has 0"):
        stepper.step([(seq, 1)])
    back = stepper.to_device(seq, 2)
    stepper.moved(seq, back)
    stepper.step([(seq, 1)], (back,))
    assert stepper.generate(seq, 6) == plain_tokens(folders["llama"], PROMPTS[0], 6)
    runner.close()


# --- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_groups", [(), (0,), (1,), (0, 1)])
def test_on_layer_comes_when_the_kv_stands_where_it_rests(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, host_groups: tuple[int, ...]
) -> None:
    ring = StagingConfig(num_groups=1, num_blocks=16)
    runner, _ = staged_runner(folders["llama"], ring=ring, layers_per_group=3)
    stepper = StagedStepper(runner)
    seq = staged(stepper, PROMPTS[0], host_groups)
    stepper.step([(seq, 6)])
    slow_copies(monkeypatch, 0.01)
    seen: dict[int, torch.Tensor] = {}

    def kv_of(layer: int) -> torch.Tensor:
        group = layer // 3
        cache, table = (
            (stepper.host_cache, seq.host_table) if group in host_groups else (stepper.runner.kv_cache, seq.block_table)
        )
        assert table is not None
        layout = cache.layout
        slab = torch.empty(2, 13, layout.num_kv_heads, layout.head_dim)
        cache.read_layer(layer, table.view[group], 0, 13, slab)
        return slab

    stepper.reserve(seq, 13)
    plan = StepPlan((ScheduledSequence(seq, 7),))
    runner.execute(plan, on_layer=lambda layer: seen.update({layer: kv_of(layer)}))
    runner.close()
    assert list(seen) == [0, 1, 2, 3]
    for layer, slab in seen.items():
        assert not slab.isnan().any()
        assert torch.equal(slab, kv_of(layer))


def test_bytes_are_counted_and_windows_spare_some(folders: dict[str, Path]) -> None:
    """Gemma's third layer sees all 34 tokens, in 9 blocks; the others 7 tokens, in 2 or 3."""
    runner, _ = staged_runner(folders["gemma3"], ring=StagingConfig(num_groups=2, num_blocks=16))
    stepper = StagedStepper(runner)
    seq = staged(stepper, PROMPTS[2], PLACEMENTS["all"])
    stats, block_bytes = runner.transfer_stats, runner.kv_cache.layout.block_bytes
    assert stats is not None
    assert stats.host_bytes_per_s > 0
    stepper.generate(seq, 1)
    assert (stats.fetched_bytes, stats.written_bytes) == (0, NUM_GROUPS * 9 * block_bytes)
    stepper.step([(seq, 1)])  # the query at position 34 sees tokens 28 to 34
    assert stats.fetched_bytes == (9 + 3 * 2) * block_bytes
    assert stats.written_bytes == NUM_GROUPS * 10 * block_bytes
    assert stats.fetch_s > 0
    assert stats.write_s > 0
    runner.close()


def test_runs_and_scattered_blocks_are_copied_pairwise(stepper: StagedStepper) -> None:
    source, target = stepper.runner.kv_cache, stepper.host_cache
    source.tensor.copy_(torch.arange(source.num_blocks).view(-1, 1, 1, 1, 1, 1).expand_as(source.tensor))
    sources = np.array([7, 3, 599, 0, 12, 13], dtype=np.int32)
    targets = np.array([20, 21, 22, 5, 9, 4], dtype=np.int32)
    copy_blocks(source, sources, target, targets)
    assert target.tensor[targets.tolist(), 0, 0, 0, 0, 0].tolist() == sources.tolist()
    assert int((~target.tensor[:, 0, 0, 0, 0, 0].isnan()).sum()) == len(targets)


def test_closing_ends_the_thread(folders: dict[str, Path]) -> None:
    def copy_threads() -> int:
        return sum(thread.name == "kv-copies" for thread in threading.enumerate())

    before = copy_threads()
    runner, _ = staged_runner(folders["llama"], ring=None)
    assert copy_threads() == before + 1
    runner.close()
    assert copy_threads() == before
