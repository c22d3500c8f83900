"""A span a request, as a collector gets it over OTLP/HTTP."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from zlm.frontend.traces import Tracer
from zlm.messages import Delta, Deltas

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Keeps the spans that are sent to ``url``."""

    def __init__(self) -> None:
        self.resources: list[Any] = []
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/x-protobuf"
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(resource.resource)
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Be silent."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


def test_a_request_is_one_span_with_its_phases(make_house, collector):
    house = make_house()
    house.server.trace_to(Tracer(collector.url, "tiny", 0))

    def tokenizer(command):
        times = (command.arrival + 0.25, command.arrival + 0.75)
        return [
            Deltas(
                [Delta(command.request_id, 0, "a", 5, 2, 3, finish_reason="length", times=times)]
            )
        ]

    house.tokenizer = tokenizer
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    body = {"prompt": "private", "max_tokens": 3, "temperature": 0.5}
    assert house.post("/v1/completions", body, headers).status == 200
    house.ask("GET", "/health")  # probes are not traced
    house.ask("GET", "/nowhere")
    house.server.close()
    span, lost = collector.spans
    assert span.name == "POST /v1/completions" and span.kind == span.SPAN_KIND_SERVER
    assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == PARENT
    told = values(span.attributes)
    assert told.pop("gen_ai.latency.e2e") >= 0
    told.pop("gen_ai.latency.time_in_model_decode")
    assert told.pop("gen_ai.latency.time_in_queue") == pytest.approx(0.25)
    assert told.pop("gen_ai.latency.time_to_first_token") == pytest.approx(0.75)
    assert told.pop("gen_ai.latency.time_in_model_prefill") == pytest.approx(0.5)
    assert [v.string_value for v in told.pop("gen_ai.response.finish_reasons").values] == ["length"]
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.cached_tokens": 2,
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
    }
    scheduled, first = span.events
    assert (scheduled.name, first.name) == ("first scheduled", "first token")
    since = [event.time_unix_nano - span.start_time_unix_nano for event in span.events]
    assert since == pytest.approx([0.25e9, 0.75e9], abs=1e6)
    assert values(lost.attributes)["error.type"] == "not_found" and not lost.parent_span_id
    assert b"private" not in span.SerializeToString()
    assert values(collector.resources[0].attributes)["service.name"] == "zlm"


def test_a_client_that_left_is_told(make_house, collector):
    house = make_house()
    house.server.trace_to(Tracer(collector.url, "tiny", 0))
    house.tokenizer = lambda command: []
    client = house.client()
    client.request("POST", "/v1/completions", {"prompt": "x"})
    client.leave()
    house.server.close()
    (span,) = collector.spans
    assert values(span.attributes)["error.type"] == "client gone"


def test_without_a_collector_nothing_is_held_up(make_house):
    house = make_house()
    house.server.trace_to(Tracer("http://127.0.0.1:9/v1/traces", "tiny", 0))
    assert house.complete().status == 200
    house.server.close()
