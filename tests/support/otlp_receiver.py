"""What takes OTLP over HTTP for tests, in place of Jaeger or a collector, and what it was sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.threaded_server import QuietHandler, threaded_server
from tests.support.waiting import HANGS_S, wait_until


@dataclass
class Receiver:
    """What came, in order; `held`: it answers only then, and with `status`."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)  # that differ
    num_posts: int = 0
    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.num_posts += 1
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            if (resource := attributes(one.resource)) not in self.resources:
                self.resources.append(resource)
            self.spans += [span for scope in one.scope_spans for span in scope.spans]


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """On a port of its own; `answers` lets it answer."""
    found = Receiver()
    found.answers.set()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            found.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            found.answers.wait(HANGS_S)
            self.send_response(found.status)
            self.send_header("content-length", "0")
            self.end_headers()

    with threaded_server(Handler) as found.endpoint:
        try:
            yield found
        finally:
            found.answers.set()


def attributes(of: Span | Resource) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in of.attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


def roots(receiver: Receiver, number: int) -> list[Span]:
    """The spans of so many requests, once all have come."""
    found: list[Span] = []

    def came() -> bool:
        found[:] = [span for span in receiver.spans if span.kind == Span.SPAN_KIND_SERVER]
        return len(found) >= number

    wait_until(came, what="the spans did not come")
    assert len(found) == number
    return found


def children(receiver: Receiver, parent: Span) -> list[Span]:
    return [span for span in receiver.spans if span.parent_span_id == parent.span_id]


def assert_filled(parent: Span, parts: list[Span]) -> None:
    """They follow each other without a break, to a nanosecond of rounding, and fill it."""
    at = parent.start_time_unix_nano
    for part in parts:
        assert part.trace_id == parent.trace_id and abs(part.start_time_unix_nano - at) <= 1
        assert part.end_time_unix_nano >= part.start_time_unix_nano
        at = part.end_time_unix_nano
    assert abs(at - parent.end_time_unix_nano) <= 1
