"""OpenTelemetry: one span a request, with the phases of its life, sent to an OTLP/HTTP collector.

An optional extra: its packages are imported only when --otlp-traces-endpoint is given. A span is
made when its request is over, from the same facts as the log's line, so that tracing costs nothing
while tokens flow. It continues the trace that the client's ``traceparent`` header names. Attribute
names are those of vLLM's spans. Nothing of prompts or answers is in a span.
"""

import time
from typing import Any

from zlm import __version__
from zlm.frontend.exchange import Exchange

EXPORT_SECONDS = 2.0  # that a collector may take; spans it does not take by then are dropped
MOST_PENDING = 2048  # spans that wait to be sent; more are dropped


class Tracer:
    """The way to one collector. Spans are sent in batches by a thread of the library's own."""

    def __init__(self, endpoint: str, model: str, index: int) -> None:
        """*model* is what the server's spans are labelled with, *index* the front end's number."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        facts = {
            "service.name": "zlm",
            "service.version": __version__,
            "service.instance.id": f"frontend-{index}",
            "zlm.model": model,
        }
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        processor = BatchSpanProcessor(exporter, max_queue_size=MOST_PENDING)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("zlm", __version__)
        self._context_of = TraceContextTextMapPropagator().extract
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def record(self, exchange: Exchange) -> None:
        """Make the span of *exchange*, which is over."""
        now = time.monotonic()
        epoch = time.time() - now  # of the monotonic clock, seconds

        def at(moment: float) -> int:
            return int((epoch + moment) * 1e9)

        request, record = exchange.request, exchange.record
        carrier = {name: request.header(name.encode()) for name in ("traceparent", "tracestate")}
        span = self._tracer.start_span(
            f"{request.method} {exchange.route}",
            context=self._context_of({name: value for name, value in carrier.items() if value}),
            kind=self._kind,
            attributes=attributes(exchange, now),
            start_time=at(exchange.received),
        )
        if record.first_token_at:
            span.add_event("first scheduled", timestamp=at(record.started_at))
            span.add_event("first token", timestamp=at(record.first_token_at))
        if exchange.status >= 500 or exchange.fault:
            span.set_status(self._failed)
        span.end(at(now))

    def close(self) -> None:
        """Send what waits, and end."""
        self._provider.shutdown()


def attributes(exchange: Exchange, now: float) -> dict[str, Any]:
    """Return the attributes of the span of *exchange*, which ended at *now*. Seconds."""
    record = exchange.record
    facts: dict[str, Any] = {
        "http.request.method": exchange.request.method or "-",
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "gen_ai.request.id": exchange.request_id,
        "gen_ai.latency.e2e": now - exchange.received,
    }
    if record.num_sequences:
        facts["gen_ai.usage.prompt_tokens"] = exchange.num_prompt_tokens
        facts["gen_ai.usage.completion_tokens"] = exchange.num_output_tokens
        facts["gen_ai.usage.cached_tokens"] = record.num_cached_tokens
    facts |= {f"gen_ai.request.{name}": value for name, value in record.params.items()}
    if record.finish_reasons:
        facts["gen_ai.response.finish_reasons"] = tuple(record.finish_reasons)
    if record.first_token_at:
        facts["gen_ai.latency.time_in_queue"] = record.started_at - exchange.received
        facts["gen_ai.latency.time_to_first_token"] = record.first_token_at - exchange.received
        facts["gen_ai.latency.time_in_model_prefill"] = record.first_token_at - record.started_at
        facts["gen_ai.latency.time_in_model_decode"] = now - record.first_token_at
    gone = "client gone" if exchange.client_gone else ""
    if error := exchange.fault or record.failure or record.rejection or gone:
        facts["error.type"] = error
    return facts
