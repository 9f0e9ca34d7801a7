"""Replays of logs against logs whose truth is known: those of simulations."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.gateway.request_log import (
    Log,
    LoggedCluster,
    LoggedRequest,
    LoggedWorker,
    RequestLogError,
    cluster_line,
    log_of_model,
    logged_cluster,
    logs_of,
    read_log,
    read_logs,
    request_line,
)
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.models import simulate_models
from cluster.simulation.records import RequestRecord
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.whatif import ServiceSummary, best_layout, replay, supposed, what_if
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.synthetic import CONTENT_TOKENS, LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest, paced, swing
from cluster.slo.classes import INTERACTIVE, SloClass, SloConfig
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.workers import LoadingReport
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot
from tests.support.thoroughness import THOROUGH

COST = StepCost(base_s=0.006, prefill_token_s=4e-5, prefill_pair_s=1e-9, decode_s=1e-5, context_token_s=5e-8)
WORKER = LoggedWorker(cost=COST, kv_tokens=200_000, token_budget=1024, max_num_seqs=64)
CLUSTER = LoggedCluster(
    num_prefill=1, num_decode=2, prefill=WORKER, decode=WORKER, block_size=CONTENT_TOKENS, slo=SloConfig()
)


NUM_REQUESTS = 100 if THOROUGH else 50


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
    requests = list(draw_requests(Workload(requests_per_s=rate, num_requests=NUM_REQUESTS), 7))
    began = requests[0].arrival_s
    requests = [replace(request, arrival_s=request.arrival_s - began) for request in requests]
    records = simulate(config, requests, LegatoRouter(DecisionPolicy(one_pool=bool(one_pool)))).records
    return logged(requests, records)


def logged(requests: Iterable[TraceRequest], records: Iterable[RequestRecord]) -> list[LoggedRequest]:
    """As a gateway notes what was simulated, on a clock of its own."""
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


# Two models on two workers each, and a demand that swings from one to the other; a prompt takes 6 s in the median.
SWING_S = 400.0
SLOW = LoggedWorker(
    cost=StepCost(base_s=0.005, prefill_token_s=1.6e-3, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=1e-7),
    kv_tokens=200_000,
    token_budget=2048,
    max_num_seqs=64,
)
PATIENT = SloConfig(classes=(SloClass(name="chat", ttft_s=30.0, tpot_s=0.5),), default="chat")
SWINGING = LoggedCluster(
    num_prefill=0, num_decode=2, prefill=None, decode=SLOW, block_size=CONTENT_TOKENS, slo=PATIENT, one_pool=True
)


@cache
def swung(change_s: float | None) -> dict[str, Log]:
    """The logs of both models: what their requests saw of workers that change their model in so long, or stay."""
    workload = Workload(
        requests_per_s=0.28,
        num_requests=1000,
        turn=LogNormal(median=3500, sigma=0.3, most=7000),
        output=LogNormal(median=8, sigma=0.3, most=24),
        num_systems=1,
        system_tokens=0,
        follow_up=0.0,
    )
    requests = {
        name: [
            request
            for request in paced(draw_requests(workload, 2 + number), swing(SWING_S, number / 2))
            if request.arrival_s < SWING_S
        ]
        for number, name in enumerate(("llama-3", "llama-3.1"))
    }
    began = min(mine[0].arrival_s for mine in requests.values())  # a replay begins there
    requests = {name: [replace(r, arrival_s=r.arrival_s - began) for r in mine] for name, mine in requests.items()}
    shape = WorkerShape(
        cost=SLOW.cost, kv_tokens=200_000, token_budget=2048, max_num_seqs=64, block_size=CONTENT_TOKENS
    )
    config = SimulationConfig(num_prefill=0, num_decode=2, prefill=shape, decode=shape, slo=PATIENT)
    changes = None if change_s is None else dict.fromkeys(requests, change_s)
    decisions = dict.fromkeys(requests, DecisionPolicy(one_pool=True))
    played = simulate_models(dict.fromkeys(requests, config), requests, change_s=changes, decisions=decisions)
    assert (change_s is not None) == bool(played.changes)
    return {
        name: (replace(SWINGING, model=name, change_s=change_s), logged(requests[name], found.records))
        for name, found in played.by_model.items()
    }


def written_each(path: Path, logs: Mapping[str, Log]) -> str:
    for name, log in logs.items():
        written(log_of_model(str(path), name), *log)
    return str(path)


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
    as_many, fewer = (
        what_if(CLUSTER, requests, supposed(CLUSTER, num_prefill=n, num_decode=n + 1, ttft_s=0.1)) for n in (1, 0)
    )
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
    result = what_if(promised, [stalled, *requests[1:]], supposed(promised, gap_s=1e-4))  # no step is as short
    assert (result.measured.in_time, result.replayed.in_time) == (1 - 1 / NUM_REQUESTS, 1.0)
    assert result.supposed.in_time == sum(r.output_tokens == 1 for r in requests) / len(requests)
    assert result.measured.gap.p50 == pytest.approx(result.replayed.gap.p50, rel=1e-3)


def test_who_was_turned_away_is_missed_and_replayed_with_the_usual_length() -> None:
    requests = lived()
    turned_away = [replace(requests[0], output_tokens=0, ttft_s=None, tpot_s=None, gap_p99_s=None), *requests[1:]]
    result = what_if(CLUSTER, turned_away)
    assert result.measured.rejected == 1 / NUM_REQUESTS
    assert result.replayed.rejected == 0.0


def in_time(records: Sequence[RequestRecord]) -> float:
    return ServiceSummary.of_records("", records).in_time


def test_the_best_layout_is_the_best_of_all_that_as_many_workers_have() -> None:
    """Where prompts have to be fast and tokens, too, so that layouts differ."""
    strict = replace(CLUSTER, slo=SloConfig(classes=(replace(INTERACTIVE, ttft_s=0.5, tpot_s=0.012),)))
    requests = lived(rate=30.0)
    found = best_layout(strict, requests, time_s=math.inf)
    assert found.is_complete
    by_name = {x.layout: x.in_time for x in found.fixed}
    for num_prefill, name in ((0, "3 colocated"), (1, "1 prefill + 2 decode"), (2, "2 prefill + 1 decode")):
        other = supposed(strict, num_prefill=num_prefill, num_decode=3 - num_prefill)
        assert by_name.pop(name) == pytest.approx(in_time(replay(other, requests))), name
    assert not by_name
    ranks = [(x.least, x.in_time) for x in found.fixed]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > ranks[-1]
    assert found.fixed[0].layout in found.sentence
    one_type = replay(replace(strict, num_prefill=0, num_decode=3, one_pool=True), requests)
    assert found.automatic.in_time == pytest.approx(in_time(one_type))


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


# --- several models ---


def what_if_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    """The exit code, and what is told."""
    monkeypatch.setattr(sys, "argv", ["cluster", "whatif", *options])
    code = main()
    return code, *capsys.readouterr()


def test_fixed_pools_are_replayed_and_workers_supposed_that_follow_the_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the one name that the configuration has. Nearly all are in time where workers change, which pools that each
    model has in the mean do not achieve; and what is supposed is what the simulator makes of such a cluster."""
    log = written_each(tmp_path / "requests.jsonl", swung(None))
    code, out, _ = what_if_of(monkeypatch, capsys, "--log", log, "--model-flips", "1", "--json")
    told = json.loads(out)
    assert code == 0 and list(told["models"]) == ["llama-3", "llama-3.1"]
    assert all(abs(error) < 1e-3 for found in (told, *told["models"].values()) for error in found["errors"].values())
    assert told["supposed"]["in_time"] >= 0.95
    assert told["measured"]["in_time"] == pytest.approx(told["replayed"]["in_time"])
    assert told["measured"]["in_time"] < told["supposed"]["in_time"] - 0.05
    assert told["changes"][0] == 0 < told["changes"][1]
    # But for those who were turned away, of whom nobody knows how long their answers would have been.
    followed = ServiceSummary.of_logs(swung(1.0).values())
    assert told["supposed"]["in_time"] == pytest.approx(followed.in_time, abs=0.02)


