"""Bodies of KServe's protocol: what is read is what was written, and what is malformed is refused with the cure."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gpuinfer.serving.kserve_tensors import (
    BYTES,
    DATATYPES,
    DTYPES,
    InferRequest,
    read_infer_request,
    write_infer_response,
)
from gpuinfer.serving.openai.requests import BadRequest

SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
TENSORS = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: arrays.arrays(
        dtype, SHAPES, elements={"allow_nan": False, "allow_infinity": False} if dtype.startswith("float") else None
    )
)


def body_of(tensors: dict[str, Any], binary: bool, **more: Any) -> tuple[bytes, str | None]:
    inputs, data = [], b""
    for name, tensor in tensors.items():
        one: dict[str, Any] = {"name": name}
        if isinstance(tensor, list):
            raw = b"".join(struct.pack("<I", len(text)) + text for text in tensor)
            one |= {"datatype": BYTES, "shape": [len(tensor)]}
        else:
            raw = tensor.tobytes()
            one |= {"datatype": DATATYPES[tensor.dtype.name], "shape": list(tensor.shape)}
        if binary:
            one["parameters"] = {"binary_data_size": len(raw)}
            data += raw
        else:
            one["data"] = [text.decode() for text in tensor] if isinstance(tensor, list) else tensor.ravel().tolist()
        inputs.append(one)
    head = json.dumps({"inputs": inputs, **more}).encode()
    return head + data, str(len(head)) if data else None


@given(st.dictionaries(st.text(min_size=1, max_size=5), TENSORS, max_size=4), st.booleans())
def test_what_is_read_is_what_was_written(tensors, binary):
    found = read_infer_request(*body_of(tensors, binary)).tensors
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].flags.aligned
        np.testing.assert_array_equal(found[name], tensor)


@given(st.lists(st.text(), max_size=5), st.booleans())
def test_texts_too(texts, binary):
    encoded = [text.encode("utf-8", "replace") for text in texts]
    assert read_infer_request(*body_of({"text": encoded}, binary)).tensors == {"text": encoded}


@given(st.dictionaries(st.text(min_size=1, max_size=5), TENSORS, min_size=1, max_size=4), st.booleans())
def test_a_response_reads_as_it_was_written(tensors, binary):
    body, length = write_infer_response(InferRequest("7", {}, {"binary_data_output": binary}, ()), "m", "1", tensors)
    told = json.loads(body[:length])
    assert (told["model_name"], told["model_version"], told["id"]) == ("m", "1", "7")
    again = json.dumps({"inputs": told["outputs"]}).encode()  # the same form
    data = b"" if length is None else body[length:]
    found = read_infer_request(again + data, str(len(again)) if data else None).tensors
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_nested_values_are_read_and_any_byte_but_0_is_true():
    one = {"name": "x", "shape": [2, 2], "datatype": "INT32", "data": [[1, 2], [3, 4]]}
    found = read_infer_request(json.dumps({"inputs": [one]}).encode(), None).tensors["x"]
    assert found.tolist() == [[1, 2], [3, 4]]
    head = b'{"inputs": [{"name": "x", "shape": [3], "datatype": "BOOL", "parameters": {"binary_data_size": 3}}]}'
    assert read_infer_request(head + b"\0\1\7", str(len(head))).tensors["x"].tolist() == [False, True, True]


X = {"name": "x", "shape": [2], "datatype": "FP32"}
BAD: list[tuple[Any, str, int | None]] = [
    ({}, "inputs", None),
    ([], "object", None),
    ({"inputs": [X]}, "neither `data` nor", None),
    ({"inputs": [{**X, "data": [1]}]}, "2 values, and 1 came", None),
    ({"inputs": [{**X, "shape": [2, 1], "data": [[1, 2]]}]}, "nested as [1, 2], and its shape is [2, 1]", None),
    ({"inputs": [{**X, "data": ["a", "b"]}]}, "FP32 values", None),
    ({"inputs": [{**X, "datatype": "INT8", "data": [1, 300]}]}, "INT8 values", None),
    ({"inputs": [{**X, "datatype": "FP8", "data": [1, 2]}]}, "of FP8", None),
    ({"inputs": [{**X, "shape": [-2], "data": [1, 2]}]}, "a shape that is none", None),
    ({"inputs": [{**X, "shape": [1 << 50], "data": [1, 2]}]}, "a shape that is none", None),
    ({"inputs": [{**X, "shape": [1 << 80], "data": [1, 2]}]}, "a shape that is none", None),
    ({"inputs": [{**X, "shape": [0, 1 << 39, 1 << 39], "data": []}]}, "a shape that is none", None),
    (
        {"inputs": [{**X, "shape": [0, 1 << 39, 1 << 39], "parameters": {"binary_data_size": 0}}]},
        "a shape that is none",
        0,
    ),
    ({"inputs": [{**X, "data": [1, 2]}] * 2}, "two inputs", None),
    ({"inputs": [{**X, "data": [1, 2], "parameters": {"shared_memory_region": "m"}}]}, "shared memory", None),
    ({"inputs": [{**X, "data": [1, 2], "parameters": {"odd": 1}}]}, "'odd'", None),
    ({"inputs": [{**X, "parameters": {"binary_data_size": 8}}]}, "0 are left", None),
    ({"inputs": [{**X, "parameters": {"binary_data_size": 4}}]}, "of shape [2] is 8 bytes, and 4 came", 4),
    ({"inputs": [{**X, "parameters": {"binary_data_size": -1}}]}, "binary_data_size", 4),
    ({"inputs": [{**X, "parameters": {"binary_data_size": "8"}}]}, "binary_data_size", 8),
    ({"inputs": [{**X, "data": [1, 2], "parameters": {"binary_data_size": 8}}]}, "both", 8),
    ({"inputs": [{**X, "parameters": {"binary_data_size": 8}}]}, "1 bytes behind", 9),
    ({"inputs": [{**X, "datatype": BYTES, "parameters": {"binary_data_size": 8}}]}, "elements of BYTES", 8),
    ({"inputs": [{**X, "datatype": BYTES, "shape": [1 << 20], "parameters": {"binary_data_size": 8}}]}, "the most", 8),
    ({"inputs": [{**X, "datatype": BYTES, "data": [1, 2]}]}, "list of texts", None),
]


@pytest.mark.parametrize(("asked", "why", "extra"), BAD)
def test_what_is_malformed_is_refused(asked, why, extra):
    head = json.dumps(asked).encode()
    with pytest.raises(BadRequest) as told:
        read_infer_request(head + b"\xff" * (extra or 0), None if extra is None else str(len(head)))
    assert why in str(told.value)


@pytest.mark.parametrize("length", ["", "-1", "x", "1000", "٣", pytest.param("9" * 5000, id="5000 digits")])
def test_a_length_of_the_json_that_is_none_is_refused(length):
    with pytest.raises(BadRequest, match="Inference-Header-Content-Length"):
        read_infer_request(b'{"inputs": []}', length)


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 300).map(str)))
def test_no_bytes_break_it(body, length):
    with contextlib.suppress(BadRequest):
        read_infer_request(body, length)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v2/logging", 404), ("POST", "/v2", 405), ("GET", "/v2/models/x/y/z", 404)]
)
def test_every_error_under_v2_is_a_text_as_tritons_clients_read_it(rows, method, path, status):
    answer = rows.ask(path, {} if method == "POST" else None)
    assert (answer.status, type(answer.json["error"])) == (status, str)
    assert rows.ask("/v1/nowhere").error["type"] == rows.ask("/v2/rerank", {}).error["type"]


def test_an_output_that_there_is_not_is_refused_before_anything_is_computed(rows):
    row = {"name": "rows", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}

    def infer(output):
        return rows.ask("/v2/models/blobnet-small/infer", {"inputs": [row], "outputs": [{"name": output}]})

    assert [one["name"] for one in infer("policy").json["outputs"]] == ["policy"]
    before = rows.ask("/stats").json["requests"]
    refused = infer("nothing")
    assert (refused.status, "'policy'" in refused.json["error"]) == (400, True)
    assert rows.ask("/stats").json["requests"] == before
