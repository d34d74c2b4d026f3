"""The OpenAPI document (3.1), made from the table of routes: what a route says of itself is what the document says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpuinfer import __version__
from gpuinfer.http.paths import Route

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = {
    "400": "What is asked cannot be, and the message says why.",
    "401": "No key, or a wrong one.",
    "403": "Not under this name, or not without an admin key.",
    "404": "No such path or model.",
    "405": "Not with this method.",
    "408": "The request's deadline has passed, or it came too slowly.",
    "413": "A body that is too large.",
    "422": "The model's answer to this is no answer.",
    "429": "The queue is full. Come again after Retry-After seconds.",
    "500": "The model failed.",
    "503": "Loading or shutting down. Come again after Retry-After seconds.",
}
TEMPLATE = "#/components/schemas/{name}"


def document(routes: Sequence[Route], url: str = "/") -> dict[str, Any]:
    """Of these routes. One whose `openapi` is {"hidden": True} is left out."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not route.openapi.get("hidden"):
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpuinfer", "version": __version__, "description": "Answers of one model."},
        "servers": [{"url": url}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    own = route.openapi
    made: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').rstrip('_')}",
        "responses": {**_errors(), **own.get("responses", {"200": {"description": "Done."}})},
    }
    if route.access != "open":
        made["security"] = [{"key": []}, {}]
    if (body := own.get("body")) is not None:
        content = {"application/json": {"schema": _schema(body, own.get("required", ()), schemas)}}
        made["requestBody"] = {"required": True, "content": {**content, **own.get("content", {})}}
    if parameters := own.get("parameters"):
        made["parameters"] = parameters
    return made


def _errors() -> dict[str, Any]:
    shape = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {code: {"description": text, "content": shape} for code, text in ERRORS.items()}


def _schema(body: Any, required: Sequence[str], schemas: dict[str, Any]) -> Mapping[str, Any]:
    """Of a msgspec structure, with its parts under `schemas`; `required` are fields without which it is nothing."""
    (schema,), parts = msgspec.json.schema_components([body], ref_template=TEMPLATE)
    schemas.update(parts)
    if not required:
        return schema
    return {"allOf": [schema, {"required": list(required)}]}


def answers(description: str, schema: Mapping[str, Any], *other: str) -> dict[str, Any]:
    """The `responses` of a route that answers 200 with JSON of this schema, or with one of the `other` media types."""
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    return {"200": {"description": description, "content": {**content, **{kind: {} for kind in other}}}}


def holding(*names: str) -> dict[str, Any]:
    """The schema of an object with at least these fields."""
    return {"type": "object", "required": list(names)}
