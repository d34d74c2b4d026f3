"""A replica whose adapters come and go: who may do it, what requests name, and what is listed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from random_adapters import peft_folder
from text.decoders import opened
from text.tiny import tiny_checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))
from replica_servers import serving

KEY = {"Authorization": "Bearer of-the-admin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    shape, here = opened(tiny_checkpoint("qwen2")).shape, tmp_path_factory.mktemp("adapters")
    return [str(peft_folder(here / str(seed), shape, 4, seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory, folders):
    folder = tmp_path_factory.mktemp("server")
    (folder / "admin").touch(mode=0o600)
    (folder / "admin").write_text("of-the-admin\n")
    words = ("--model", tiny_checkpoint("qwen2"), "--served-model-name", "base", "--admin-key-file", "admin")
    tuning = ("-B", "slots=8", "-B", "threads=1", "-B", "context=64", "-B", f"adapters=start={folders[2]}")
    with serving(*words, *tuning, folder=folder) as found:
        yield found


def said(server, model, **more):
    asked = {"model": model, "prompt": "The tide", "max_tokens": 16, "seed": 3, "ignore_eos": True}
    answer = server.ask("/v1/completions", asked | more)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return answer.json["choices"][0]["text"]


def listed(server):
    return [one["id"] for one in server.ask("/v1/models").json["data"]]


def test_adapters_are_models_of_their_own_as_long_as_they_are_loaded(server, folders):
    assert listed(server) == ["base", "start", "start@0"]
    base = said(server, "base")
    for number, folder in enumerate(folders[:2], 1):
        load = {"lora_name": "policy", "lora_path": folder}
        answer = server.ask("/v1/load_lora_adapter", load, KEY)
        assert (answer.status, answer.json["adapter"]) == (200, f"policy@{number}")
    texts = {name: said(server, name) for name in ("policy", "policy@1", "policy@2", "start")}
    assert texts["policy"] == texts["policy@2"]
    assert len({base, *texts.values()}) == 4
    models = server.ask("/v1/models").json["data"]
    assert [one.get("parent") for one in models] == [None, *["base"] * 5]
    update = {"version": "v9", "weights": folders[0], "adapter": "policy"}
    assert server.ask("/v1/update_weights", update, KEY).status == 200
    assert said(server, "policy") == said(server, "policy@v9") == texts["policy@1"]
    chat = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    assert server.ask("/v1/chat/completions", chat).events[0]["model"] == "policy"
    answer = server.ask("/v1/unload_lora_adapter", {"lora_name": "policy"}, KEY)
    assert answer.json == {"model": "base", "adapters": ["start", "start@0"], "adapter": "policy"}
    gone = server.ask("/v1/completions", {"model": "policy", "prompt": "a"})
    assert (gone.status, gone.error["code"]) == (404, "model_not_found")
    assert said(server, "base") == base


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("load", {"lora_name": "x", "lora_path": "/nowhere/at/all"}, "no folder /nowhere/at/all"),
        ("load", {"lora_name": "x"}, "lora_path"),
        ("load", {"lora_name": "a@b", "lora_path": "x"}, "cannot be called"),
        ("load", {"lora_name": "start", "lora_path": "x", "load_inplace": False}, "is loaded"),
        ("load", {"lora_name": "x", "lora_path": "x", "more": 1}, "no field `more`"),
        ("unload", {"lora_name": "nobody"}, "start, start@0"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_cure(server, path, body, word):
    answer = server.ask(f"/v1/{path}_lora_adapter", body, KEY)
    assert (answer.status, word in answer.error["message"]) == (400, True), answer.body


def test_without_the_admin_key_no_weights_change(server):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/update_weights"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert server.ask(path, {"lora_name": "start"}, headers).status == 401
