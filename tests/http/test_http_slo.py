"""Classes of service over the real HTTP application: how a request is counted in the end, and what operators see."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import FailedError, OverloadedError, RequestTooLargeError, UnavailableError
from cluster.gateway.request_log import logged_request
from cluster.gateway.timeline import RequestTimeline
from cluster.http.app import create_app
from cluster.http.endpoints import operators
from cluster.metrics.ray_export import SAMPLES_AT_ONCE
from cluster.metrics.requests import RunMetrics
from cluster.metrics.workers import WorkerMetrics
from cluster.slo.classes import SloClass, SloConfig
from cluster.slo.report import Counts, SeriesKey
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.workers import DraftReport, LinkReport, TierBlocks, TiersReport
from tests.operators.queries import panels, rules, variables
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot
from tests.support.http_server import MODEL, running_server, scripted_api
from tests.support.openai_conformance import PROMPT, Target
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually, wait_until

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
CLASSES = SloConfig(
    classes=(
        SloClass(name="chat", ttft_s=600.0, tpot_s=600.0, share=0.9, service_tiers=("priority",)),
        SloClass(name="batch", service_tiers=("flex",)),
    ),
    default="chat",
)
STEADY = SloConfig(classes=(SloClass(name="chat", tpot_s=600.0, gap_s=600.0, share=0.9),), default="chat")
TIERS = TiersReport(
    blocks={"device": TierBlocks(free=1, cached=1, held=1), "host": TierBlocks(free=1, cached=1, held=1)},
    hit_tokens={"device": 1},
    loaded_columns={"disk": 1},
)
REPORTS: dict[str, Any] = {"step_cost": REPORT, "links": {"d2": LinkReport()}, "drafts": {"lookup": DraftReport()}}
WORKER = (worker_info("d1"), worker_snapshot("d1", tiers=TIERS, **REPORTS))
AT_ONCE = {"x-slo-ttft-ms": "0.001"}  # a target that nothing meets


@pytest.fixture
def target(generator: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    with running_server(generator, tokenizer, slo=CLASSES) as target:
        yield target


def figures(target: Target, slo_class: str = "chat") -> dict[str, Any]:
    classes = target.http.get("/slo").raise_for_status().json()["classes"]
    (found,) = [row for row in classes if row["slo_class"] == slo_class]
    return dict(found)


def counted(target: Target, slo_class: str = "chat", /, **counts: int) -> dict[str, Any]:
    """The class's figures, once it counts this and nothing else: a request's end is counted after its last byte."""
    names = figures(target, slo_class)["counts"]
    wanted = {name: counts.get(name, 0) for name in names}
    wait_until(lambda: figures(target, slo_class)["counts"] == wanted, what=f"{slo_class} did not come to {wanted}")
    return figures(target, slo_class)


def samples(target: Target, name: str) -> dict[tuple[str, ...], float]:
    """Of one metric: values of the labels, in the order of their names."""
    page = target.http.get("/metrics").text
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


# How it is counted.


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_in_time(target: Target, generator: ScriptedGenerator, stream: bool) -> None:
    generator.script = Script(delay_s=0.05)
    answer = target.complete(max_tokens=5, stream=stream, extra_body={"ignore_eos": True})
    assert (list(answer) if stream else answer.choices) != []
    latency = counted(target, met=1, tokens=5, met_tokens=5)["latency_ms"]
    assert {name: found["count"] for name, found in latency.items()} == {
        "ttft": 1,
        "queue": 1,
        "gap": 4,
        "tpot": 1,
        "e2e": 1,
    }
    assert latency["ttft"]["p50"] > 25 and latency["tpot"]["p50"] > 25 and latency["e2e"]["p50"] > 125
    assert latency["ttft"]["p99"] < latency["e2e"]["p99"]  # a whole answer's first byte counts from its first token
    workers = target.http.get("/slo").json()["workers"]
    assert {row["worker"]: set(row["latency_ms"]) for row in workers} == {
        "p0": {"ttft", "queue", "e2e"},
        "d0": {"gap", "tpot", "e2e"},
    }


def test_several_choices_are_one_request(target: Target) -> None:
    target.complete(max_tokens=3, n=2, extra_body={"ignore_eos": True})
    latency = counted(target, met=1, tokens=6, met_tokens=6)["latency_ms"]
    assert (latency["gap"]["count"], latency["tpot"]["count"], latency["ttft"]["count"]) == (4, 1, 1)


def test_arrival_is_before_the_body(target: Target) -> None:
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 1}).encode()

    def slowly() -> Iterator[bytes]:
        yield body[:5]
        threading.Event().wait(0.3)
        yield body[5:]

    assert target.http.post("/v1/completions", content=slowly()).status_code == 200
    latency = counted(target, met=1, tokens=1, met_tokens=1)["latency_ms"]
    assert latency["ttft"]["p50"] > 100 and latency["queue"]["p50"] > 100


def test_late_requests_miss(target: Target, generator: ScriptedGenerator) -> None:
    target.complete(max_tokens=1, extra_headers=AT_ONCE)
    counted(target, missed=1, late_first=1, tokens=1)
    generator.script = Script(delay_s=0.02)
    target.complete(max_tokens=3, extra_headers={"x-slo-tpot-ms": "1"}, extra_body={"ignore_eos": True})
    target.complete(max_tokens=3, extra_body={"ignore_eos": True})
    found = counted(target, met=1, missed=2, late_first=1, late_tokens=1, tokens=7, met_tokens=3)
    assert found["windows"]["short"]["attainment"] == pytest.approx(1 / 3)
    assert found["windows"]["long"]["burn_rate"] == pytest.approx((2 / 3) / 0.1)
    assert found["goodput_requests_per_s"] * found["covered_s"] == pytest.approx(1, abs=0.05)
    target.complete(max_tokens=2, extra_body={"service_tier": "flex"}, extra_headers=AT_ONCE)
    counted(target, "batch", missed=1, late_first=1, tokens=2)  # a class without targets, but this request had one


def test_gaps_are_promised(generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    """One class, a request that keeps its gaps and two that can't; the mean of all of them is within its target."""
    generator.script = Script(delay_s=0.02)
    with running_server(generator, tokenizer, slo=STEADY) as target:
        assert target.http.get("/slo").json()["targets"]["chat"]["gap_ms"] == 6e5
        assert samples(target, "legato_slo_target_seconds") == {("tpot", "chat"): 600, ("gap", "chat"): 600}
        ask = partial(target.complete, max_tokens=3, extra_body={"ignore_eos": True})
        list(ask(stream=True))
        list(ask(stream=True, extra_headers={"x-slo-gap-ms": "1"}))
        ask(extra_headers={"x-slo-gap-ms": "1"})
        found = counted(target, met=1, missed=2, late_gaps=2, tokens=9, met_tokens=3)
        assert found["latency_ms"]["gap"]["count"] == 6 and found["latency_ms"]["gap"]["p99"] >= 20 / 1.01
        for window in found["windows"].values():
            assert window["attainment"] == pytest.approx(1 / 3)
            burn = window["burn_rate"]
            assert window["burn_rate_by"] == {"ttft": 0, "tpot": 0, "gap": burn} and burn == pytest.approx(2 / 3 / 0.1)
        late = samples(target, "legato_slo_late_total")
        assert {labels[-1]: value for labels, value in late.items()} == {"first_byte": 0, "tokens": 0, "gaps": 2}
        assert samples(target, "legato_request_gap_p99_seconds_count") == {(): 3}
        assert samples(target, "legato_request_gap_p99_seconds_sum")[()] >= 3 * 0.02
        ask(max_tokens=1, extra_headers={"x-slo-gap-ms": "1"})
        counted(target, met=2, missed=2, late_gaps=2, tokens=10, met_tokens=4)  # one token has no gap


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (OverloadedError("Full. Wait.", retry_after_s=1), {"missed": 1, "rejected": 1}),
        (UnavailableError("Nobody home. Wait.", retry_after_s=1), {"missed": 1, "failed": 1}),
        (FailedError("Lost. Try again."), {"missed": 1, "failed": 1}),
        (RuntimeError("bug"), {"missed": 1, "failed": 1}),
        (RequestTooLargeError("Too large. Shorten it."), {}),
    ],
)
def test_what_was_turned_away_missed_its_promise(
    target: Target, generator: ScriptedGenerator, error: Exception, counts: dict[str, int]
) -> None:
    generator.script = Script(fail_after=0, error=error)
    body = {"model": MODEL, "prompt": PROMPT}
    assert target.http.post("/v1/completions", json=body).status_code >= 400
    assert counted(target, **counts)["latency_ms"] == {}, "no time of theirs blurs the others'"
    target.http.post("/v1/completions", json={**body, "service_tier": "flex"})
    counts.pop("missed", None)
    counted(target, "batch", **counts)


