"""The engine on the GPU's kernels, on the GPU where there is one and in Triton's interpreter elsewhere.

Every family's greedy tokens are those of the plain kernels, through whole prompts, chunks, decode, prefixes of others,
and batches of all of these.
"""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config.build import engine_config
from cluster.config.settings import LegatoConfig
from engine.sequence import Sequence
from kernels import reference
from kernels.cpu import kernels as cpu
from kernels.ops import kernels_for
from kernels.triton.kernels import CublasLinear, GpuKernels
from kernels.triton.matmul import InvariantLinear
from tests.interpreted.gpu_stepping import prompts, stepper_on
from tests.support.interpreted import DTYPES, device
from tests.support.model_families import build_oracle
from tests.support.stepping import RecordingSampler, Stepper
from tests.support.thoroughness import in_test_long

# All that differ in kernels. What mistral and qwen3 have, gemma3 has too: windows, and norms of heads.
FAMILIES = (
    "llama-tied-biased-llama3",
    "qwen2-windowed",
    "gemma3",
    "qwen3-moe",
    "deepseek-v3",
    *in_test_long("deepseek-v2-grouped", "mistral", "qwen3", "mixtral", "qwen2-moe", "glm-4", "olmo-3"),
)


def after_prefix_of(donor: Sequence, num_columns: int, stepper: Stepper) -> Sequence:
    """A sequence that begins like `donor`, and so in the same blocks, of which it computes nothing."""
    num_tokens = num_columns * stepper.layout.block_size
    seq = stepper.add([*donor.prompt_token_ids[:num_tokens], 5, 7, 6], "prefixed")
    assert seq.block_table is not None
    assert donor.block_table is not None
    seq.block_table.append(donor.block_table.view[:, :num_columns].copy())
    seq.num_computed = num_tokens
    return seq


def check_alike(seqs: list[Sequence], sampler: RecordingSampler, twins: list[Sequence], twin: RecordingSampler) -> None:
    for seq, expected in zip(seqs, twins, strict=True):
        assert seq.output_token_ids == expected.output_token_ids
        actual = torch.stack(sampler.sampled[seq.request_id])
        torch.testing.assert_close(actual, torch.stack(twin.sampled[seq.request_id]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_generate_what_they_do_on_the_plain_kernels(family: str, tmp_path: Path) -> None:
    build_oracle(family, tmp_path)
    steppers = [stepper_on(kernels, tmp_path) for kernels in (GpuKernels(device(), batch_invariant=False), reference)]
    generated = []
    for stepper, sampler in steppers:
        whole, chunked, short = (stepper.add(prompt, str(index)) for index, prompt in enumerate(reversed(prompts())))
        stepper.step([(whole, whole.num_uncomputed)])
        prefixed = after_prefix_of(whole, 3, stepper)
        stepper.step([(chunked, 9), (whole, 1), (prefixed, 3)])
        stepper.step([(whole, 1), (chunked, chunked.num_uncomputed), (short, 1), (prefixed, 1)])
        generated.append(([whole, chunked, short, prefixed], sampler))
    (seqs, sampler), (twins, twin) = generated
    check_alike(seqs, sampler, twins, twin)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
def test_a_model_in_half_precision_stays_close(dtype: torch.dtype, tmp_path: Path) -> None:
    build_oracle("gemma3", tmp_path)
    logits = []
    for kernels, of_type in ((GpuKernels(device(), batch_invariant=False), dtype), (reference, torch.float32)):
        stepper, sampler = stepper_on(kernels, tmp_path, of_type)
        stepper.generate(stepper.add(prompts()[1], "r"), 1, chunk=8)
        logits.append(sampler.sampled["r"][0])
    actual, expected = logits
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_projections_follow_the_mode() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 8, device=device())
    for bias in (None, torch.randn(6, device=device())):
        plain = GpuKernels(device(), batch_invariant=False).pack_linear(weight, bias)
        invariant = GpuKernels(device(), batch_invariant=True).pack_linear(weight, bias)
        assert isinstance(plain, CublasLinear)
        assert isinstance(invariant, InvariantLinear)
        x, residual = torch.randn(3, 8, device=device()), torch.randn(3, 6, device=device())
        expected = reference.pack_linear(weight, bias).add_to(residual, x)
        for linear in (invariant, plain):  # the plain one last: it may add in place
            torch.testing.assert_close(linear.add_to(residual, x), expected, rtol=1e-5, atol=1e-5)


def test_batch_invariance_is_refused_with_advice_where_no_kernels_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.ops._cpu_kernels", lambda activation_bits: cpu)
    with pytest.raises(ValueError, match="num_gpus: 1"):
        kernels_for(torch.device("cpu"), batch_invariant=True)


def test_the_setting_reaches_both_kinds_of_workers() -> None:
    tree = {"model": {"batch_invariant": True}, "prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}
    config = LegatoConfig.model_validate(tree)
    assert engine_config("prefill", config).batch_invariant
    assert engine_config("decode", config).batch_invariant
    assert not engine_config("prefill", LegatoConfig()).batch_invariant


def test_a_gpu_has_its_own_kernels() -> None:
    assert kernels_for(torch.device("cuda"), batch_invariant=True) == GpuKernels(torch.device("cuda"), True)


def test_without_triton_a_gpu_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_triton(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "kernels.triton.kernels":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "kernels.triton.kernels", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_triton)
    with pytest.raises(ValueError, match="gpu extra"):
        kernels_for(torch.device("cuda"))