def test_a_log_says_that_workers_changed_their_model_and_they_do_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = written_each(tmp_path / "requests.jsonl", swung(1.0))
    code, out, _ = what_if_of(monkeypatch, capsys, "--log", log, "--model-flips", "no", "--json")
    told = json.loads(out)
    assert code == 0
    assert all(abs(error) < 1e-3 for error in told["errors"].values())
    assert told["changes"][0] > 0 == told["changes"][1]
    fixed = ServiceSummary.of_logs(swung(None).values())
    assert told["supposed"]["in_time"] == pytest.approx(fixed.in_time, abs=0.02)


def few(number: int = 20) -> dict[str, Log]:
    """Short logs of two models that were asked for at the same time."""
    cluster = replace(CLUSTER, prefill=None, num_prefill=0)
    return {name: (replace(cluster, model=name), lived(rate=100.0)[:number]) for name in ("a", "b")}


def test_each_model_and_all_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each with the workers that are supposed of it, and with the requests that are the newest of all."""
    log = written_each(tmp_path / "log", few())
    options = ("--log", f"{log}.b", "--log", f"{log}.a", "--decode", "1", "--decode", "4", "--ttft-ms", "200")
    code, out, _ = what_if_of(monkeypatch, capsys, *options)
    assert code == 0
    tables = out.split("\n\n")
    assert [table.split()[0] for table in tables] == ["b", "a", "all", "Workers"]
    assert tables[-1] == "Workers that changed their model: 0 replayed, 0 supposed.\n"
    _, out, _ = what_if_of(monkeypatch, capsys, *options, "--newest", "30", "--json")
    models = json.loads(out)["models"]
    cluster, requests = few()["a"]
    for name, num_decode in (("b", 1), ("a", 4)):
        alone = what_if(cluster, requests[5:], supposed(cluster, num_decode=num_decode, ttft_s=0.2)).supposed
        assert models[name]["supposed"]["ttft"]["p50"] == pytest.approx(alone.ttft.p50)
    assert models["b"]["supposed"]["ttft"]["p50"] > 2 * models["a"]["supposed"]["ttft"]["p50"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--layouts"], "--layouts compares layouts of one model's workers"),
        (["--decode", "1", "--decode", "2", "--decode", "3"], "--decode is given 3 times, and there are 2 models"),
        (["--prefill", "1"], "describes no prefill worker"),
        (["--newest", "1"], "the log of a holds no requests, or none that are new enough"),
        (["--log", "LOG.a"], "are both of a: give one log for each model"),
    ],
)
def test_what_cannot_be_said_of_several_models(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    advice: str,
) -> None:
    logs = few(5)
    logs["b"] = logs["b"][0], [replace(request, arrival_s=request.arrival_s + 60.0) for request in logs["b"][1]]
    log = written_each(tmp_path / "log", logs)
    code, out, err = what_if_of(monkeypatch, capsys, "--log", log, *(option.replace("LOG", log) for option in options))
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and advice in err and len(err.splitlines()) == 1


def test_workers_change_between_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = written(tmp_path / "log", CLUSTER, lived()[:5])
    code, _, err = what_if_of(monkeypatch, capsys, "--log", str(log), "--model-flips", "1")
    assert (code, err) == (1, "error: --model-flips is between models, and there is one: give the logs of several\n")


def test_the_logs_of_all_models_are_found_by_their_common_name(tmp_path: Path) -> None:
    """But not those that were full, and none where one of that very name was written last."""
    log = tmp_path / "log"
    written_each(log, {"llama-3": few()["a"], "llama-3.1": few()["b"]})
    (tmp_path / "log.llama-3.1").write_text("full")
    (tmp_path / "log.1").write_text("full")
    assert [path.name for path in logs_of(log)] == ["log.llama-3", "log.llama-3%2E1"]
    log.write_text("alone")
    os.utime(log, (2**33, 2**33))
    assert logs_of(log) == [log]
    os.utime(log, (1, 1))
    assert [path.name for path in logs_of(log)] == ["log.llama-3", "log.llama-3%2E1"]
    with pytest.raises(FileNotFoundError, match="none for each of several models beside it"):
        logs_of(tmp_path / "other")


def test_logs_that_do_not_tell_their_model_go_by_their_files(tmp_path: Path) -> None:
    """As older ones."""
    paths = [written(tmp_path / name, CLUSTER, lived()[:1]) for name in ("log.a", "log.b")]
    assert list(read_logs(paths)) == ["log.a", "log.b"]


def test_each_worker_that_changes_its_model_is_in_one_log() -> None:
    """In that of the model that it was started for; what steps of a model cost is told by those that have it."""
    at_home = worker_info("d1", model="a", home_model="a", models=["b"], load_s=4.0)
    guest = worker_info("d2", model="a", home_model="b", models=["a"], load_s=3.0)
    other = worker_info("d3", model="b", home_model="b", models=["a"])
    workers = [(info, worker_snapshot(info.worker_id, step_cost=REPORT)) for info in (at_home, guest, other)]
    for model, change_s, home in (("a", 3.0, 1), ("b", 0.0, 2)):
        found = logged_cluster(workers, SloConfig(), model=model, model_flips=True)
        assert found is not None
        assert (found.model, found.num_decode, found.change_s) == (model, home, change_s)
    loading = [LoadingReport(worker_id="d4", role="decode", model="a", home="decode", home_model="a", pid=1)]
    more = logged_cluster(workers, SloConfig(), model="a", model_flips=True, loading=loading)
    assert more is not None and more.num_decode == 2
    staying = logged_cluster(workers, SloConfig(), model="a")
    assert staying is not None
    assert (staying.num_decode, staying.change_s) == (2, None)
    assert logged_cluster(workers[:2], SloConfig(), model="b", model_flips=True) is None, "nobody has it now"