def test_nobody_to_ask_is_a_failure(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.limits = None
    assert target.http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT}).status_code == 503
    counted(target, missed=1, failed=1)


def test_a_failure_in_a_stream_keeps_its_first_byte(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="one two three four", fail_after=2, error=FailedError("Lost. Try again."))
    target.http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": True})
    assert counted(target, missed=1, failed=1, tokens=2)["latency_ms"]["ttft"]["count"] == 1


@pytest.mark.parametrize(
    ("headers", "counts"),
    [({}, {}), ({"x-slo-gap-ms": "1e7"}, {}), ({"x-slo-gap-ms": "1"}, {"missed": 1, "late_gaps": 1})],
)
def test_a_client_that_leaves_in_a_stall_counts_if_no_gap_may_be_as_long(
    target: Target, generator: ScriptedGenerator, headers: dict[str, str], counts: dict[str, int]
) -> None:
    generator.script = Script(reply="one two", hang_after=1)
    body = {"model": MODEL, "prompt": PROMPT, "stream": True}
    with target.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()  # which would leave by itself, were it not kept
        assert next(lines).startswith("data: ")
        threading.Event().wait(0.01)
    counted(target, cancelled=1, tokens=1, **counts)


@pytest.mark.parametrize(("headers", "counts"), [({}, {}), (AT_ONCE, {"missed": 1, "late_first": 1})])
def test_a_client_that_leaves_counts_only_if_it_had_waited_too_long(
    target: Target, generator: ScriptedGenerator, headers: dict[str, str], counts: dict[str, int]
) -> None:
    generator.script = Script(delay_s=60.0)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=str(target.http.base_url), headers=headers, timeout=HANGS_S) as client:
            request = asyncio.create_task(client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT}))
            await asyncio.to_thread(wait_until, lambda: generator.num_open == 1)
            request.cancel()
            await asyncio.wait({request})

    asyncio.run(leave())
    counted(target, cancelled=1, **counts)


