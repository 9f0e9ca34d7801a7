"""Spans as a real receiver of OTLP gets them: protobuf over HTTP, from a gateway that a traced client asks."""

from __future__ import annotations

import logging
import socket
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import propagate
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry

from cluster.errors import FailedError
from cluster.gateway.timeline import Attempt, RequestTimeline
from cluster.metrics import traces
from cluster.metrics.traces import MAX_AT_ONCE, MAX_WAITING, TraceExporter, trace_exporter
from cluster.slo.classes import RequestTerms
from cluster.slo.report import SloOutcome
from engine.sampling.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.requests import RequestSpec
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import PROMPT, Target
from tests.support.otlp_receiver import Receiver, assert_filled, attributes, children, otlp_receiver, roots
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, wait_until

pytestmark = pytest.mark.model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(traces, "_PERIOD_S", 0.01)
    # Nothing is lost, or sent again, because this machine is busy.
    monkeypatch.setattr(traces, "_STOP_S", HANGS_S)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", f"{HANGS_S:g}")
    with otlp_receiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        yield found


@contextmanager
def exporting(registry: CollectorRegistry | None = None) -> Iterator[TraceExporter]:
    exporter = trace_exporter(registry or CollectorRegistry(), "gateway-1")
    assert exporter is not None
    try:
        yield exporter
    finally:
        exporter.stop()


