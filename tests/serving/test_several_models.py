"""Several models in one server: who is asked, how it is told, and that they take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from replica_servers import Server, serving

from gpuinfer.models.row_format import MEDIA_TYPE, answer_from_body, rows_to_body

ROW = [1.0] * 4 + [0.25] * 12
FLAGS = ("--features", 16, "--actions", 4, "--seats", 2, "-B", "slots=8", "--share", "chat=2")
ADMIN = {"Authorization": "Bearer an-admin-key"}


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    (folder / "admin").touch(mode=0o600)
    (folder / "admin").write_text("an-admin-key\n")
    words = ("--model", "chat=tiny,small=tiny,net=blobnet-small", *FLAGS, "--admin-key-file", "admin")
    with serving(*words, folder=folder) as server:
        yield server


def complete(server: Server, **more):
    return server.ask("/v1/completions", {"prompt": "one two", "max_tokens": 3, "temperature": 0, **more})


def test_all_are_listed_with_their_families(several):
    listed = several.ask("/v1/models").json["data"]
    assert [(one["id"], one["kind"], one["family"]) for one in listed] == [
        ("chat", "text", "qwen2"),
        ("small", "text", "qwen2"),
        ("net", "rows", "blobnet-small"),
    ]


@pytest.mark.parametrize("name", ["chat", "small"])
def test_a_request_says_which_model_answers(several, name):
    assert complete(several, model=name).json["model"] == name
    assert several.ask(f"/predict?model={name}", {"prompt": "one"}).status == 200
    assert several.ask("/predict", {"prompt": "one", "model": name}).status == 200


def test_rows_go_to_the_network_named_or_not(several):
    said = [
        several.ask("/v1/evaluate", {"x": ROW}).json,  # the only one that takes rows
        several.ask("/v1/evaluate", {"x": ROW, "model": "net"}).json,
        several.ask("/v1/evaluate?model=net", {"x": ROW}).json,
    ]
    assert said[0] == said[1] == said[2]
    block = rows_to_body(np.array([ROW], np.float32))
    answer = several.ask("/v1/evaluate?model=net", block, {"Content-Type": MEDIA_TYPE})
    np.testing.assert_allclose(answer_from_body(answer.body)[1][0], said[0]["y"]["values"], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        pytest.param("/v1/completions", {"prompt": "a"}, 400, "one of 'chat', 'small'", id="none named"),
        pytest.param(
            "/v1/completions", {"prompt": "a", "model": "x"}, 404, "'chat', 'small', 'net'", id="an unknown one"
        ),
        pytest.param("/v1/completions", {"prompt": "a", "model": "net"}, 404, "POST /v1/evaluate", id="text of rows"),
        pytest.param("/v1/evaluate", {"x": ROW, "model": "chat"}, 404, "POST /v1/completions", id="rows of text"),
        pytest.param("/v1/evaluate?model=nobody", {"x": ROW}, 404, "has 'chat'", id="an unknown one in the query"),
        pytest.param("/v1/completions", b"no JSON", 400, "which model?", id="a body that is none"),
    ],
)
def test_a_wrong_model_is_answered_with_those_there_are(several, path, body, status, why):
    answer = several.ask(path, body)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert why in answer.error["message"]
    assert answer.error["param"] in ("model", None)


def test_weights_are_changed_of_the_model_that_is_named(several):
    body = {"version": "2", "weights": "nowhere"}
    assert "which model?" in several.ask("/v1/update_weights", body, ADMIN).error["message"]
    answer = several.ask("/v1/update_weights", {**body, "model": "small"}, ADMIN)
    assert answer.status == 400
    assert "which model?" not in answer.error["message"]


def test_health_stats_and_metrics_have_a_line_a_model(several):
    complete(several, model="small")
    health = several.ask("/health").json
    assert (health["model"], health["kind"], health["status"]) == ("chat, small, net", "several", "ready")
    assert [one["model"] for one in health["models"]] == ["chat", "small", "net"]
    stats = several.ask("/stats").json
    lines = {line["name"]: line for line in stats["models"]}
    assert [line["share"] for line in lines.values()] == [2.0, 1.0, 1.0]
    assert lines["small"]["output_tokens"] >= 3
    assert stats["requests"] == sum(line["requests"] for line in lines.values())
    metrics = several.ask("/metrics").body.decode()
    assert 'gpuinfer_model_requests_total{model="small"}' in metrics
    assert 'gpuinfer_model_info{name="net"} 1.0' in metrics


def test_all_answer_at_once_as_each_does_alone(several):
    alone = {name: complete(several, model=name, max_tokens=40).json["choices"] for name in ("chat", "small")}
    rows = several.ask("/v1/evaluate", {"rows": [ROW] * 64}).json
    wrong: list = []

    def texts(name):
        for _ in range(4):
            if complete(several, model=name, max_tokens=40).json["choices"] != alone[name]:
                wrong.append(name)

    def evaluate():  # whose last bits may depend on how many cores it has
        for _ in range(20):
            found = several.ask("/v1/evaluate", {"rows": [ROW] * 64}).json
            if not np.allclose(found["outputs"]["values"], rows["outputs"]["values"], rtol=1e-4, atol=1e-5):
                wrong.append("net")

    threads = [threading.Thread(target=texts, args=(name,)) for name in ("chat", "small")]
    threads.append(threading.Thread(target=evaluate))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_one_model_takes_its_own_name_and_no_other(rows, tiny):
    assert rows.ask("/v1/evaluate", {"x": ROW, "model": "blobnet-small"}).status == 200
    assert rows.ask("/v1/evaluate", {"x": ROW, "model": "other"}).error["code"] == "model_not_found"
    assert tiny.ask("/predict", {"prompt": "a", "model": "other"}).status == 404


@pytest.mark.thorough
def test_a_fleet_of_several_models_passes_names_through(tmp_path):
    words = ("--model", "chat=tiny,net=blobnet-small", *FLAGS[:-2], "--replicas", 2, "-B", "threads=1")
    with serving(*words, folder=tmp_path) as fleet:
        assert [one["id"] for one in fleet.ask("/v1/models").json["data"]] == ["chat", "net"]
        assert ["max_model_len" in one for one in fleet.ask("/v1/models").json["data"]] == [True, False]
        assert complete(fleet, model="chat").json["model"] == "chat"
        assert fleet.ask("/v1/evaluate?model=net", {"x": ROW}).status == 200
        assert complete(fleet, model="other").status == 404
        assert {line["name"] for line in fleet.ask("/stats").json["models"]} == {"chat", "net"}
