"""A receiver of OTLP over HTTP, which decodes with OpenTelemetry's own protobuf classes, and keeps what comes."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as Python has them."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value") for one in attributes}


@dataclass
class Received:
    """`spans`, `metrics` and `logs`: each with the attributes of its resource, in the order in which they came."""

    url: str = ""
    paths: list[str] = field(default_factory=list)  # of all requests
    headers: list[Mapping[str, str]] = field(default_factory=list)
    spans: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    metrics: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    logs: list[tuple[dict[str, Any], Any]] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        if path.endswith("/v1/traces"):
            for traces in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = plain(traces.resource.attributes)
                self.spans += [(about, span) for scope in traces.scope_spans for span in scope.spans]
        elif path.endswith("/v1/metrics"):
            for metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                about = plain(metrics.resource.attributes)
                self.metrics += [(about, metric) for scope in metrics.scope_metrics for metric in scope.metrics]
        else:
            for logs in ExportLogsServiceRequest.FromString(body).resource_logs:
                about = plain(logs.resource.attributes)
                self.logs += [(about, record) for scope in logs.scope_logs for record in scope.log_records]

    def traces(self) -> dict[str, list[Any]]:
        """Spans by their trace, in hexadecimal."""
        found: dict[str, list[Any]] = {}
        for _, span in list(self.spans):
            found.setdefault(span.trace_id.hex(), []).append(span)
        return found

    def latest(self) -> dict[str, Any]:
        """The last that came of each metric."""
        return {metric.name: metric for _, metric in list(self.metrics)}


@contextlib.contextmanager
def receiving(silent: bool = False) -> Iterator[Received]:
    """`silent`: it takes requests, and answers none until its end."""
    received, over = Received(), threading.Event()

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.paths.append(self.path)
            received.headers.append(dict(self.headers))
            if silent:
                over.wait()
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Receive) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        received.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield received
        finally:
            over.set()
            server.shutdown()
            thread.join()
