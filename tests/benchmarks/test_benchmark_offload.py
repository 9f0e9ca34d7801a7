"""The benchmark of KV in host memory, small: that it still measures what it says. Its numbers are nobody's aim here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.engine.offload
from benchmarks.common.part import GateError
from benchmarks.common.quiet import PATIENCE_VARIABLE
from benchmarks.common.tiered_engine import TieredEngine
from benchmarks.engine.offload import HOST_GROUPS, RINGS, Extent, measure
from benchmarks.report.table import offload_headline, offload_tables
from engine.sequence import SampledToken

SMALL = Extent(
    num_sequences=2,
    context_tokens=16,
    steps_a_round=2,
    decode_rounds=1,
    prompt_tokens=(32, 64),
    chunk_tokens=32,
    prefill_repeats=1,
)


@pytest.fixture(autouse=True)
def small_gate(monkeypatch: pytest.MonkeyPatch, smollm2_folder: Path) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "0")
    monkeypatch.setattr(benchmarks.engine.offload, "PROMPT_TOKENS", (5, 20, 45))
    monkeypatch.setattr(benchmarks.engine.offload, "OUTPUT_TOKENS", 3)


def test_what_rests_in_host_memory_is_copied_and_nothing_else() -> None:
    results: dict[str, Any] = measure(SMALL)
    assert results["gate"]["compared_tokens"] == 3 * 3 * 3 * 3  # prompts, tokens, rings, placements
    decode = {row["host_groups"]: row for row in results["decode"]["rows"]}
    assert list(decode) == list(HOST_GROUPS)
    assert all((row["copied_ms"]["min"] > 0) is bool(HOST_GROUPS[name]) for name, row in decode.items())
    assert decode["none"]["over_device"] == 1.0
    prefill = results["prefill"]["rows"]
    assert [row["prompt_tokens"] for row in prefill] == [32] * len(RINGS) + [64] * len(RINGS)
    assert all(row["copied_ms"]["median"] > 0 for row in prefill)
    assert torch.get_num_threads() == 1
    rows = [line for line in offload_tables(results).splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * 2 + len(decode) + len(prefill)  # each table begins with two lines
    assert set(offload_headline(results)) == {"decode_half_over_device", "prefill_largest_waited_share"}


def test_wrong_logits_bring_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = benchmarks.engine.offload._generate

    def wrong_in_host_memory(
        engine: TieredEngine, prompts: list[list[int]], host_groups: range, chunk_tokens: int
    ) -> list[SampledToken]:
        tokens = generate(engine, prompts, host_groups, chunk_tokens)
        return [*tokens[:-1], SampledToken(0)] if host_groups else tokens

    monkeypatch.setattr(benchmarks.engine.offload, "_generate", wrong_in_host_memory)
    monkeypatch.setattr(benchmarks.engine.offload, "RINGS", RINGS[-1:])
    with pytest.raises(GateError, match="every other of the layer groups"):
        measure(SMALL)
