"""The core stays light: what `pip install gpuinfer` brings is enough for the default; the rest are extras, which say
their name when they are missed. Several names for one model. What was left of earlier issues.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from adapters.random_adapters import peft_folder
from packaging.requirements import Requirement
from text.tiny import tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.cli import doctor
from gpuinfer.errors import UsageError
from gpuinfer.host import extras
from gpuinfer.text.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WAIT_S = 120

# As in an environment with the hard dependencies alone: modules of extras cannot be found.
BLOCKER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {names} or name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
PLAY = ("selfplay", "--game", "connect-four", "--games", "1", "--simulations", "4", "--model", "uniform")
GENERATE = ("generate", "--model", "tiny", "--prompt", "The sea was", "--max-new-tokens", "2")


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The variables of a process in which no module of an extra can be imported."""
    folder = tmp_path_factory.mktemp("light")
    # packaging stays: the plugins that are installed beside the tests need it
    names = {module for name, extra in extras.EXTRAS.items() if name != "plugins" for module in extra.modules}
    (folder / "sitecustomize.py").write_text(BLOCKER.format(names=names))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
    return kept | {"PYTHONPATH": f"{folder}:{ROOT}", "GPUINFER_ROOFLINE": "false", "GPUINFER_DISABLED_PLUGINS": ""}


def without(monkeypatch, *modules):
    """As if these could not be found, in this process."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in modules else find(name, *more))


def test_it_has_14_hard_dependencies_and_each_extra_is_described():
    assert len(PROJECT["dependencies"]) <= 14
    optional = PROJECT["optional-dependencies"]
    assert set(extras.EXTRAS) == set(optional) - {"all", "models", "dev", "docs"}
    everything = {extra for text in optional["all"] for extra in Requirement(text).extras}
    assert everything == set(extras.EXTRAS) - {"vllm"}
    for name, extra in extras.EXTRAS.items():
        assert len(extra.modules) <= len(optional[name]), name


def test_no_package_of_an_extra_is_a_hard_dependency():
    hard = {Requirement(text).name for text in PROJECT["dependencies"]}
    optional = {Requirement(text).name for name in extras.EXTRAS for text in PROJECT["optional-dependencies"][name]}
    assert not hard & optional


@pytest.mark.parametrize(
    "words", [pytest.param(PLAY, id="selfplay"), pytest.param(GENERATE, id="generate", marks=pytest.mark.thorough)]
)
def test_the_default_runs_without_any_extra(light, tmp_path, words):
    command = [sys.executable, "-m", "gpuinfer", *words, "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, env=light, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr


@contextmanager
def served(environment, folder, *words):
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "gpuinfer", "serve", "--port", "0", "--ready-file", str(ready), *words]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()


def asked(url, body=None):
    """Status and body of the answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_serve_runs_without_any_extra_and_names_the_one_that_a_schema_needs(light, tmp_path):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    with served(light, tmp_path, "--model", "tiny", "-B", "threads=1", "-v") as url:
        status, answer = asked(f"{url}/v1/completions", body)
        assert (status, json.loads(answer)["model"]) == (200, "tiny")
        assert "gpuinfer_requests_total" in asked(f"{url}/metrics")[1]
        status, answer = asked(f"{url}/v1/completions", {**body, "response_format": schema})
    assert "needs uvloop, which is not installed. Run: pip install 'gpuinfer[serve]'" in (tmp_path / "log").read_text()
    assert status == 400
    assert json.loads(answer)["error"]["message"].endswith("pip install 'gpuinfer[schemas]'")


MISSED = {
    "hub": "generate --model owner/name --download --prompt a",
    "mlflow": "loop --track mlflow --game connect-four --out new",
    "onnx": "export --model blobnet-small --features 4 --actions 2 --seats 2 --out net.onnx",
    "otel": "serve --model tiny --otlp-endpoint http://127.0.0.1:4318",
    "parquet": "generate --model tiny --input in.jsonl --output out.parquet",
    "plots": "bench selfplay --report new",
    "plugins": "plugins install gpuinfer-echo",
    "ray": "serve --model tiny --launcher ray --replicas 2",
    "schemas": "generate --model tiny --prompt a --regex x+",
    "tensorboard": "loop --track tensorboard=runs --game connect-four --out new",
    "tune": "tune selfplay --apply",
    "wandb": "loop --track wandb --game connect-four --out new",
}


