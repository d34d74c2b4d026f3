"""A client's name for a model: case and the owner in front may differ, an exact name goes first, and two that are meant
are an error that lists them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hub import put_in_cache, repository_of
from replica_servers import Server, serving
from text.tiny import tiny_checkpoint

MODELS = "a=acme/Tiny,A=other/Tiny,alone=third/Solo@main"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three models of a cache, two of them alike but for their owners and for the case of the names they are given."""
    folder = tmp_path_factory.mktemp("names")
    files = repository_of(tiny_checkpoint("llama")).files
    for name in ("acme/Tiny", "other/Tiny", "third/Solo"):
        put_in_cache(folder / "hub", name, files)
    words = ("--model", MODELS, "-B", "slots=4", "-B", "threads=1", "-B", "context=64")
    with serving(*words, folder=folder, environment={"HF_HUB_CACHE": str(folder / "hub")}) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ("a", "a"),
        ("A", "A"),
        ("acme/Tiny", "a"),
        ("OTHER/tiny", "A"),
        ("Alone", "alone"),
        ("acme/alone", "alone"),
        ("solo", "alone"),
        ("third/solo", "alone"),
        ("third/Solo@main", "alone"),
        ("alone.gguf", "alone"),
    ],
)
def test_a_name_is_understood_that_differs_in_case_or_owner(server, asked, answers):
    answer = server.ask("/v1/completions", {"model": asked, "prompt": "a", "max_tokens": 1})
    assert (answer.status, answer.json["model"]) == (200, answers)


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ("tiny", 400, "several models may be called so. Write 'a', 'A'."),
        ("fourth/Solo", 404, "This server has 'a', 'A', 'alone'"),
        ("third/Solo@v2", 404, "This server has"),
        ("alon", 404, "This server has"),
        ("acme/x/alone", 404, "This server has"),
        ("z" * 100_000, 404, "This server has"),
    ],
)
def test_other_names_are_an_error_that_lists_those_there_are(server, asked, status, said):
    answer = server.ask("/v1/chat/completions", {"model": asked, "messages": [{"role": "user", "content": "a"}]})
    assert (answer.status, answer.error["type"], answer.error["param"]) == (status, "invalid_request_error", "model")
    assert answer.error["code"] == ("model_not_found" if status == 404 else None)
    assert said in answer.error["message"]
    assert len(answer.body) < 500


@pytest.mark.parametrize("name", ["TINY", "acme/tiny", "Acme/Tiny"])
def test_one_model_is_understood_likewise_and_answers_under_its_own_name(tiny, name):
    answer = tiny.ask("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
    assert (answer.status, answer.json["model"]) == (200, "tiny")


@pytest.mark.thorough
def test_behind_a_router_it_is_the_same(tmp_path):
    words = ("--model", "tiny", "--replicas", "1", "-B", "slots=4", "-B", "threads=1")
    with serving(*words, folder=tmp_path) as fleet:
        answer = fleet.ask("/v1/completions", {"model": "acme/TINY", "prompt": "a", "max_tokens": 1})
        assert (answer.status, answer.json["model"]) == (200, "tiny")
        answer = fleet.ask("/v1/completions", {"model": "other", "prompt": "a", "max_tokens": 1})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
