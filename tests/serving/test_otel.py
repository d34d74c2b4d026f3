"""A span for each request, sent to a collector of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from replica_servers import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list]]:
    """Its address, and the spans that have come."""
    spans: list = []

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receive)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_is_a_span_of_the_trace_that_it_belongs_to(collector, tmp_path):
    endpoint, spans = collector
    with serving("--model", "tiny", "-B", "slots=2", "--otlp-endpoint", endpoint, "-v", folder=tmp_path) as server:
        asked = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        assert server.ask("/v1/completions", asked, headers).status == 200
        assert server.ask("/v1/completions", {**asked, "n": 1000}).status == 400
        assert server.end() == 0  # which sends what is left
        assert "POST /v1/completions 200 in " in server.log
        assert "id mine" in server.log
        assert TRACE in server.log
    good, bad = spans
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (TRACE, PARENT)
    assert good.name == "POST /v1/completions"
    told = {one.key: one.value for one in good.attributes}
    assert told["gpuinfer.request_id"].string_value == "mine"
    assert told["gen_ai.usage.output_tokens"].int_value == 4
    assert [event.name for event in good.events] == ["admitted", "first token"]
    assert bad.status.code == 2


def test_a_collector_must_be_an_address(gpuinfer):
    code, _, err = gpuinfer("serve", "--model", "tiny", "--otlp-endpoint", "localhost:4318")
    assert code == 2
    assert "http://host:4318" in err
