"""/v1/evaluate of a running server: JSON and safetensors, and what is no row."""

from __future__ import annotations

import numpy as np
import pytest

from gpuinfer.models.row_format import MEDIA_TYPE, answer_from_body, rows_to_body, to_body

ROW = [1.0] * 4 + [0.25] * 12
TENSORS = {"Content-Type": MEDIA_TYPE}


def block(*rows: list[float], dtype: str = "float32") -> np.ndarray:
    return np.array(rows, dtype)


def test_one_row_is_answered_as_one(rows):
    answer = rows.ask("/v1/evaluate", {"x": ROW})
    assert answer.status == 200
    assert {name: len(values) for name, values in answer.json["y"].items()} == {"policy": 4, "values": 2}


def test_json_and_tensors_have_the_same_answers(rows):
    said = rows.ask("/v1/evaluate", {"rows": [ROW, ROW[::-1]]}).json["outputs"]
    answer = rows.ask("/v1/evaluate", rows_to_body(block(ROW, ROW[::-1])), TENSORS)
    assert answer.headers["content-type"] == MEDIA_TYPE
    policy, values = answer_from_body(answer.body)
    finite = np.array([[-np.inf if one is None else one for one in row] for row in said["policy"]], np.float32)
    np.testing.assert_allclose(finite, policy, rtol=1e-6)
    np.testing.assert_allclose(np.array(said["values"], np.float32), values, rtol=1e-6)


def test_the_answer_has_the_form_that_is_asked_for(rows):
    answer = rows.ask("/v1/evaluate", rows_to_body(block(ROW)), {**TENSORS, "Accept": "application/json"})
    assert set(answer.json["outputs"]) == {"policy", "values"}
    answer = rows.ask("/v1/evaluate", {"x": ROW}, {"Accept": MEDIA_TYPE})
    assert answer.headers["content-type"] == MEDIA_TYPE


BAD = {
    "no rows": {"rows": []},
    "neither": {},
    "both": {"rows": [ROW], "x": ROW},
    "too short a row": {"x": ROW[1:]},
    "one row too short": {"rows": [ROW, ROW[1:]]},
    "too many rows": {"rows": [ROW] * 5000},
    "a text": {"x": "1, 2"},
    "texts": {"x": ["1"] * 16},
    "an unknown field": {"x": ROW, "y": 1},
    "too large a number": {"x": [1e300, *ROW[1:]]},
    "a NaN": b'{"x": [NaN' + b", 1" * 15 + b"]}",
    "no object": [ROW],
    "an empty body": b"",
}
BAD_TENSORS = {
    "another dtype": rows_to_body(block(ROW, dtype="float64")),
    "another width": rows_to_body(block(ROW[1:])),
    "another rank": rows_to_body(block(ROW)[None]),
    "no rows": rows_to_body(block(ROW)[:0]),
    "several tensors": to_body({"a": block(ROW), "b": block(ROW)}),
    "a NaN": rows_to_body(block([np.nan, *ROW[1:]])),
    "an infinite number": rows_to_body(block([np.inf, *ROW[1:]])),
    "fewer bytes than it says": rows_to_body(block(ROW))[:-4],
    "JSON": b'{"x": [1]}',
    "nothing": b"",
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_is_no_row_is_400(rows, body):
    answer = rows.ask("/v1/evaluate", body)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_what_is_no_tensor_of_rows_is_400(rows, body):
    answer = rows.ask("/v1/evaluate", body, TENSORS)
    assert answer.status == 400, answer.body


def test_rows_to_which_there_is_no_answer_fail_alone_and_are_not_the_servers_fault(rows):
    answer = rows.ask("/v1/evaluate", {"x": [3e38] * 16})
    assert (answer.status, answer.error["code"]) == (422, "no_answer")
    assert rows.ask("/v1/evaluate", {"x": ROW}).status == 200


def test_text_is_not_asked_of_a_network_of_rows(rows):
    answer = rows.ask("/v1/chat/completions", {"messages": []})
    assert answer.status == 404
    assert "/v1/evaluate" in answer.error["message"]


def test_the_model_says_what_it_takes(rows):
    (model,) = rows.ask("/v1/models").json["data"]
    assert (model["id"], model["kind"], model["features"], model["input_dtype"]) == (
        "blobnet-small",
        "rows",
        16,
        "float32",
    )
    assert model["max_rows"] >= 1
