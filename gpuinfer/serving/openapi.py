"""The OpenAPI document (3.1) of a table of routes, made from what the routes say of themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpuinfer import __version__
from gpuinfer.http.route_table import Route

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
PLAIN_PATH = re.compile(r"[/{}]+")
TEMPLATE = "#/components/schemas/{name}"


def openapi_document(routes: Sequence[Route], url: str = "/") -> dict[str, Any]:
    """The OpenAPI document of these routes, but those whose `openapi` is {"hidden": True}."""
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
    named, form = own.get("error", ("Error", ERROR))
    schemas[named] = form
    error = {"application/json": {"schema": {"$ref": TEMPLATE.format(name=named)}}}
    errors = {code: {"description": text, "content": error} for code, text in ERRORS.items()}
    made: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{PLAIN_PATH.sub('_', route.path).rstrip('_')}",
        "responses": {**errors, **own.get("responses", {"200": {"description": "Done."}})},
    }
    if route.access != "open":
        made["security"] = [{"key": []}, {}]
    if (body := own.get("body")) is not None:
        (schema,), parts = msgspec.json.schema_components([body], ref_template=TEMPLATE)
        schemas.update(parts)
        if required := own.get("required"):
            schema = {"allOf": [schema, {"required": list(required)}]}
        content = {"application/json": {"schema": schema}}
        made["requestBody"] = {"required": True, "content": {**content, **own.get("content", {})}}
    if parameters := own.get("parameters"):
        made["parameters"] = parameters
    return made


def json_responses(description: str, schema: Mapping[str, Any], *other: str) -> dict[str, Any]:
    """The `responses` of a route that answers 200 with JSON of this schema, or with one of the `other` media types."""
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    return {"200": {"description": description, "content": {**content, **{kind: {} for kind in other}}}}


def object_schema(*names: str) -> dict[str, Any]:
    """The schema of an object with at least these fields."""
    return {"type": "object", "required": list(names)}
