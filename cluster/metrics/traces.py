"""Requests as OpenTelemetry spans, for Jaeger, Tempo or any collector that takes OTLP over HTTP.

Spans are made of a request's timeline once it has ended, by a thread of their own: serving it costs nothing but keeping
the headers of W3C's trace context. Where to, how many and in whose name the standard `OTEL_*` variables say, which the
SDK reads itself; without an endpoint there is no thread. The packages are those of `legato[trace]`.

    chat MODEL            the request; its parent is the client's span, where `traceparent` names one
    ├── parse, admit, place, ...
    └── finish            a span for each of `RequestTimeline.parts`; of several choices, each under a span `choice`
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter

from cluster.gateway.timeline import RequestTimeline
from cluster.slo.report import SloOutcome

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger(__name__)

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MAX_WAITING: Final = 1_024  # requests; what ends while as many wait is dropped
MAX_AT_ONCE: Final = 64  # requests in a message: about a thousand spans
_PERIOD_S: Final = 1.0
_STOP_S: Final = 2.0
# The conventions' words. Others have their path's last one: `embeddings` is one of them; `rerank` and `score` are
# Legato's own, as they have none for these.
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


def trace_exporter(registry: CollectorRegistry, gateway: str = "") -> TraceExporter | None:
    """Make the exporter that the environment asks for, for the gateway of that name. None: no spans are wanted, or they
    cannot be sent; the log says that."""
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)
    is_off = (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    )
    if endpoint is None or is_off:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        logger.warning(
            "traces are to go to %s, and the packages that send them are missing: install legato[trace] on every node"
            " that may run a gateway, or unset %s",
            endpoint,
            " and ".join(name for name in ENDPOINTS if os.environ.get(name)),
        )
        return None
    return TraceExporter(OTLPSpanExporter(), registry, gateway)


class TraceExporter:
    """Makes spans of requests that have ended and sends them, in a thread of its own.
    `stop` it when the gateway ends."""

    def __init__(self, exporter: SpanExporter, registry: CollectorRegistry, gateway: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

        class Collecting(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                spans.append(span)

        self._spans: list[ReadableSpan] = []
        spans = self._spans
        # What the environment says of these attributes takes precedence.
        named = Resource.create(
            {"host.name": socket.gethostname(), "service.instance.id": gateway, SERVICE_NAME: "legato"}
        ).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=named, shutdown_on_exit=False)
        provider.add_span_processor(Collecting())
        self._tracer = provider.get_tracer("legato")
        self._exporter = exporter
        self._requests = Counter(
            "legato_traced_requests",
            "Requests whose spans were exported; failed: the receiver did not take them; dropped: too many waited",
            ["result"],
            registry=registry,
        )
        for result in ("exported", "failed", "dropped"):
            self._requests.labels(result)
        self._waiting: deque[RequestTimeline] = deque()
        self._wanted = threading.Event()  # export at once, without waiting for the end of the period
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def ended(self, timeline: RequestTimeline) -> None:
        """Queue a request for export. Call it once the request is over and nobody writes to its timeline any more."""
        if len(self._waiting) >= MAX_WAITING:
            self._requests.labels("dropped").inc()
            return
        self._waiting.append(timeline)
        if len(self._waiting) == MAX_AT_ONCE:
            self._wanted.set()

    def stop(self) -> None:
        """Send what waits, if that does not take long, and end the thread. Call it off the event loop."""
        self._stopping = True
        self._wanted.set()
        self._thread.join(_STOP_S)
        self._exporter.shutdown()  # also ends a wait for a receiver that is away

    def _run(self) -> None:
        while not self._stopping:
            self._wanted.wait(_PERIOD_S)
            self._wanted.clear()
            while self._waiting:
                self._export()

    def _export(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        num_sampled = 0
        for _ in range(min(MAX_AT_ONCE, len(self._waiting))):
            timeline = self._waiting.popleft()
            try:
                num_sampled += self._make_spans(timeline)
            except Exception:
                name = timeline.request_id
                logger.exception("no spans could be made of request %s", name, extra={"request": name})
        spans = self._spans[:]
        self._spans.clear()
        if spans:
            taken = self._exporter.export(spans) is SpanExportResult.SUCCESS  # logs why not
            self._requests.labels("exported" if taken else "failed").inc(num_sampled)

    def _make_spans(self, timeline: RequestTimeline) -> bool:
        """Make the spans of one request. Returns False if there are none, because its trace is not sampled."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = _OPERATIONS.get(timeline.endpoint, timeline.endpoint.rpartition("/")[2])
        start_ns = round((timeline.arrived_at + timeline.since_1970_s) * 1e9)
        end_ns = start_ns + round(timeline.total_s * 1e9)
        span = self._tracer.start_span(
            f"{operation} {timeline.model}",
            context=TraceContextTextMapPropagator().extract(timeline.trace_headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(timeline, operation),
            start_time=start_ns,
        )
        if not span.is_recording():
            return False
        if timeline.slo_outcome is SloOutcome.FAILED:
            span.set_status(Status(StatusCode.ERROR, timeline.outcome))
        within = set_span_in_context(span)
        if len(timeline.sequences) == 1:
            self._make_part_spans(timeline, 0, within, start_ns)
        else:
            for choice, sequence in enumerate(timeline.sequences):
                attributes: dict[str, AttributeValue] = {
                    "legato.choice": choice,
                    "gen_ai.usage.output_tokens": len(sequence.token_times),
                }
                child = self._tracer.start_span("choice", context=within, attributes=attributes, start_time=start_ns)
                self._make_part_spans(timeline, choice, set_span_in_context(child), start_ns)
                child.end(end_ns)
        span.end(end_ns)
        return True

    def _make_part_spans(self, timeline: RequestTimeline, choice: int, within: Context, start_ns: int) -> None:
        for part in timeline.parts(choice):
            attributes: dict[str, AttributeValue] = {}
            for name, value in (("worker", part.worker), ("attempt", part.attempt), ("cause", part.cause or None)):
                if value is not None:
                    attributes[f"legato.{name}"] = value
            span: Span = self._tracer.start_span(
                part.name,
                context=within,
                attributes=attributes,
                start_time=start_ns + round(part.start_s * 1e9),
            )
            span.end(start_ns + round((part.start_s + part.seconds) * 1e9))

    def _attributes(self, timeline: RequestTimeline, operation: str) -> Mapping[str, AttributeValue]:
        """The attributes of a request's span: by OpenTelemetry's conventions for generative AI and HTTP, and Legato's
        own for what these have no words for."""
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "legato",
            "gen_ai.request.model": timeline.model,
            "gen_ai.response.model": timeline.model,
            "gen_ai.response.id": timeline.request_id,
            "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.num_generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": timeline.num_cached_tokens,
            "http.request.method": "POST",
            "http.route": timeline.endpoint,
            "legato.slo_class": timeline.terms.slo.name,
            "legato.outcome": timeline.outcome,
            "legato.workers": timeline.workers,
        }
        sequences = timeline.sequences
        if sequences:
            found["gen_ai.request.max_tokens"] = max(sequence.max_tokens for sequence in sequences)
        if len(sequences) != 1:
            found["gen_ai.request.choice.count"] = len(sequences)
        # The conventions want one reason for each choice, in their order: if one is missing, tell none.
        reasons = [sequence.finish_reason for sequence in sequences if sequence.finish_reason is not None]
        if reasons and len(reasons) == len(sequences):
            found["gen_ai.response.finish_reasons"] = reasons
        if timeline.ttft_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = timeline.ttft_s
        if timeline.kept_promise is not None:
            found["legato.kept_promise"] = timeline.kept_promise
        if timeline.status is not None:
            found["http.response.status_code"] = timeline.status
        if timeline.outcome != "finished":
            found["error.type"] = timeline.outcome
        return found
