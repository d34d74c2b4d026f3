"""Servers of rows and of several models: JSON and safetensors, which model answers, and rows that fail alone."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from replica_servers import bearer, serving

from gpuinfer.models.row_format import MEDIA_TYPE, answer_from_body, rows_to_body, to_body

ROW = [1.0] * 4 + [0.25] * 12
TENSORS = {"Content-Type": MEDIA_TYPE}
KEY, ADMIN = bearer("the-api-key"), bearer("the-admin-key")


def block(*rows: list[float], dtype: str = "float32") -> np.ndarray:
    return np.array(rows, dtype)


def test_json_and_tensors_have_the_same_answers_in_the_form_that_is_asked_for(rows):
    one = rows.ask("/v1/evaluate", {"x": ROW})
    assert {name: len(values) for name, values in one.json["y"].items()} == {"policy": 4, "values": 2}
    said = rows.ask("/v1/evaluate", {"rows": [ROW, ROW[::-1]]}).json["outputs"]
    answer = rows.ask("/v1/evaluate", rows_to_body(block(ROW, ROW[::-1])), TENSORS)
    assert answer.headers["content-type"] == MEDIA_TYPE
    policy, values = answer_from_body(answer.body)
    finite = np.array([[-np.inf if one is None else one for one in row] for row in said["policy"]], np.float32)
    np.testing.assert_allclose(finite, policy, rtol=1e-6)
    np.testing.assert_allclose(np.array(said["values"], np.float32), values, rtol=1e-6)
    answer = rows.ask("/v1/evaluate", rows_to_body(block(ROW)), {**TENSORS, "Accept": "application/json"})
    assert set(answer.json["outputs"]) == {"policy", "values"}
    assert rows.ask("/v1/evaluate", {"x": ROW}, {"Accept": MEDIA_TYPE}).headers["content-type"] == MEDIA_TYPE
    (model,) = rows.ask("/v1/models").json["data"]
    assert model["max_rows"] >= 1
    named = {name: model[name] for name in ("id", "kind", "features", "input_dtype")}
    assert named == {"id": "blobnet-small", "kind": "rows", "features": 16, "input_dtype": "float32"}


BAD: list[Any] = [
    {"rows": []}, {}, {"rows": [ROW], "x": ROW}, {"x": ROW[1:]}, {"rows": [ROW, ROW[1:]]}, {"rows": [ROW] * 5000},
    {"x": "1, 2"}, {"x": ["1"] * 16}, {"x": ROW, "y": 1}, {"x": [1e300, *ROW[1:]]},
    b'{"x": [NaN' + b", 1" * 15 + b"]}", [ROW], b"",
]  # fmt: skip
BAD_TENSORS = [
    rows_to_body(block(ROW, dtype="float64")), rows_to_body(block(ROW[1:])), rows_to_body(block(ROW)[None]),
    rows_to_body(block(ROW)[:0]), to_body({"a": block(ROW), "b": block(ROW)}),
    rows_to_body(block([np.nan, *ROW[1:]])), rows_to_body(block([np.inf, *ROW[1:]])), rows_to_body(block(ROW))[:-4],
    b'{"x": [1]}', b"",
]  # fmt: skip


def test_what_is_no_row_is_400_and_rows_without_an_answer_fail_alone(rows):
    for body, headers in [*((body, {}) for body in BAD), *((body, TENSORS) for body in BAD_TENSORS)]:
        answer = rows.ask("/v1/evaluate", body, headers)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), (body, answer.body)
    answer = rows.ask("/v1/evaluate", {"x": [3e38] * 16})
    assert (answer.status, answer.error["code"]) == (422, "no_answer")
    assert rows.ask("/v1/evaluate", {"x": ROW}).status == 200


def test_a_model_takes_its_own_name_and_requests_of_its_kind(rows):
    assert rows.ask("/v1/evaluate", {"x": ROW, "model": "blobnet-small"}).status == 200
    assert rows.ask("/v1/evaluate", {"x": ROW, "model": "other"}).error["code"] == "model_not_found"
    answer = rows.ask("/v1/chat/completions", {"messages": []})
    assert answer.status == 404
    assert "/v1/evaluate" in answer.error["message"]


def beside(server: Any, bad: bytes, headers: dict[str, str]) -> set[tuple[str, int]]:
    """How requests fare that many clients send at once, two of whom send `bad`: they share batches."""
    found: Counter[tuple[str, int]] = Counter()

    def ask(kind: str, body: bytes, headers: dict[str, str]) -> None:
        for _ in range(40):
            found[kind, server.ask("/v1/evaluate", body, headers).status] += 1

    good = json.dumps({"x": [0.5] * 16}).encode()
    threads = [threading.Thread(target=ask, args=("good", good, {})) for _ in range(6)]
    threads += [threading.Thread(target=ask, args=("bad", bad, headers)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return set(found)


POISONED = """
import torch


class Model(torch.nn.Module):
    def forward(self, rows):
        if (rows[:, 0] == 13).any():
            raise RuntimeError("thirteen")
        return {"doubled": rows * 2}


def make(**sizes):
    return Model()
"""


def test_a_row_that_is_wrong_spoils_nobody_elses_answer(rows, tmp_path):
    """Nor one at which a network of one's own fails, which answers by its own names."""
    bad = rows_to_body(np.full((1, 16), np.nan, np.float32))
    assert beside(rows, bad, TENSORS) == {("good", 200), ("bad", 400)}
    (tmp_path / "poisoned.py").write_text(POISONED)
    words = ("--model", "poisoned:make", "--features", 16, "--strategy", "adaptive", "-B", "threads=1")
    with serving(*words, "-B", "compute=float32", folder=tmp_path) as server:
        assert beside(server, json.dumps({"x": [13.0] * 16}).encode(), {}) == {("good", 200), ("bad", 500)}
        assert "thirteen" not in server.ask("/v1/evaluate", {"x": [13.0] * 16}).error["message"], "nothing internal"
        assert server.ask("/v1/evaluate", {"x": [1] * 16}).json == {"y": {"doubled": [2] * 16}}
        assert server.ask("/v1/models").json["data"][0]["id"] == "poisoned:make"
        assert server.ask("/health").json["status"] == "ready"