async def test_serve_cancels_a_request_whose_client_has_left(
    generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    """That is no failure of the service."""
    api = scripted_api(generator, tokenizer, slo=CLASSES)
    generator.script = Script(delay_s=60.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(api)), base_url="http://test") as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: generator.num_open == 1)
        request.cancel()  # of the task that runs the application
        await asyncio.wait({request})
        assert api.slo.counts()[SeriesKey("chat", MODEL, "")] == Counts(cancelled=1)
        generator.script = Script()
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'legato_requests_total{endpoint="/v1/completions",outcome="cancelled"} 1.0' in metrics


async def test_metrics_of_many_are_written_a_few_at_a_time(
    generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams have their turn between them."""
    api, at_once = scripted_api(generator, tokenizer, slo=CLASSES), list[int]()

    def counted(registry: CollectorRegistry) -> bytes:
        at_once.append(sum(len(family.samples) for family in registry.collect()))
        return generate_latest(registry)

    monkeypatch.setattr(operators, "generate_latest", counted)
    many = Gauge("many", "of a kind", ["number"], registry=api.metrics.registry)
    for number in range(2 * SAMPLES_AT_ONCE + 1):
        many.labels(number).set(number)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(api)), base_url="http://test") as client:
        page = (await client.get("/metrics")).text
    whole = generate_latest(api.metrics.registry).decode()
    assert page.splitlines() == [line for line in whole.splitlines() if "_created" not in line]
    assert max(at_once) == SAMPLES_AT_ONCE


# One record of a request.


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_prometheus_and_slo_tell_one_time_to_the_first_token(
    generator: ScriptedGenerator, tokenizer: Tokenizer, stream: bool
) -> None:
    """And its parts, with those of the rest, are what the client saw, to the microsecond."""
    ended: list[RequestTimeline] = []
    api = scripted_api(generator, tokenizer, slo=CLASSES, on_ended=ended.append)
    generator.script = Script(delay_s=0.02, waited_s=0.005, handoff_s=0.01, drafted={2: ("lookup", 2, 1)})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(api)), base_url="http://test") as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "stream": stream}
        before = time.monotonic()
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        client_s = time.monotonic() - before
        page = (await client.get("/metrics")).text
        classes = (await client.get("/slo")).json()["classes"]
    (timeline,) = ended
    samples = {
        sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples
    }
    ttft_s = samples["legato_time_to_first_token_seconds_sum"]
    assert timeline.ttft_s == ttft_s
    logged = logged_request(timeline.sequences[0], 0.0, b"key")
    assert logged is not None and logged.ttft_s == ttft_s
    assert (logged.drafted_tokens, logged.accepted_tokens) == (3, 2)
    assert logged.tpot_s == samples["legato_time_per_output_token_seconds_sum"]
    assert logged.gap_p99_s == samples["legato_request_gap_p99_seconds_sum"] == timeline.gap_p99_s
    (chat,) = [row for row in classes if row["slo_class"] == "chat"]
    assert chat["latency_ms"]["ttft"]["p50"] == pytest.approx(1e3 * ttft_s, rel=0.0101), "bins are 2 % wide"
    assert chat["latency_ms"]["e2e"]["p50"] == pytest.approx(1e3 * timeline.total_s, rel=0.0101)
    assert samples["legato_handoff_exposed_seconds_sum"] == 0.01
    parts = {part.name: part.seconds for part in timeline.parts()}
    assert len(parts) == len(timeline.parts()), "nothing was tried twice"
    of_ttft = itertools.takewhile(lambda name: name not in ("handoff", "decode", "finish"), parts)
    assert abs(sum(parts[name] for name in of_ttft) - ttft_s) < 1e-6
    assert abs(sum(parts.values()) - samples["legato_request_duration_seconds_sum"]) < 1e-6
    assert ttft_s < timeline.total_s < client_s
    assert parts["queue"] == pytest.approx(0.005)
    (sequence,) = timeline.sequences
    assert sequence.sent_at is not None  # perhaps after all of its tokens had come
    assert ("decode" in parts) == (sequence.token_times[-1] > sequence.sent_at)


# What operators see.


def test_what_prometheus_scrapes(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(delay_s=0.02)
    target.complete(max_tokens=3, extra_body={"ignore_eos": True})
    target.complete(max_tokens=3, extra_body={"ignore_eos": True}, extra_headers=AT_ONCE)
    counted(target, met=1, missed=1, late_first=1, tokens=6, met_tokens=3)
    assert samples(target, "legato_slo_promises_total") == {
        ("gateway-1", MODEL, "met", "chat"): 1,
        ("gateway-1", MODEL, "missed", "chat"): 1,
        ("gateway-1", MODEL, "met", "batch"): 0,
        ("gateway-1", MODEL, "missed", "batch"): 0,
    }
    assert samples(target, "legato_slo_attainment") == {(MODEL, "chat", window): 0.5 for window in ("short", "long")}
    burn = samples(target, "legato_slo_burn_rate")
    assert burn[MODEL, "chat", "long"] == pytest.approx(5) and burn[MODEL, "batch", "short"] == 0
    assert samples(target, "legato_slo_latency_seconds")["gap", MODEL, "0.5", "chat"] > 0.01
    assert samples(target, "legato_slo_target_seconds") == {("ttft", "chat"): 600, ("tpot", "chat"): 600}
    assert samples(target, "legato_slo_worker_burn_rate")[MODEL, "chat", "short", "d0"] == pytest.approx(5)


def test_the_scope_of_figures(target: Target) -> None:
    target.complete(max_tokens=1)
    counted(target, met=1, tokens=1, met_tokens=1)
    whole, own = (target.http.get("/slo", params={"scope": scope}).json() for scope in ("cluster", "gateway"))
    assert [part["classes"][0]["counts"]["met"] for part in (whole, own)] == [1, 1]  # it is all of its cluster
    targets = {"ttft_ms": 6e5, "tpot_ms": 6e5, "gap_ms": None, "share": 0.9, "service_tiers": ["priority"]}
    assert whole["targets"]["chat"] == targets
    assert (whole["scope"], own["scope"], own["default_class"]) == ("cluster", "gateway", "chat")
    refused = target.http.get("/slo", params={"scope": "world"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "scope"


def test_the_dashboard_shows_what_there_is(target: Target) -> None:
    """Every metric that a panel or a rule asks for is one that a gateway tells, with the labels that it groups by."""
    target.complete(max_tokens=2, extra_body={"ignore_eos": True})
    counted(target, met=1, tokens=2, met_tokens=2)
    told = CollectorRegistry()
    told.register(RunMetrics())
    told.register(WorkerMetrics(lambda: [WORKER], lambda: {"model": {"decode": 1}}, {"model": {"decode": 1}}))
    page = target.http.get("/metrics").text + generate_latest(told).decode()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(f"ray_{sample.name}", set()).update(sample.labels)
    recorded = {
        rule["record"]: set(_names(_groups(rule["expr"]))) | {*rule.get("labels", ())} for rule in rules("record")
    }
    known = labels | recorded
    of_panels, of_rules = panels().values(), [rule["expr"] for rule in [*rules("record"), *rules("alert")]]
    assert len(of_panels) > 50 and len(of_rules) > 20
    for query in (*of_panels, *of_rules):
        series = re.findall(r"\b((?:ray_legato_|legato:)[\w:]+)(?:{([^}]*)})?", query)
        assert series and {name for name, _ in series} <= known.keys(), query
        for name, selected in series:
            assert set(re.findall(r"(\w+)\s*[!=]~?\"", selected)) <= known[name], query
        grouped = set(_names(_groups(query)))
        assert grouped <= set().union(*(known[name] for name, _ in series)), query
    for query in of_panels:
        asked = set(_names(_groups(query))) - {"le"}
        assert all(asked <= known[name] for name in re.findall(r"\bray_legato_\w+", query)), query
    assert all(set(re.findall(r"\bray_legato_\w+", query)) <= labels.keys() for query in variables())


def test_alerts_name_what_to_do(target: Target) -> None:
    page = (ROOT / "docs" / "guide" / "alerts.md").read_text()
    headings = re.findall(r"^## (Legato\w+)$", page, flags=re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules("alert")]
    for rule in rules("alert"):
        assert rule["annotations"]["runbook"] == f"docs/guide/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]


def _groups(query: str) -> list[str]:
    return re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query)


def _names(lists: list[str]) -> list[str]:
    return re.findall(r"\w+", " ".join(lists))
