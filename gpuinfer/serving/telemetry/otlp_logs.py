"""The log over OTLP: what `-v` would show, with the fields of requests as attributes, and the trace and span that a
record belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gpuinfer import __version__

OURS = logging.getLogger("gpuinfer")
ATTRIBUTES = {  # of a request's fields, in the words of OpenTelemetry's semantic conventions where they have one
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "peer": "network.peer.address",
    "model": "gen_ai.request.model",
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "id": "gpuinfer.request_id",
    "refused": "error.message",
}
IDS = ("trace_id", "span_id")


class LoggedRecord(Struct, frozen=True, array_like=True):
    """A log record as plain values, so that a process can hand it to the one that exports. `created`: seconds since
    1970.
    """

    created: float
    level: int
    logger: str
    message: str
    attributes: dict[str, Any] = {}
    trace_id: str = ""  # in hexadecimal; empty: of no request
    span_id: str = ""

    @classmethod
    def of(cls, record: logging.LogRecord) -> LoggedRecord:
        fields: Mapping[str, Any] = getattr(record, "request", None) or {}
        attributes = {ATTRIBUTES.get(name, f"gpuinfer.{name}"): value for name, value in fields.items()}
        for name in IDS:
            attributes.pop(f"gpuinfer.{name}", None)
        address, colon, port = str(attributes.get("network.peer.address", "")).rpartition(":")
        if colon and port.isdecimal():
            attributes |= {"network.peer.address": address, "network.peer.port": int(port)}
        if record.exc_info and record.exc_info[0] is not None:
            attributes["exception.type"] = record.exc_info[0].__name__
            attributes["exception.message"] = str(record.exc_info[1])
            attributes["exception.stacktrace"] = logging.Formatter().formatException(record.exc_info)
        plain = {name: _exported(one) for name, one in attributes.items()}
        trace, span = (str(fields.get(name, "")) for name in IDS)
        return cls(record.created, record.levelno, record.name, _text(record.getMessage()), plain, trace, span)


def _exported(value: Any) -> str | int | float:
    """As OTLP can have it: integers of 64 bits, and texts in UTF-8."""
    if isinstance(value, float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        return value
    return _text(str(value))


def _text(text: str) -> str:
    """Without halves of characters, which some other server's error message may have."""
    return text.encode(errors="replace").decode()


class LogExport(logging.Handler):
    """A handler of our log that exports in the SDK's own thread, from `attach` to `close`."""

    def __init__(self, url: str | None, resource: Any) -> None:
        """`url`: of the collector's route for logs; None: as the SDK's variables say."""
        from opentelemetry._logs import SeverityNumber
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        super().__init__(logging.INFO)
        self._provider = LoggerProvider(resource, shutdown_on_exit=False)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(url)))
        self._severities = {
            logging.DEBUG: SeverityNumber.DEBUG,
            logging.INFO: SeverityNumber.INFO,
            logging.WARNING: SeverityNumber.WARN,
            logging.ERROR: SeverityNumber.ERROR,
            logging.CRITICAL: SeverityNumber.FATAL,
        }

    def attach(self) -> None:
        """Take what is logged from now on, from INFO upwards. Other handlers get what they got before."""
        attach_log_handler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.export(LoggedRecord.of(record))

    def export(self, logged: LoggedRecord) -> None:
        """Returns at once. A record without ids belongs to the span that is active, if one is."""
        from opentelemetry._logs import LogRecord
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        context = None
        if logged.trace_id and logged.span_id:
            sampled = TraceFlags(TraceFlags.SAMPLED)
            ids = SpanContext(int(logged.trace_id, 16), int(logged.span_id, 16), False, sampled)
            context = set_span_in_context(NonRecordingSpan(ids))
        level = max((one for one in self._severities if one <= logged.level), default=logging.DEBUG)
        self._provider.get_logger(logged.logger, __version__).emit(
            LogRecord(
                timestamp=round(logged.created * 1e9),
                context=context,
                severity_text=logging.getLevelName(level),
                severity_number=self._severities[level],
                body=logged.message,
                attributes=logged.attributes,
            )
        )

    def close(self) -> None:
        """Send what is left. Takes as long as the collector does."""
        detach(self)
        self._provider.shutdown()
        super().close()


def attach_log_handler(handler: logging.Handler) -> None:
    """Give our log another handler, from INFO upwards. Those that it has keep to the level that it had."""
    before = OURS.getEffectiveLevel()
    for one in OURS.handlers:
        one.setLevel(max(one.level, before))
    OURS.addHandler(handler)
    OURS.setLevel(min(before, logging.INFO))


def detach(handler: logging.Handler) -> None:
    OURS.removeHandler(handler)
