"""Recorded decode steps: tokens and logits are those of steps that are launched anew, whoever shares the batch.

On a CUDA device these are graphs; elsewhere the recorded calls are made again, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.config.build import engine_config
from cluster.config.settings import LegatoConfig
from engine.model.config import ModelConfig
from engine.sequence import ScheduledSequence, StepPlan
from engine.sequence import Sequence as Seq
from engine.steps.decode_graphs import DecodeGraphLimits, Record, Replay, call_again, record_for
from engine.steps.loading import EngineConfig, decode_graph_limits
from engine.steps.memory_profile import StepSize
from engine.steps.runner import ModelRunner
from kernels import reference
from kernels.cpu import kernels as cpu
from kernels.interface import CacheGeometry, GraphAttentionLimits, GraphKernels, PagedAttention, Segment
from kernels.triton.attention.paged import DecodeBuffers
from kernels.triton.kernels import GpuKernels
from tests.interpreted.gpu_stepping import SMALL_VOCABULARY, stepper_on
from tests.support.interpreted import device
from tests.support.model_families import build_oracle
from tests.support.small_models import runner_of
from tests.support.stepping import GREEDY_WITH_ECHO, RecordingSampler, Stepper
from tests.support.thoroughness import in_test_long

LIMITS = DecodeGraphLimits(num_seqs=8, context_tokens=256)
FEW = DecodeGraphLimits(num_seqs=3, context_tokens=64)
TWO = DecodeGraphLimits(num_seqs=2, context_tokens=64)


@dataclass
class CountingRecorder:
    """Tells which sizes were replayed, in order."""

    device_record: Record
    replayed: list[int] = field(default_factory=list)

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        replay = self.device_record(compute)

        def counted() -> Tensor:
            result = replay()
            self.replayed.append(len(result))
            return result

        return counted


@dataclass(frozen=True)
class PoisonedAttention:
    """Before each step, all that an earlier one left in the buffers is spoilt."""

    attention: DecodeBuffers

    @property
    def most_queries(self) -> int:
        return self.attention.most_queries

    def fill(self, segments: Sequence[Segment], num_queries: int) -> None:
        work = self.attention.work
        for words in work.lists.values():
            words.fill_(1 << 30)
        work.partials.sums.fill_(torch.nan)
        work.partials.stats.fill_(torch.nan)
        self.attention.fill(segments, num_queries)

    def of(self, num_segments: int, num_queries: int) -> PagedAttention:
        return self.attention.of(num_segments, num_queries)


@dataclass(frozen=True, slots=True)
class PoisoningKernels(GpuKernels):
    def graph_attention(
        self,
        geometry: CacheGeometry,
        limits: GraphAttentionLimits,
        *,
        num_heads: int,
        window: int | None,
        softcapped: bool,
        dtype: torch.dtype,
    ) -> PoisonedAttention:
        attention = GpuKernels.graph_attention(
            self, geometry, limits, num_heads=num_heads, window=window, softcapped=softcapped, dtype=dtype
        )
        assert isinstance(attention, DecodeBuffers)
        return PoisonedAttention(attention)


@torch.inference_mode()
def spoil_inputs(runner: ModelRunner) -> None:
    """Tokens and positions that no model has, and slots that are somebody's."""
    graphs = runner.graphs
    assert graphs is not None
    graphs.inputs[:2] = 1 << 40
    graphs.inputs[2:] = 0


def replaying_stepper(
    folder: Path, limits: DecodeGraphLimits = LIMITS, *, batch_invariant: bool = False
) -> tuple[Stepper, RecordingSampler, CountingRecorder]:
    kernels = PoisoningKernels(device(), batch_invariant=batch_invariant)
    driver, sampler = stepper_on(kernels, folder)
    recorder = CountingRecorder(record_for(device()))
    driver.runner.record_decode(kernels, limits, recorder.record)
    return driver, sampler, recorder


def prompts(count: int) -> list[list[int]]:
    """Of 1, 3, 5, .. tokens."""
    most = SMALL_VOCABULARY - 3
    return [[3 + (7 * index + step) % most for step in range(1 + 2 * index)] for index in range(count)]


def decode(driver: Stepper, seqs: list[Seq]) -> None:
    if driver.runner.graphs is not None:
        spoil_inputs(driver.runner)
    driver.step([(seq, 1) for seq in seqs])


def comings_and_goings(driver: Stepper) -> list[Seq]:
    """Batches of 8, 5, 3 and 1 rows, of others each time, with a prompt's chunk among them once."""
    seqs = [driver.add(prompt, str(index)) for index, prompt in enumerate(prompts(8))]
    driver.step([(seq, seq.num_uncomputed) for seq in seqs])
    decode(driver, seqs)
    decode(driver, [seqs[index] for index in (7, 0, 3, 2, 5)])
    decode(driver, [seqs[index] for index in (1, 6, 2)])
    late = driver.add(prompts(4)[3], "late")
    driver.step([(late, 5), (seqs[4], 1)])
    decode(driver, [seqs[4]])
    driver.step([(late, late.num_uncomputed)])
    decode(driver, [late, *seqs[2:6]])
    return [*seqs, late]


