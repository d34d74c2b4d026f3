"""The OpenAPI document, and requests that schemathesis makes of it."""

from __future__ import annotations

import pytest
import schemathesis
from counts import examples
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as openapi

CHECKS = [
    not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
]


@pytest.mark.parametrize("kind", ["tiny", "rows"])
def test_every_route_of_the_document_answers_as_it_says(kind, request):
    server = request.getfixturevalue(kind)
    answer = server.ask("/openapi.json")
    assert answer.status == 200
    schema = schemathesis.openapi.from_dict(answer.json)
    schema.config.base_url = server.url
    for found in schema.get_all_operations():
        operation = found.ok()

        @_given(operation)
        def probe(case):
            response = case.call(timeout=60)
            case.validate_response(response, checks=CHECKS)

        probe()


def _given(operation):
    def wrap(test):
        limited = settings(
            max_examples=examples(4), deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        return limited(given(case=operation.as_strategy())(test))

    return wrap
