"""Replays of logs against logs whose truth is known: those of simulations."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.gateway.request_log import (
    LoggedCluster,
    LoggedRequest,
    LoggedWorker,
    RequestLogError,
    cluster_line,
    read_log,
    request_line,
)
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.whatif import best_layout, replay, what_if
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.synthetic import CONTENT_TOKENS, Workload, draw_requests
from cluster.slo.classes import INTERACTIVE, SloConfig
from engine.cost_model.step_cost import StepCost

COST = StepCost(base_s=0.006, prefill_token_s=4e-5, prefill_pair_s=1e-9, decode_s=1e-5, context_token_s=5e-8)
WORKER = LoggedWorker(cost=COST, kv_tokens=200_000, token_budget=1024, max_num_seqs=64)
CLUSTER = LoggedCluster(
    num_prefill=1, num_decode=2, prefill=WORKER, decode=WORKER, block_size=CONTENT_TOKENS, slo=SloConfig()
)


@cache
def lived(slowness: float = 1.0, rate: float = 10.0, one_pool: bool | None = None) -> list[LoggedRequest]:
    """What requests saw of the cluster where its steps took `slowness` times what the log says that they cost.
    `one_pool`: of its decode workers alone, which compute for each other or do not."""
    cost = StepCost(
        base_s=slowness * COST.base_s,
        prefill_token_s=slowness * COST.prefill_token_s,
        prefill_pair_s=slowness * COST.prefill_pair_s,
        decode_s=slowness * COST.decode_s,
        context_token_s=slowness * COST.context_token_s,
    )
    shape = WorkerShape(cost=cost, kv_tokens=200_000, token_budget=1024, max_num_seqs=64, block_size=CONTENT_TOKENS)
    config = SimulationConfig(num_prefill=int(one_pool is None), num_decode=2, prefill=shape, decode=shape)
    requests = list(draw_requests(Workload(requests_per_s=rate, num_requests=100), 7))
    began = requests[0].arrival_s
    requests = [replace(request, arrival_s=request.arrival_s - began) for request in requests]
    records = simulate(config, requests, LegatoRouter(DecisionPolicy(one_pool=bool(one_pool)))).records
    return [
        LoggedRequest(
            request_id=request.request_id,
            arrival_s=1000.0 + request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens if record.end_s is not None else 0,
            hashes=tuple(f"{name:x}" for name in request.content[: request.prompt_tokens // CONTENT_TOKENS]),
            slo_class=request.slo_class,
            ttft_s=record.ttft_s,
            tpot_s=record.tpot_s,
            gap_p99_s=record.gaps.p99_s if record.gaps.num else None,
        )
        for request, record in zip(requests, records, strict=True)
    ]


def written(path: Path, cluster: LoggedCluster, requests: Sequence[LoggedRequest]) -> Path:
    path.write_text("".join(f"{line}\n" for line in (cluster_line(cluster), *map(request_line, requests))))
    return path


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = lived()[:5]
    assert read_log(written(tmp_path / "log.jsonl", CLUSTER, requests)) == (CLUSTER, requests)


def test_noise_as_older_logs_have_it_is_read_as_unknown(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", CLUSTER, lived()[:5])
    path.write_text(path.read_text().replace('"noise_by_kind":{}', '"noise":{"spread":0.2,"run_spread":0.1}'))
    assert '"spread"' in path.read_text()
    assert read_log(path)[0] == CLUSTER


@pytest.mark.parametrize(("line", "words"), [(1, "does not describe the cluster"), (3, "does not describe a request")])
def test_a_wrong_line_is_named(tmp_path: Path, line: int, words: str) -> None:
    path = written(tmp_path / "log.jsonl", CLUSTER, lived()[:5])
    lines = path.read_text().splitlines()
    lines[line - 1] = '{"prompt_tokens": "many"}'
    path.write_text("\n".join(lines))
    with pytest.raises(RequestLogError, match=f"line {line} {words}"):
        read_log(path)


def test_what_happened_is_replayed_as_it_happened() -> None:
    """The log's clock begins elsewhere, so times agree up to rounding."""
    result = what_if(CLUSTER, lived())
    quantiles = {f"{name} {share}" for name in ("TTFT", "TPOT", "gap") for share in ("P50", "P95", "P99")}
    assert set(result.errors) == {"in time", *quantiles}
    assert all(abs(error) < 1e-3 for error in result.errors.values())
    assert result.supposed == replace(result.replayed, name="supposed")
    assert "That is much" not in result.text()


def test_a_wrong_cost_is_told_as_an_error() -> None:
    result = what_if(CLUSTER, lived(slowness=1.6, rate=2.0))
    assert result.errors["TPOT P50"] == pytest.approx(1 / 1.6 - 1, abs=0.05)
    assert "That is much" in result.text()