@pytest.mark.parametrize(("extra", "command"), MISSED.items(), ids=MISSED)
def test_a_missing_extra_is_named_before_anything_begins(gpuinfer, empty_folder, monkeypatch, extra, command):
    """One error that ends with the command to type; nothing is left behind."""
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    without(monkeypatch, *extras.EXTRAS[extra].modules)
    code, out, errors = gpuinfer(*command.split())
    assert (code, out) == (2, "")
    assert errors.rstrip().endswith(f"pip install 'gpuinfer[{extra}]'"), errors
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_simulate_names_the_extra_of_its_plot(gpuinfer, empty_folder, monkeypatch):
    without(monkeypatch, "matplotlib")
    code, _, errors = gpuinfer(*["simulate", "--rate", "100", "--alpha", "50us", "--beta", "2ms", "--plot", "x.png"])
    assert (code, errors.rstrip().endswith("pip install 'gpuinfer[plots]'")) == (2, True), errors


def test_a_by_product_is_left_out_and_the_log_names_its_extra(monkeypatch, caplog, tmp_path):
    """The picture of a training's loss; the pages of a comparison without their plots."""
    from gpuinfer.lab.presenter import Page, Plot, Table
    from gpuinfer.workloads.optimizer import TrainingFolder

    without(monkeypatch, "matplotlib")
    caplog.set_level(logging.WARNING)
    folder = TrainingFolder(tmp_path / "training")
    folder.path.mkdir()
    folder.add_to_curve([{"step": 1, "loss": 0.5}])
    folder.draw_curve()
    page = Page("title", "verdict", None, Table(["a"], [["1"]]), plots={"p": Plot("p", lambda: pytest.fail("drawn"))})
    page.write(tmp_path, "loop", {"a": 1}, "")
    assert {path.name for path in tmp_path.iterdir()} == {"training", "loop.json", "loop.md", "loop.html"}
    assert not (tmp_path / "training" / "loss.svg").exists()
    assert [one.getMessage().endswith("pip install 'gpuinfer[plots]'") for one in caplog.records] == [True, True]


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_an_extra_whose_packages_are_installed_is_not_missed(name):
    """The modules looked for are those that its packages bring."""
    for text in PROJECT["optional-dependencies"][name]:
        try:
            importlib.metadata.version(Requirement(text).name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{text} is not installed here")
    assert extras.missing_modules(name) == []


def test_the_one_file_names_the_wheel_for_an_extra_that_it_lacks(monkeypatch):
    """Nothing can be installed into it."""
    without(monkeypatch, "pyarrow")
    monkeypatch.setattr(extras, "one_file", lambda: Path("gpuinfer"))
    with pytest.raises(
        UsageError, match=r"which the one file does not bring. Use the wheel: pip install 'gpuinfer\[parq"
    ):
        extras.require_extra("parquet", "--output a.parquet")


def test_doctor_lists_the_extras_with_their_state(monkeypatch):
    without(monkeypatch, "matplotlib", "llguidance")
    found = {one.name: one for one in doctor._extras()}
    assert list(found) == list(extras.EXTRAS)
    assert (found["plots"].value, found["schemas"].value, found["tune"].value) == (
        "not installed", "not installed", "installed"
    )  # fmt: skip
    assert not any(one.serious for one in found.values())


# Several names for one model


@pytest.fixture(scope="module")
def two_names(tmp_path_factory):
    """A fleet of one replica behind a router, whose model is called `big` and `gpt-4o`."""
    folder = tmp_path_factory.mktemp("names")
    words = ("--model", "tiny", "--served-model-name", "big,gpt-4o", "--replicas", "1", "--admin-key-file", "admin")
    (folder / "admin").write_text("the-admin-key\n")
    (folder / "admin").chmod(0o600)
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
    with served(own, folder, *words, "-B", "slots=2", "-B", "threads=1") as url:
        yield url
    assert "big (also called gpt-4o) at " in (folder / "log").read_text()


def test_models_lists_every_name_and_a_request_by_any_of_them_is_served(two_names):
    """By OpenAI's own client. Answers carry the first name."""
    from openai import OpenAI

    with OpenAI(base_url=f"{two_names}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["big", "gpt-4o"]
        for name in ("big", "gpt-4o", "GPT-4o"):
            answer = client.completions.create(model=name, prompt="a", max_tokens=1)
            assert answer.model == "big"


def test_another_name_is_refused_with_the_names_there_are(two_names):
    status, answer = asked(f"{two_names}/v1/completions", {"model": "small", "prompt": "a", "max_tokens": 1})
    assert (status, "This server has 'big', 'gpt-4o'" in json.loads(answer)["error"]["message"]) == (404, True)


def test_metrics_have_the_first_name(two_names):
    text = asked(f"{two_names}/metrics")[1]
    assert 'gpuinfer_model_info{name="big"}' in text
    assert "gpt-4o" not in text


def test_generate_asks_the_server_by_another_of_its_names(two_names, tmp_path):
    words = ("generate", "--backend", "fleet", "-B", f"endpoint={two_names}", "-B", "model=gpt-4o", "--model", "tiny")
    command = [sys.executable, "-m", "gpuinfer", *words, "--prompt", "a", "--max-new-tokens", "1", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_adapters_are_found_under_any_name_of_their_model(tmp_path):
    """`policy`, and behind each of the model's names; they answer as the adapter, and the names without one do not."""
    checkpoint = tiny_checkpoint("qwen2")
    folder = peft_folder(tmp_path / "lora", open_checkpoint(ModelSpec(str(checkpoint), kind="text")).shape, 4, 1)
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
    words = (
        "--model",
        str(checkpoint),
        "--served-model-name",
        "a,b",
        "-B",
        "context=64",
        "--adapter",
        f"policy={folder}",
    )
    body = {"prompt": "The tide", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with served(own, tmp_path, *words, "-B", "slots=2", "-B", "threads=1") as url:
        answers = {
            name: json.loads(asked(f"{url}/v1/completions", {**body, "model": name})[1])
            for name in ("a", "b", "policy", "a:policy", "b:policy", "B:policy")
        }
    texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}
    assert texts["a"] == texts["b"] != texts["policy"]
    assert texts["policy"] == texts["a:policy"] == texts["b:policy"] == texts["B:policy"]
    assert [answer["model"] for answer in answers.values()] == ["a", "a", *["policy"] * 4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(("--served-model-name", "a,b,a"), "'a' stands there twice. Give it once.", id="twice"),
        pytest.param(("--served-model-name", "a,"), "--served-model-name", id="an empty one"),
        pytest.param(("--served-model-name", "a,b", "--adapter", "b=lora"),
                     "'b' is the name of a model and of an adapter. Give one of both another name.", id="an adapter's"),
    ],
)  # fmt: skip
def test_names_that_clash_are_refused_with_the_cure(gpuinfer, empty_folder, words, said):
    Path("lora").mkdir()
    Path("lora/adapter_config.json").write_text("{}")
    code, _, errors = gpuinfer("serve", "--model", "tiny", *words)
    assert (code, said in errors) == (2, True), errors


def test_an_adapter_cannot_take_a_name_of_the_model(two_names):
    body = json.dumps({"lora_name": "gpt-4o", "lora_path": "/nowhere"}).encode()
    request = urllib.request.Request(
        f"{two_names}/v1/load_lora_adapter", body, {"Authorization": "Bearer the-admin-key"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=WAIT_S)
    with refused.value as error:
        message = error.read().decode()
    assert "'gpt-4o' is the name of a model here. Give the adapter another." in message


# What was left of earlier issues


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        pytest.param(
            "/v1/responses", {"input": "a", "max_output_tokens": 0}, "$.max_output_tokens", id="a length of 0"
        ),
        pytest.param("/v1/completions", {"prompt": [3, -1, 4]}, "`prompt[1]` is -1", id="a negative token"),
        pytest.param("/v1/completions", {"prompt": [[3, -7]]}, "`prompt[0][1]` is -7", id="a negative token in a list"),
        pytest.param("/v1/completions", {"prompt": [-2]}, "`prompt[0]` is -2", id="a negative token alone"),
        pytest.param("/v1/embeddings", {"input": [1, 1 << 40]}, f"`input[1]` is {1 << 40}", id="a token out of range"),
    ],
)
def test_a_refusal_names_the_field_that_the_client_wrote(two_names, path, body, said):
    status, answer = asked(f"{two_names}{path}", {"model": "big", **body})
    error = json.loads(answer)["error"]
    assert (status, said in error["message"]) == (400, True), error
    assert error["param"] in (None, said.split("`")[1] if "`" in said else None)


def test_generate_leaves_its_panel_out_where_it_is_quiet(gpuinfer, empty_folder):
    """Its answers are the result. Of a run in which a row failed the panel stays."""
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    words = ("generate", "--model", "tiny", "--input", "in.jsonl", "--max-new-tokens", "2", "--no-roofline")
    code, out, errors = gpuinfer(*words, "--output", "out.jsonl", "--quiet")
    assert (code, out, errors) == (0, "", "")
    assert len(Path("out.jsonl").read_text().splitlines()) == 1
    code, out, errors = gpuinfer(*words, "--output", "again.jsonl")
    assert "finished" in out
    Path("in.jsonl").write_text('{"prompt": "a"}\n{"prompt": [-1]}\n')
    code, out, errors = gpuinfer(*words, "--output", "partly.jsonl", "--quiet")
    assert "finished" in out, errors


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_quantization_config_that_is_no_object_is_refused_in_words(tmp_path, family):
    config = {"model_type": family, "quantization_config": [1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"config\.json: .*quantization_config.*an object"):
        open_checkpoint(ModelSpec(str(tmp_path), kind="text"))