@pytest.fixture
def target(receiver: Receiver, generator: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    with exporting() as exporter, running_server(generator, tokenizer, on_ended=exporter.ended) as target:
        yield target


def test_a_traced_clients_request(receiver: Receiver, target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(delay_s=0.005, waited_s=0.002)
    before = time.time_ns()
    with TracerProvider(shutdown_on_exit=False).get_tracer("client").start_as_current_span("asking") as asking:
        headers: dict[str, str] = {"tracestate": "vendor=1"}
        propagate.inject(headers)
        answer = target.complete(max_tokens=4, extra_headers=headers, extra_body={"ignore_eos": True})
    (root,) = roots(receiver, 1)
    client = asking.get_span_context()
    assert root.trace_id == client.trace_id.to_bytes(16) and root.parent_span_id == client.span_id.to_bytes(8)
    assert root.name == f"text_completion {MODEL}" and receiver.resources[0]["service.name"] == "legato"
    found = attributes(root)
    assert found["gen_ai.response.id"] == answer.id and found["gen_ai.request.model"] == MODEL
    assert found["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert found["gen_ai.usage.output_tokens"] == 4 and found["legato.outcome"] == "finished"
    assert found["gen_ai.request.max_tokens"] == 4 and "gen_ai.request.choice.count" not in found
    assert (found["http.response.status_code"], found["http.route"]) == (200, "/v1/completions")
    assert found["gen_ai.response.finish_reasons"] == ["length"] and found["legato.workers"] == ["p0", "d0"]
    assert "error.type" not in found
    (resource,) = receiver.resources
    assert resource["service.instance.id"] == "gateway-1" and resource["host.name"] == socket.gethostname()
    assert before <= root.start_time_unix_nano + 10**9 and root.end_time_unix_nano <= time.time_ns() + 10**9
    parts = children(receiver, root)
    assert_filled(root, parts)
    workers = {part.name: attributes(part).get("legato.worker") for part in parts}
    assert (workers["prefill"], workers["decode"], workers["place"]) == ("p0", "d0", None)
    ttft_ns = sum(
        part.end_time_unix_nano - part.start_time_unix_nano
        for part in parts
        if part.name not in ("handoff", "decode", "finish")
    )
    assert found["gen_ai.response.time_to_first_chunk"] == pytest.approx(ttft_ns / 1e9, abs=1e-6)


def test_each_choice_has_its_own_parts(receiver: Receiver, target: Target) -> None:
    target.complete(max_tokens=2, n=2)
    (root,) = roots(receiver, 1)
    assert root.parent_span_id == b"" and attributes(root)["gen_ai.request.choice.count"] == 2
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["length", "length"]
    choices = children(receiver, root)
    assert [(span.name, attributes(span)["legato.choice"]) for span in choices] == [("choice", 0), ("choice", 1)]
    for choice in choices:
        assert_filled(choice, children(receiver, choice))


def test_a_parent_that_is_none_is_as_if_there_were_none(receiver: Receiver, target: Target) -> None:
    cases = [
        ([f"00-{TRACE}-{PARENT}-01"], True),
        ([f"cc-{TRACE}-{PARENT}-01-what-the-future-brings"], True),  # of a later version the known part counts
        ([f"cc-{TRACE}-{PARENT}-01.what"], False),
        ([f"00-{TRACE}-{PARENT}-01-more"], False),
        ([f"ff-{TRACE}-{PARENT}-01"], False),
        ([f"00-{'0' * 32}-{PARENT}-01"], False),
        ([f"00-{TRACE}-{'0' * 16}-01"], False),
        ([f"00-{TRACE.upper()}-{PARENT}-01"], False),
        ([f"00-{TRACE}-{PARENT}-1"], False),
        (["nonsense"], False),
        ([f"cc-{TRACE}-{PARENT}-01-{'x' * 600}"], False),
        ([f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"], False),
    ]
    ids = []
    for parents, _ in cases:
        headers = [("traceparent", parent) for parent in parents] + [("tracestate", "a=1"), ("tracestate", "b=2")]
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
        ids.append(target.http.post("/v1/completions", json=body, headers=headers).json()["id"])
    found = {attributes(root)["gen_ai.response.id"]: root for root in roots(receiver, len(cases))}
    for request_id, (parents, is_taken) in zip(ids, cases, strict=True):
        root = found[request_id]
        assert (root.trace_id.hex() == TRACE) is is_taken, parents
        assert root.parent_span_id.hex() == (PARENT if is_taken else ""), parents
        assert root.trace_state == ("a=1,b=2" if is_taken else ""), parents


def test_what_the_client_does_not_sample_is_not_exported(receiver: Receiver, target: Target) -> None:
    headers: dict[str, str] = {}
    with TracerProvider(ALWAYS_OFF, shutdown_on_exit=False).get_tracer("client").start_as_current_span("asking"):
        propagate.inject(headers)
    assert headers["traceparent"][-1] in "02", "not sampled"
    target.complete(max_tokens=1, extra_headers=headers)
    sampled = target.complete(max_tokens=1)
    (root,) = roots(receiver, 1)  # sent in order, so the other would have come before it
    assert attributes(root)["gen_ai.response.id"] == sampled.id


def test_a_share_of_what_no_client_decides(
    receiver: Receiver, generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with exporting() as exporter, running_server(generator, tokenizer, on_ended=exporter.ended) as target:
        target.complete(max_tokens=1)
        sampled = target.complete(max_tokens=1, extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        (root,) = roots(receiver, 1)
        assert attributes(root)["gen_ai.response.id"] == sampled.id


def test_a_failure_is_one(receiver: Receiver, target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(fail_after=1, error=FailedError("Lost."))
    target.http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 3})
    (root,) = roots(receiver, 1)
    found = attributes(root)
    assert root.status.code == Status.STATUS_CODE_ERROR and found["error.type"] == "generation_failed"
    assert found["http.response.status_code"] == 500 and "gen_ai.response.finish_reasons" not in found


def test_a_client_that_leaves_is_no_fault_of_the_servers(
    receiver: Receiver, target: Target, generator: ScriptedGenerator
) -> None:
    generator.script = Script(hang_after=1)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "stream": True}
    with target.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    (root,) = roots(receiver, 1)
    found = attributes(root)
    assert root.status.code == Status.STATUS_CODE_UNSET and found["error.type"] == "cancelled"
    assert found["http.response.status_code"] == 200 and "gen_ai.response.finish_reasons" not in found


# Without HTTP.


def timeline(name: str = "cmpl-a", endpoint: str = "/v1/completions") -> RequestTimeline:
    """Tried twice, 2 ms in all."""
    made = RequestTimeline(endpoint=endpoint, terms=RequestTerms())
    params = SamplingParams(max_tokens=10, seed=0)
    made.parsed([RequestSpec(request_id=f"{name}-0", attempt=0, prompt_token_ids=[1], params=params)], 1, name)
    at, (sequence,) = made.arrived_at, made.sequences
    sequence.attempts = [
        Attempt(number=0, asked_at=at, placed_at=at, started_at=at, failed_at=at + 8e-4, prefill="p0", decode="d0"),
        Attempt(number=1, asked_at=at + 1e-3, placed_at=at + 1e-3, started_at=at + 1e-3, prefill="p1", decode="d1"),
    ]
    sequence.attempts[0].cause, sequence.attempts[0].failed_worker = "fault", "p0"
    sequence.attempts[1].handoff_s = 2e-4
    sequence.token_times, sequence.end = array("d", [at + 1.5e-3, at + 2e-3]), "finished"
    made.parsed_at, made.ended_at, sequence.sent_at = at, at + 2e-3, at + 1.5e-3
    made.outcome, made.slo_outcome = "finished", SloOutcome.FINISHED
    return made


@pytest.mark.parametrize(
    ("endpoint", "operation"),
    [
        ("/v1/completions", "text_completion"),
        ("/v1/chat/completions", "chat"),
        ("/v1/responses", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "rerank"),
        ("/v1/score", "score"),
    ],
)
def test_a_span_says_what_was_done_in_the_conventions_words(receiver: Receiver, endpoint: str, operation: str) -> None:
    with exporting() as exporter:
        exporter.ended(timeline(endpoint=endpoint))
    (root,) = roots(receiver, 1)
    found = attributes(root)
    assert (found["gen_ai.operation.name"], found["http.route"]) == (operation, endpoint)
    assert root.name.split() == [operation, *found["gen_ai.request.model"].split()]


def test_a_retry_and_a_hand_off_are_seen_with_their_workers(receiver: Receiver) -> None:
    with exporting() as exporter:
        exporter.ended(timeline())
        (root,) = roots(receiver, 1)
    told = [
        (span.name, found.get("legato.worker"), found["legato.attempt"], found.get("legato.cause"))
        for span in children(receiver, root)
        for found in [attributes(span)]
    ]
    assert told == [
        ("queue", "p0", 0, None),
        ("retry", "p0", 0, "fault"),
        ("prefill", "p1", 1, None),
        ("handoff", "d1", 1, None),
        ("decode", "d1", 1, None),
    ]


def test_what_waits_is_bounded_and_nobody_waits_for_it(receiver: Receiver) -> None:
    """For a receiver that does not answer; what waits is sent in few messages when it does."""
    registry = CollectorRegistry()

    def count(result: str) -> float | None:
        return registry.get_sample_value("legato_traced_requests_total", {"result": result})

    receiver.answers.clear()
    with exporting(registry) as exporter:
        exporter.ended(timeline())
        wait_until(lambda: receiver.num_posts == 1)
        for _ in range(MAX_WAITING + 3):
            exporter.ended(timeline())
        assert (count("dropped"), count("exported")) == (3, 0)
        receiver.answers.set()
        wait_until(lambda: count("exported") == MAX_WAITING + 1)
        assert receiver.num_posts == 1 + MAX_WAITING // MAX_AT_ONCE
        receiver.status = 400
        exporter.ended(timeline())
        wait_until(lambda: count("failed") == 1)


def test_what_waits_is_sent_at_the_end(receiver: Receiver) -> None:
    with exporting() as exporter:
        exporter.ended(timeline())
    roots(receiver, 1)


def test_off_unless_there_is_somewhere_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in traces.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert trace_exporter(CollectorRegistry()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert trace_exporter(CollectorRegistry()) is None


def test_a_sentence_where_the_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        assert trace_exporter(CollectorRegistry()) is None
    (record,) = (record for record in caplog.records if record.name == traces.__name__)  # and not what others warn of
    assert "install legato[trace]" in record.getMessage() and "http://127.0.0.1:9" in record.getMessage()
