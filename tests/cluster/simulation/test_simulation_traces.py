"""Traces: both formats as published, scaled and cut; what is drawn has the statistics that it states."""

from __future__ import annotations

import gzip
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.simulation.workload.prompts import content_hashes
from cluster.simulation.workload.synthetic import CONTENT_TOKENS, LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceFormat, TraceRequest, read_trace, scaled

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1500, "output_length": 2, "hash_ids": [0, 1, 3]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake_format(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("trace.jsonl.gz" if packed else "trace.jsonl")
    path.write_bytes(gzip.compress(MOONCAKE.encode()) if packed else MOONCAKE.encode())
    first, second = read_trace(path, "mooncake")
    assert (first.request_id, first.arrival_s, first.prompt_tokens, first.output_tokens) == ("r0", 0.0, 1100, 500)
    assert (second.request_id, second.arrival_s, second.content) == ("r1", 3.0, (0, 1, 3))
    assert second.content_tokens == 512


def test_azure_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE, newline="")
    first, second = read_trace(path, "azure")
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens, first.content) == (0.0, 374, 44, ())
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


@pytest.mark.parametrize(
    ("trace_format", "text", "line"),
    [
        ("mooncake", MOONCAKE + "{}", 3),
        ("mooncake", MOONCAKE + MOONCAKE[:20], 3),
        ("mooncake", MOONCAKE.replace("1500", "0"), 2),
        ("azure", AZURE + "yesterday,1,1\n", 4),
        ("azure", AZURE + "2023-11-16 18:15:50,1\n", 4),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, trace_format: TraceFormat, text: str, line: int) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"trace, line {line} is no request"):
        list(read_trace(path, trace_format))


def test_scaling_cuts_compresses_time_and_shortens() -> None:
    requests = [
        TraceRequest(request_id=f"r{i}", arrival_s=10.0 * i, prompt_tokens=1000, output_tokens=3, content=(0, i))
        for i in range(5)
    ]
    cut = list(scaled(requests, load=4.0, length=0.25, first=1, limit=3))
    assert [r.request_id for r in cut] == ["r1", "r2", "r3"]
    assert [r.arrival_s for r in cut] == [0.0, 2.5, 5.0]
    assert {(r.prompt_tokens, r.output_tokens, r.content_tokens) for r in cut} == {(250, 1, 128)}
    for load, first, limit in ((0.0, 0, None), (1.0, -1, None), (1.0, 0, 0)):
        with pytest.raises(ValueError):
            scaled(requests, load=load, first=first, limit=limit)


@pytest.mark.parametrize("block_size", [16, 64, 100, 512])
def test_blocks_are_shared_as_far_as_content_is(block_size: int) -> None:
    one = TraceRequest(request_id="a", arrival_s=0, prompt_tokens=2000, output_tokens=1, content=(7, 8, 9, 10))
    other = replace(one, request_id="b", prompt_tokens=1900, content=(7, 8, 11, 12))
    first, second = content_hashes(one, 0, block_size), content_hashes(other, 1, block_size)
    assert (len(first), len(second)) == (2000 // block_size, 1900 // block_size)
    shared = [a == b for a, b in zip(first, second, strict=False)]
    assert shared == [True] * (1024 // block_size) + [False] * (len(second) - 1024 // block_size)
    assert len({*first, *second}) == len(first) + len(second) - 1024 // block_size


def test_without_content_nothing_is_shared() -> None:
    request = TraceRequest(request_id="a", arrival_s=0, prompt_tokens=100, output_tokens=1)
    assert not {*content_hashes(request, 0, 16)} & {*content_hashes(request, 1, 16)}


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_drawn_arrivals_and_lengths(burstiness: float) -> None:
    workload = Workload(
        requests_per_s=5.0,
        num_requests=6000,
        burstiness=burstiness,
        turn=LogNormal(median=400, sigma=0.5, most=10**6),
        output=LogNormal(median=100, sigma=1.0, most=10**6),
        follow_up=0.0,
        system_tokens=0,
    )
    requests = list(draw_requests(workload, seed=1))
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.08)
    assert statistics.pvariance(gaps) / mean**2 == pytest.approx(burstiness, rel=0.15)
    assert statistics.median(r.prompt_tokens for r in requests) == pytest.approx(400, rel=0.05)
    assert statistics.median(r.output_tokens for r in requests) == pytest.approx(100, rel=0.05)


def test_drawn_conversations_go_on_and_share_system_prompts() -> None:
    workload = Workload(requests_per_s=5.0, num_requests=3000, follow_up=0.5, num_systems=3, system_tokens=512)
    requests = list(draw_requests(workload, seed=2))
    assert requests == list(draw_requests(workload, seed=2))
    system_runs = 512 // CONTENT_TOKENS
    openings: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for request in requests:
        openings[request.content[:system_runs]] += 1
        assert len(request.content) == -(-request.prompt_tokens // CONTENT_TOKENS)
    assert len(openings) == 3
    assert max(openings.values()) > 1.5 * min(openings.values())
    # Who follows up holds a whole earlier prompt, up to its last run.
    seen: set[tuple[int, ...]] = set()
    num_follow_ups = 0
    for request in requests:
        prefixes = {request.content[:n] for n in range(system_runs + 1, len(request.content))}
        num_follow_ups += bool(prefixes & seen)
        seen.add(request.content[: request.prompt_tokens // CONTENT_TOKENS])
    assert 0.35 < num_follow_ups / len(requests) < 0.55