def complete(server: Any, headers: dict[str, str] = KEY, **more: Any) -> Any:
    asked = {"prompt": "one two", "max_tokens": 3, "temperature": 0, **more}
    return server.ask("/v1/completions", asked, headers)


def test_a_request_says_which_of_several_models_answers(several):
    listed = several.ask("/v1/models", headers=KEY).json["data"]
    families = [("chat", "text", "qwen2"), ("small", "text", "qwen2"), ("net", "rows", "blobnet-small")]
    assert [(one["id"], one["kind"], one["family"]) for one in listed] == families
    for name in ("chat", "small"):
        assert complete(several, model=name).json["model"] == name
        assert several.ask(f"/predict?model={name}", {"prompt": "one"}, KEY).status == 200
        assert several.ask("/predict", {"prompt": "one", "model": name}, KEY).status == 200
    said = [
        several.ask("/v1/evaluate", {"x": ROW}, KEY).json,  # the only one that takes rows
        several.ask("/v1/evaluate", {"x": ROW, "model": "net"}, KEY).json,
        several.ask("/v1/evaluate?model=net", {"x": ROW}, KEY).json,
    ]
    assert said[0] == said[1] == said[2]
    answer = several.ask("/v1/evaluate?model=net", rows_to_body(block(ROW)), {**TENSORS, **KEY})
    np.testing.assert_allclose(answer_from_body(answer.body)[1][0], said[0]["y"]["values"], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/v1/completions", {"prompt": "a"}, 400, "one of 'chat', 'small'"),
        ("/v1/completions", {"prompt": "a", "model": "x"}, 404, "'chat', 'small', 'net'"),
        ("/v1/completions", {"prompt": "a", "model": "net"}, 404, "POST /v1/evaluate"),
        ("/v1/evaluate", {"x": ROW, "model": "chat"}, 404, "POST /v1/completions"),
        ("/v1/evaluate?model=nobody", {"x": ROW}, 404, "has 'chat'"),
        ("/v1/completions", b"no JSON", 400, "which model?"),
        ("/v1/update_weights", {"version": "2", "weights": "nowhere"}, 400, "'net'"),
        ("/v1/free_memory", {}, 400, "'net'"),
        ("/v1/update_weights", {"version": "2", "weights": "nowhere", "model": "small"}, 400, "nowhere"),
    ],
)
def test_a_wrong_model_is_answered_with_those_there_are(several, path, body, status, why):
    answer = several.ask(path, body, ADMIN)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert why in answer.error["message"]
    assert answer.error["param"] in ("model", None)


def test_health_stats_and_metrics_have_a_line_a_model(several):
    complete(several, model="small")
    health = several.ask("/health").json
    assert (health["model"], health["kind"], health["status"]) == ("chat, small, net", "several", "ready")
    assert [one["model"] for one in health["models"]] == ["chat", "small", "net"]
    stats = several.ask("/stats", headers=KEY).json
    lines = {line["name"]: line for line in stats["models"]}
    assert [line["share"] for line in lines.values()] == [2.0, 1.0, 1.0]
    assert lines["small"]["output_tokens"] >= 3
    assert stats["requests"] == sum(line["requests"] for line in lines.values())
    metrics = several.ask("/metrics", headers=KEY).body.decode()
    assert 'gpuinfer_model_requests_total{model="small"}' in metrics
    assert 'gpuinfer_model_info{name="net"} 1.0' in metrics


def test_all_models_answer_at_once_as_each_does_alone(several):
    alone = {name: complete(several, model=name, max_tokens=40).json["choices"] for name in ("chat", "small")}
    values = several.ask("/v1/evaluate", {"rows": [ROW] * 64}, KEY).json["outputs"]["values"]
    answered: list[bool] = []

    def texts(name: str) -> None:
        for _ in range(4):
            answered.append(complete(several, model=name, max_tokens=40).json["choices"] == alone[name])

    def evaluate() -> None:  # whose last bits may depend on how many cores it has
        for _ in range(20):
            found = several.ask("/v1/evaluate", {"rows": [ROW] * 64}, KEY).json["outputs"]["values"]
            answered.append(np.allclose(found, values, rtol=1e-4, atol=1e-5))

    threads = [threading.Thread(target=texts, args=(name,)) for name in alone] + [threading.Thread(target=evaluate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answered == [True] * 28


@pytest.mark.thorough
def test_a_fleet_of_several_models_passes_names_through(tmp_path):
    words = ("--model", "chat=tiny,net=blobnet-small", "--features", 16, "--actions", 4, "--seats", 2, "--replicas", 2)
    with serving(*words, "-B", "slots=8", "-B", "threads=1", folder=tmp_path) as fleet:
        listed = fleet.ask("/v1/models").json["data"]
        assert [(one["id"], "max_model_len" in one) for one in listed] == [("chat", True), ("net", False)]
        assert complete(fleet, {}, model="chat").json["model"] == "chat"
        assert fleet.ask("/v1/evaluate?model=net", {"x": ROW}).status == 200
        assert complete(fleet, {}, model="other").status == 404
        assert {line["name"] for line in fleet.ask("/stats").json["models"]} == {"chat", "net"}