def test_fewer_workers_serve_fewer_and_stricter_targets_are_met_less() -> None:
    requests = lived()
    as_many, fewer = (what_if(CLUSTER, requests, num_prefill=n, num_decode=n + 1, ttft_s=0.1) for n in (1, 0))
    assert fewer.supposed.in_time < as_many.supposed.in_time < as_many.replayed.in_time == 1.0


def test_right_drafts_make_tokens_come_sooner() -> None:
    """In the supposed cluster; what happened is replayed without any."""
    plain, drafting = (what_if(CLUSTER, lived(), acceptance=acceptance) for acceptance in (0.0, 0.8))
    assert drafting.replayed == plain.replayed
    assert drafting.supposed.tpot.p50 < 0.8 * plain.supposed.tpot.p50


def test_gaps_are_judged_as_they_were_and_as_they_would_be() -> None:
    requests = lived()
    stalled = replace(requests[0], gap_p99_s=0.3)
    promised = replace(CLUSTER, slo=SloConfig(classes=(replace(INTERACTIVE, gap_s=0.2),)))
    result = what_if(promised, [stalled, *requests[1:]], gap_s=1e-4)  # no step is as short
    assert (result.measured.in_time, result.replayed.in_time) == (0.99, 1.0)
    assert result.supposed.in_time == sum(r.output_tokens == 1 for r in requests) / len(requests)
    assert result.measured.gap.p50 == pytest.approx(result.replayed.gap.p50, rel=1e-3)


def test_who_was_turned_away_is_missed_and_replayed_with_the_usual_length() -> None:
    requests = lived()
    turned_away = [replace(requests[0], output_tokens=0, ttft_s=None, tpot_s=None, gap_p99_s=None), *requests[1:]]
    result = what_if(CLUSTER, turned_away)
    assert result.measured.rejected == 0.01
    assert result.replayed.rejected == 0.0


def test_the_best_layout_is_the_best_of_all_that_as_many_workers_have() -> None:
    """Where prompts have to be fast and tokens, too, so that layouts differ."""
    strict = replace(CLUSTER, slo=SloConfig(classes=(replace(INTERACTIVE, ttft_s=0.5, tpot_s=0.012),)))
    requests = lived(rate=30.0)
    found = best_layout(strict, requests, time_s=math.inf)
    assert found.is_complete
    by_name = {x.layout: x.in_time for x in found.fixed}
    for num_prefill, name in ((0, "3 colocated"), (1, "1 prefill + 2 decode"), (2, "2 prefill + 1 decode")):
        supposed = what_if(strict, requests, num_prefill=num_prefill, num_decode=3 - num_prefill).supposed
        assert by_name.pop(name) == pytest.approx(supposed.in_time), name
    assert not by_name
    ranks = [(x.least, x.in_time) for x in found.fixed]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > ranks[-1]
    assert found.fixed[0].layout in found.sentence
    one_type = what_if(replace(strict, num_prefill=0, num_decode=3, one_pool=True), requests).replayed
    assert found.automatic.in_time == pytest.approx(one_type.in_time)


def test_a_search_without_time_says_so() -> None:
    with pytest.raises(ValueError, match="too short"):
        best_layout(CLUSTER, lived(), time_s=0.0)


def test_the_newest_of_a_log_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", CLUSTER, lived()[:5])
    assert read_log(path, newest=2) == (CLUSTER, lived()[3:5])


def test_the_command_replays_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path / "log.jsonl", replace(CLUSTER, prefill=None, num_prefill=0), lived()[:40])

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["cluster", "whatif", "--log", str(path), *arguments])
        return main()

    assert run("--decode", "3", "--tpot-ms", "50", "--gap-ms", "100") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("measured", "replayed", "supposed", "Error of the simulation"))
    assert run("--layouts", "--newest", "20") == 0
    assert "Of 20 requests" in capsys.readouterr().out
    assert run("--acceptance", "1.5") == 1
    assert "acceptance is 1.5" in capsys.readouterr().err
    assert run("--prefill", "1") == 1
    assert "describes no prefill worker" in capsys.readouterr().err
    path.write_text(cluster_line(CLUSTER))
    assert run() == 1
    assert "no requests" in capsys.readouterr().err


def test_a_pool_whose_workers_compute_for_each_other_is_replayed_as_one(tmp_path: Path) -> None:
    """Placed by the other rule, first tokens come at other times."""
    for one_pool in (True, False):
        requests = lived(one_pool=one_pool)
        cluster = replace(CLUSTER, num_prefill=0, prefill=None, one_pool=one_pool)
        ttfts = [request.ttft_s for request in requests]
        replayed = replay(*read_log(written(tmp_path / "log", cluster, requests)))
        assert [record.ttft_s for record in replayed] == pytest.approx(ttfts)
        otherwise = replay(replace(cluster, one_pool=not one_pool), requests)
        assert [record.ttft_s for record in otherwise] != pytest.approx(ttfts)