def check_alike(actual: RecordingSampler, expected: RecordingSampler) -> None:
    assert actual.sampled.keys() == expected.sampled.keys()
    for request_id, logits in expected.sampled.items():
        torch.testing.assert_close(torch.stack(actual.sampled[request_id]), torch.stack(logits), rtol=0, atol=1e-4)


LONG = ("llama-tied-biased-llama3", "mixtral", "deepseek-v3")


@pytest.mark.parametrize("family", ["qwen2-windowed", *in_test_long(*LONG)])
def test_replayed_steps_generate_what_others_do(family: str, tmp_path: Path) -> None:
    build_oracle(family, tmp_path)
    plain, plain_sampler = stepper_on(reference, tmp_path)
    replaying, sampler, recorder = replaying_stepper(tmp_path)
    expected, actual = comings_and_goings(plain), comings_and_goings(replaying)
    assert [seq.output_token_ids for seq in actual] == [seq.output_token_ids for seq in expected]
    check_alike(sampler, plain_sampler)
    assert recorder.replayed == [8, 8, 4, 1, 2, 8]  # 2: the rest of a prompt, two rows of one sequence


def test_a_batch_invariant_step_is_the_same_to_the_bit(tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    anew = stepper_on(GpuKernels(device(), batch_invariant=True), tmp_path)
    replaying, sampler_of_replayed, recorder = replaying_stepper(tmp_path, TWO, batch_invariant=True)
    logits = []
    for driver, sampler in (anew, (replaying, sampler_of_replayed)):
        seqs = [driver.add([5 + index], str(index)) for index in range(2)]
        driver.step([(seq, 1) for seq in seqs])
        logits.append(torch.stack([row for rows in sampler.sampled.values() for row in rows]))
    assert torch.equal(*logits)
    assert recorder.replayed == [2]


@pytest.mark.parametrize("num_drafts", [1, *in_test_long(4, 8)])
def test_rows_with_drafts_are_those_of_single_steps_to_the_bit(num_drafts: int, tmp_path: Path) -> None:
    """Right drafts, beside a sequence without any."""
    build_oracle("llama-tied-biased-llama3", tmp_path)
    single, of_single = stepper_on(GpuKernels(device(), batch_invariant=True), tmp_path)
    limits = DecodeGraphLimits(num_seqs=2 * (num_drafts + 1), context_tokens=40 * (num_drafts + 1))
    drafting, of_drafted, recorder = replaying_stepper(tmp_path, limits, batch_invariant=True)
    long = prompts(4)[-1]
    tokens = single.generate(single.add(long, "long"), num_drafts + 2)
    single.generate(single.add([5, 6], "short"), 2)
    seq, other = drafting.add(long, "long"), drafting.add([5, 6], "short")
    drafting.step([(seq, len(long))])
    drafting.step([(other, 2)])
    recorder.replayed.clear()
    spoil_inputs(drafting.runner)
    plan = StepPlan((ScheduledSequence(seq, 1, tuple(tokens[1:-1])), ScheduledSequence(other, 1)))
    for item in plan.items:
        drafting.reserve(item.seq, item.stop)
    drafting.runner.execute(plan)
    assert len(recorder.replayed) == 1
    for request_id in ("long", "short"):
        expected, actual = torch.stack(of_single.sampled[request_id]), torch.stack(of_drafted.sampled[request_id])
        assert torch.equal(actual, expected)


def test_what_pads_a_step_writes_nothing(tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    driver, _, recorder = replaying_stepper(tmp_path, DecodeGraphLimits(num_seqs=4, context_tokens=64))
    seqs = [driver.add(prompts(2)[1], str(index)) for index in range(3)]
    driver.step([(seq, seq.num_uncomputed) for seq in seqs])
    cache = driver.runner.kv_cache.tensor
    cached = cache.isfinite().sum()
    decode(driver, seqs)
    assert recorder.replayed == [4]
    layout = driver.layout
    stored = 3 * layout.num_layers * layout.bytes_per_token_layer // layout.dtype.itemsize
    assert cache.isfinite().sum() - cached == stored


def test_rows_that_do_not_sample_and_prompts_that_are_judged(tmp_path: Path) -> None:
    """A prompt's chunk of one token is a row like those of decode."""
    build_oracle("llama-tied-biased-llama3", tmp_path)
    replaying, sampler_of_replayed, recorder = replaying_stepper(tmp_path, FEW)
    judged = []
    for driver, sampler in (stepper_on(reference, tmp_path), (replaying, sampler_of_replayed)):
        echoing = driver.add(prompts(3)[2], "echoing", GREEDY_WITH_ECHO)
        silent, decoding = driver.add(prompts(3)[1], "silent"), driver.add(prompts(1)[0], "decoding")
        for _ in range(2):
            assert driver.step([(decoding, 1), (silent, 1), (echoing, 1)])[1:] == [None, None]
        driver.step([(silent, 1)])
        judged.append((decoding.output_token_ids, torch.cat(sampler.judged)))
    assert recorder.replayed == [3, 3, 1]
    (expected_tokens, expected), (tokens, actual) = judged
    assert tokens == expected_tokens
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_steps_beyond_the_limits_and_with_hooks_are_computed_as_before(tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    driver, _, recorder = replaying_stepper(tmp_path, DecodeGraphLimits(num_seqs=2, context_tokens=12))
    seqs = [driver.add([5, 6, 7], str(index)) for index in range(3)]
    driver.step([(seq, 3) for seq in seqs])
    driver.step([(seq, 1) for seq in seqs])  # three rows
    long = driver.add(list(range(3, 11)), "long")
    driver.step([(long, 8)])
    driver.step([(long, 1), (seqs[0], 1)])  # contexts of 9 and 5 tokens
    told: list[int] = []
    plan = StepPlan((ScheduledSequence(seqs[1], 1),))
    driver.reserve(seqs[1], seqs[1].num_computed + 1)
    driver.runner.execute(plan, told.append)
    assert told == list(range(driver.runner.config.num_layers))
    assert recorder.replayed == []
    driver.step([(seqs[1], 1), (seqs[2], 1)])
    assert recorder.replayed == [2]


def test_tokens_that_the_step_before_sampled_are_replayed_with(tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    driver, _, recorder = replaying_stepper(tmp_path, FEW)
    runner = driver.runner
    seq = driver.add(prompts(2)[1], "ahead")
    first = driver.step([(seq, seq.num_uncomputed)])[0]
    assert first is not None
    driver.reserve(seq, seq.num_computed + 2)
    one = runner.prepare(StepPlan((ScheduledSequence(seq, 1),)))
    second = runner.run(one).output().sampled[0]
    seq.num_computed, seq.num_awaited = seq.num_computed + 1, 1
    two = runner.prepare(StepPlan((ScheduledSequence(seq, 1),)), after=one)
    assert two.batch is not None
    assert len(two.batch.awaited_rows)
    third = runner.run(two).output().sampled[0]
    assert second is not None and third is not None
    assert recorder.replayed == [1, 1]
    plain, _ = stepper_on(reference, tmp_path)
    tokens = plain.generate(plain.add(prompts(2)[1], "plain"), 3)
    assert [first.token_id, second.token_id, third.token_id] == tokens


@pytest.mark.parametrize(
    ("num_seqs", "sizes"),
    [
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (32, [1, 2, 4, 8, 16, 32]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (130, [1, 2, 4, 8, 16, 32, 64, 96, 128, 130]),
    ],
)
def test_sizes(num_seqs: int, sizes: list[int]) -> None:
    assert DecodeGraphLimits.of(num_seqs, 1024).sizes() == sizes


def test_context_is_bounded() -> None:
    assert DecodeGraphLimits.of(4, 1024).context_tokens == 4096
    assert DecodeGraphLimits.of(64, 131_072).context_tokens == 1 << 19


def test_they_are_sized_by_the_length_that_a_worker_serves(tmp_path: Path) -> None:
    """And not by what a worker could be told to serve, which attention's lists would be sized for in vain."""
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    build_oracle("qwen2", tmp_path, max_position_embeddings=64, rope_parameters=rope)
    config = ModelConfig.from_folder(tmp_path)
    assert config.longest_context == 256
    step = StepSize(num_tokens=2, num_seqs=2)
    for wanted, served in ((None, 64), (40, 40), (256, 256)):
        engine = EngineConfig(model_ref="m", model_name="m", max_model_len=wanted, largest_step=step)
        assert decode_graph_limits(engine, config).context_tokens == 2 * served


def test_a_call_is_recorded_with_its_result_in_one_place() -> None:
    x = torch.zeros(2)
    replay = call_again(lambda: x + 1)
    x += 4
    result = replay()
    assert result.tolist() == [5, 5]
    x += 1
    assert replay().data_ptr() == result.data_ptr()
    assert result.tolist() == [6, 6]


def test_a_cpu_records_nothing(tmp_path: Path) -> None:
    build_oracle("llama-tied-biased-llama3", tmp_path)
    assert isinstance(GpuKernels(device(), batch_invariant=False), GraphKernels)
    assert not isinstance(cpu, GraphKernels)
    runner = runner_of(tmp_path, kv_blocks=8, decode_graphs=True)
    assert runner.graphs is None


def test_the_setting_reaches_those_who_decode() -> None:
    assert engine_config("decode", LegatoConfig()).decode_graphs
    assert not engine_config("prefill", LegatoConfig()).decode_graphs
    flipping = LegatoConfig.model_validate({"scheduler": {"role_flips": True}})
    assert engine_config("prefill", flipping).decode_graphs
    off = LegatoConfig.model_validate(
        {"tuning": {"EngineConfig": {"decode_graphs": False}}, "scheduler": {"role_flips": True}}
    )
    assert not engine_config("decode", off).decode_graphs
    assert not engine_config("prefill", off).decode_graphs
