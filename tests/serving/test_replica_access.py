"""Who may ask what: every route without a key, with a wrong one, and under a wrong name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replica_servers import Server, serving

from gpuinfer.api import ModelSpec
from gpuinfer.serving.health import ReplicaHealth
from gpuinfer.serving.monitoring.live_page import FILES
from gpuinfer.serving.routes import replica_routes
from gpuinfer.serving.service import ModelService, ServedModels

KEY = "a-key-of-the-tests"
OPEN = {"/health", *FILES}


class Nothing:
    moved = waiting_rows = 0
    longest_s, serving = 0.0, False


def table(kind: str) -> list:
    health = ReplicaHealth(Nothing(), "m", kind)
    return replica_routes(ServedModels([ModelService(Nothing(), health, ModelSpec("m", inputs=2, kind=kind))]))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    for name, key in (("keys", KEY), ("admin", "another")):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(f"# of the tests\n{key}\n")
    words = ("--model", "blobnet", "--backend", "standin", "--api-key-file", "keys", "--admin-key-file", "admin")
    with serving(*words, folder=folder) as server:
        yield server


@pytest.mark.parametrize("kind", ["text", "rows"])
def test_only_health_and_the_pages_files_are_open(kind):
    assert {route.path for route in table(kind) if route.access == "open"} == OPEN


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ", KEY])
def test_no_route_that_is_not_open_answers_without_the_key(guarded, header):
    for route in table("rows"):
        if route.path not in OPEN:
            headers = {} if header is None else {"Authorization": header}
            answer = guarded.ask(route.path, b"{}" if route.method == "POST" else None, headers, route.method)
            assert answer.status == 401, (route.path, answer.body)
            assert answer.error["code"] == "invalid_api_key"


def test_the_key_opens_them(guarded):
    assert guarded.ask("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status == 200
    assert guarded.ask("/v1/evaluate", {"x": [0.0] * 256}, {"Authorization": f"bearer {KEY}"}).status == 200


def test_neither_key_is_in_the_log(guarded):
    assert KEY not in guarded.log
    assert "with a key" in guarded.log


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses", "ask POST /v1/chat/completions instead, with the conversation so far as its messages"),
        ("/v1/responses/resp_1/cancel", "ask POST /v1/chat/completions instead"),
        ("/v1/batches", "`gpuinfer generate` answers files of prompts"),
        ("/v1/embeddings", "models of embeddings are not served"),
    ],
)
def test_what_openai_has_and_this_server_has_not_is_said_with_what_there_is_instead(tiny, path, instead):
    answer = tiny.ask(path, {"model": "tiny", "input": "Hi"})
    assert answer.status == 404
    assert answer.error["message"].startswith(f"there is nothing at {path}: {instead}")
