"""`--model a=…,b=…` and the flags that go with it: what it means, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import UsageError
from gpuinfer.serving.openai.model_options import models_in
from gpuinfer.serving.serve_options import ServeOptions, check_models_exist, chosen_models


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tiny", None),
        ("chat=tiny,net=blobnet", {"chat": "tiny", "net": "blobnet"}),
        ("chat = tiny , net = blobnet", {"chat": "tiny", "net": "blobnet"}),
        ("a=runs/lr=0.1", {"a": "runs/lr=0.1"}),
        ("runs/lr=0.1", None),
        ("./lr=0.1", None),
        ("net=package.module:make", {"net": "package.module:make"}),
    ],
)
def test_a_list_is_told_from_a_path(text, found):
    assert models_in(text) == found


def test_a_folder_that_is_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").mkdir()
    assert models_in("lr=0.1") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a=x,a=y", "'a' is there twice"),
        ("=x,b=y", "has no name"),
        ("a=,b=y", "'a' has no model"),
        ("my model=x,b=y", "'my model' is no name"),
        ("a=/data/x,y,b=z", "a folder with a comma in its path"),
        ("a=x,", "has no name"),
        ("a=x,b", "'b' has no name"),
    ],
)
def test_a_list_that_is_none_is_refused(text, why):
    with pytest.raises(UsageError, match=why):
        models_in(text)


def chosen(**given):
    return chosen_models(ServeOptions(**given))


def test_each_model_has_its_own():
    chat, net = chosen(model="chat=tiny,net=blobnet", share="chat=2", weights="w.safetensors", context=64)
    assert (chat.name, chat.share, chat.spec.kind) == ("chat", 2.0, "text")
    assert (net.name, net.share, net.spec.kind, net.spec.weights) == ("net", 1.0, "rows", "w.safetensors")
    assert chat.spec.arguments == {"context": 64}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param({"model": "tiny", "share": "tiny=1"}, "several models", id="a share of one"),
        pytest.param({"model": "a=tiny,b=tiny", "share": "c=1"}, "no model 'c'", id="a share of a stranger"),
        pytest.param({"model": "blobnet", "features": "a=8"}, "Write --features 256", id="a size by name for one"),
        pytest.param({"model": "a=blobnet", "features": "a=x"}, "not a whole number", id="a size that is no number"),
        pytest.param({"model": "a=blobnet", "features": "a=0"}, "from 1 to 1,048,576", id="rows of nothing"),
        pytest.param({"model": "a=blobnet", "seats": "c=2"}, "no model 'c'", id="a size of a stranger"),
        pytest.param({"model": "a=blobnet", "input_dtype": "a=int7"}, "Choose from", id="rows of no known kind"),
        pytest.param({"model": "a=tiny,b=tiny", "share": "a=0"}, "0 is no share", id="no share"),
        pytest.param({"model": "a=tiny,b=tiny", "share": "a=nan"}, "nan is no share", id="not a number"),
        pytest.param({"model": "a=tiny,b=tiny", "share": "2"}, "NAME=2", id="a share of nobody"),
        pytest.param({"model": "a=tiny,b=tiny", "served_model_name": "x"}, "--model names them", id="named twice"),
        pytest.param({"model": "a=tiny,b=tiny", "adapter": ["p=x"]}, "MODEL:NAME=DIR", id="whose adapter"),
        pytest.param({"model": "a=blobnet,b=blobnet", "weights": "x"}, "NAME=FILE", id="whose weights"),
        pytest.param({"model": "a=tiny,b=tiny", "weights": "x"}, "none is served", id="weights of text"),
        pytest.param({"model": "a=tiny,b=tiny", "mask_token_id": 3}, "one model of text", id="whose mask"),
        pytest.param({"model": "a=tiny,b=tiny", "checkpoint": "x"}, "--checkpoint names a model", id="one more"),
    ],
)
def test_what_does_not_go_together_is_refused(given, why):
    with pytest.raises(UsageError, match=why):
        chosen(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param({"model": "a=tiny,b=tiniy"}, "Did you mean 'tiny'", id="a slip"),
        pytest.param({"model": "a=tiny,b=nowhere/model"}, "no model folder 'nowhere/model'", id="no folder"),
        pytest.param({"model": "a=tiny,b=no_such_module:make", "features": 8}, "set PYTHONPATH", id="no module"),
        pytest.param({"model": "a=tiny,b=blobnet", "weights": "b=no.safetensors"}, "Check --weights", id="no weights"),
    ],
)
def test_a_model_that_is_not_there_is_refused_before_any_is_loaded(given, why):
    first, second = (one.spec for one in chosen(**given))
    check_models_exist(first)
    with pytest.raises(UsageError, match=why):
        check_models_exist(second)


@pytest.mark.parametrize("place", ["tiny", "null", "blobnet", "json:loads"])
def test_what_is_there_is_not_refused(place, tmp_path):
    found = chosen(model=f"a={place},b={tmp_path}", features=256 if place not in ("tiny", "null") else None)
    for one in found:
        check_models_exist(one.spec)


async def test_a_model_that_stands_beside_another_is_looked_at_before_any_is_loaded():
    tiny, small = (one.spec for one in chosen(model="a=tiny,b=blobnet", features=8))
    first = InProcess(Setup(model=tiny))
    await first.check()
    with pytest.raises(UsageError, match="reads the legal mask from the first 53 features"):
        await first.beside(small).check()


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        pytest.param(ModelSpec("tiny", kind="text"), {"context": 1 << 20}, "the model was made for", id="a context"),
        pytest.param(
            ModelSpec("tiny", kind="text"),
            {"parallel": "layers", "stages": 7},
            "7 stages, and .* 6 layers",
            id="stages",
        ),
        pytest.param(
            ModelSpec("tiny", kind="text", arguments={"adapters": {"one": "no/such/adapter"}}),
            {},
            "no/such/adapter",
            id="an adapter",
        ),
    ],
)
async def test_what_is_asked_of_a_model_of_text_is_looked_at_too(spec, options, why):
    first = InProcess(Setup(model=ModelSpec("null", kind="text"), devices=("cpu",)), **options)
    with pytest.raises(UsageError, match=why):
        await first.beside(spec).check()


async def test_a_model_of_text_that_can_be_had_is_not_refused():
    first = InProcess(Setup(model=ModelSpec("null", kind="text"), devices=("cpu",)))
    await first.beside(ModelSpec("tiny-llada", kind="text")).check()


def test_what_loading_would_refuse_is_told_with_the_models_name_and_nothing_is_loaded(gpuinfer, monkeypatch):
    loaded = []
    monkeypatch.setattr("gpuinfer.backends.inprocess.open_text", lambda *given: loaded.append(given))
    code, _, said = gpuinfer("serve", "--port", "0", "--model", "a=tiny,b=blobnet", "--features", "8")
    assert (code, loaded) == (2, [])
    assert "gpuinfer: b: model 'blobnet' reads the legal mask from the first 53 features" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param(["--model", "a=tiny,b=nowhere/model"], "b: there is no model folder 'nowhere/model'", id="a file"),
        pytest.param(["--model", "a=tiny,b=nets:make"], "b: nets:make takes rows", id="a size"),
        pytest.param(
            ["--model", "a=tiny,b=tiny", "--backend", "central", "--share", "b=2"], "b: a share of 2", id="an option"
        ),
        pytest.param(["--model", "nowhere/model"], "gpuinfer: there is no model folder", id="one has no name"),
    ],
)
def test_an_error_says_of_which_of_several_models_it_is(words, why, gpuinfer):
    code, _, said = gpuinfer("serve", *words)
    assert code == 2
    assert why in " ".join(said.split())


@pytest.mark.parametrize("name", ["b", "c"])
def test_an_option_of_one_model_is_refused_with_the_way_to_say_it(gpuinfer, name):
    code, _, said = gpuinfer("serve", "--model", "a=tiny,b=blobnet", "-B", f"{name}.slots=4")
    assert code == 2
    assert "Write -B slots=4" in said
    assert ("none is called" in said) == (name == "c")


@pytest.mark.parametrize(
    ("features", "actions", "inputs", "moves"),
    [
        pytest.param("a=8,b=16", 5, (8, 16), (5, 5), id="one word alone is said of all"),
        pytest.param(8, "a=5,b=7", (8, 8), (5, 7), id="a number as a settings file has it"),
        pytest.param("b=16", None, (256, 16), (53, 53), id="who is not named has what is usual"),
    ],
)
def test_each_network_may_have_sizes_of_its_own(features, actions, inputs, moves):
    found = chosen(model="a=blobnet,b=blobnet-small", features=features, actions=actions, input_dtype="b=int8")
    assert tuple(one.spec.inputs for one in found) == inputs
    assert tuple(one.spec.arguments["actions"] for one in found) == moves
    assert tuple(one.spec.input_dtype for one in found) == ("float32", "int8")


@pytest.mark.parametrize(
    "words",
    [["generate", "--prompt", "hi"], ["chat"], ["load"], ["selfplay"], ["rollouts", "--env", "guess"]],
    ids=lambda words: words[0],
)
def test_commands_that_run_one_model_say_where_several_are_served(gpuinfer, words):
    code, _, said = gpuinfer(*words, "--model", "a=tiny,b=tiny")
    assert code == 2
    assert "gpuinfer serve --model a=tiny,b=tiny" in " ".join(said.split())
    assert "--backend fleet -B endpoint=URL -B model=a" in " ".join(said.split())


def test_shares_are_refused_where_each_model_has_a_process_of_its_own():
    with pytest.raises(UsageError, match="--backend inprocess, or leave --share out"):
        Central(Setup(share=2.0))
