"""Where telemetry goes over OTLP (HTTP with protobuf): as a flag says, or OpenTelemetry's own environment variables.

The variables are those of https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ and of
https://opentelemetry.io/docs/specs/otel/protocol/exporter/. What is not read here (headers, timeouts, certificates,
compression, intervals, limits, samplers) the SDK reads itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from gpuinfer import __version__
from gpuinfer.errors import UsageError

log = logging.getLogger(__name__)

Signal = Literal["traces", "metrics", "logs"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
PROTOCOL = "http/protobuf"
SERVICE = "gpuinfer"


def destinations(flag: str, endpoint: str | None, signals: tuple[Signal, ...] = SIGNALS) -> dict[Signal, str | None]:
    """Of the `signals` those that are exported, each with its URL; None: the one that the SDK finds by its variables.

    `endpoint`, the value of `flag`, is that of a collector (http://host:4318), or of one signal with its path
    (http://host:4318/v1/traces). Without it a signal is exported where a variable names an endpoint for it, or `otlp`
    as its exporter. Raises `UsageError` for an endpoint that is no URL; what is not supported in a variable is warned
    of, and that signal left out.
    """
    if variable("SDK_DISABLED").lower() == "true":
        return {}
    found: dict[Signal, str | None] = {}
    for signal in signals:
        name = signal.upper()
        exporters = {one.strip().lower() for one in variable(f"{name}_EXPORTER").split(",")} - {""}
        named = variable(f"EXPORTER_OTLP_{name}_ENDPOINT") or variable("EXPORTER_OTLP_ENDPOINT")
        if not (endpoint or named or "otlp" in exporters) or (exporters and "otlp" not in exporters):
            if others := exporters - {"none"}:
                what = "OTEL_%s_EXPORTER=%s is not supported, and no %s are exported. Set it to otlp or none."
                log.warning(what, name, ",".join(sorted(others)), signal)
            continue
        protocol = variable(f"EXPORTER_OTLP_{name}_PROTOCOL") or variable("EXPORTER_OTLP_PROTOCOL") or PROTOCOL
        if protocol != PROTOCOL:
            what = "OTLP with the protocol %s is not supported, and no %s are exported. Set the protocol to %s."
            log.warning(what, protocol, signal, PROTOCOL)
            continue
        for place in (endpoint, named):
            if place and not place.startswith(("http://", "https://")):
                source = flag if place == endpoint else "the endpoint in the environment"
                raise UsageError(f"{source} {place}: telemetry is sent over HTTP. Give http://host:4318.")
        if endpoint is None:
            found[signal] = None
        elif (only := _signal_in(endpoint)) is None:
            found[signal] = f"{endpoint.rstrip('/')}/v1/{signal}"
        elif only == signal:
            found[signal] = endpoint
    return found


def _signal_in(endpoint: str) -> Signal | None:
    """The signal whose own path an endpoint ends with."""
    return next((signal for signal in SIGNALS if endpoint.endswith(f"/v1/{signal}")), None)


def variable(name: str) -> str:
    """The value of `OTEL_…`; empty where it is not set."""
    return os.environ.get(f"OTEL_{name}", "").strip()


def resource(facts: Mapping[str, Any]) -> Any:
    """The SDK's `Resource` of this process, with these attributes; what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    say comes first. The extra `otel` is installed.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": SERVICE, "service.version": __version__, **facts}
    return Resource.create(own).merge(OTELResourceDetector().detect())
