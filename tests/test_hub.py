"""Models by their names on the Hugging Face hub: found in its cache by every command, fetched with --download alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT, Hub, Repository, hub_server, put_in_cache, repository_of
from text.tiny import tiny_checkpoint

import gpuinfer as library
from gpuinfer.errors import UsageError

NAME = "acme/Tiny-Llama"
ANSWER = ("generate", "--prompt", "Hello", "--max-new-tokens", "2", "--temperature", "0", "--no-roofline", "--output")
WHOLE = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture
def cache(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the hub is out of reach."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(empty_folder / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return empty_folder / "hf" / "hub"


@pytest.fixture
def hub(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the model, with files beside it that nobody needs here."""
    with hub_server() as found:
        more = {"pytorch_model.bin": b"pickle", "README.md": b"#", "onnx/model.onnx": b"onnx", "code.py": b"1"}
        repository = repository_of(model)
        repository.files = {**repository.files, **more}
        found.repositories[NAME] = repository
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


@pytest.fixture
def cached(cache: Path, model: Path) -> Path:
    return put_in_cache(cache, NAME, repository_of(model).files)


def first_answer(gpuinfer: Any, name: object, *more: str) -> tuple[str, str]:
    """Its text, and what was said beside it."""
    output = Path("answers.jsonl")
    output.unlink(missing_ok=True)
    code, _, errors = gpuinfer(*ANSWER, str(output), "--model", str(name), *more)
    assert code == 0, errors
    return json.loads(output.read_text())["text"], errors


def refusal(gpuinfer: Any, name: str, *more: str) -> tuple[int, str]:
    """The exit code and the message, in one line."""
    code, out, errors = gpuinfer(*ANSWER, "none.jsonl", "--model", name, *more)
    assert (out, Path("none.jsonl").exists()) == ("", False)
    message = errors[errors.index("gpuinfer: ") :]
    assert len(message.splitlines()) <= 3
    return code, " ".join(message.split())


@pytest.mark.parametrize("name", [NAME, f"{NAME}@main", f"{NAME}@{COMMIT}", f"{NAME}@{COMMIT[:8]}"])
def test_a_cached_model_answers_under_its_name_as_its_folder_does(gpuinfer, cached, model, name):
    assert first_answer(gpuinfer, name)[0] == first_answer(gpuinfer, model)[0]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("memory", "--no-probe"), id="memory"),
        pytest.param(("verify", "--no-transformers", "--limit", "2", "--new-tokens", "2"), id="verify"),
        pytest.param(("rollouts", "--env", "arithmetic", "--groups", "1", "--max-new-tokens", "2"), id="rollouts"),
    ],
)
def test_other_commands_find_it_too(gpuinfer, cached, words):
    code, _, errors = gpuinfer(*words, "--model", NAME)
    assert code == 0, errors


def test_the_cache_is_where_its_variables_say(gpuinfer, cached, cache, monkeypatch, tmp_path):
    moved = cache.rename(tmp_path / "elsewhere")
    for link in moved.rglob("snapshots/*/*"):
        blob = moved / f"models--{NAME.replace('/', '--')}" / "blobs" / link.readlink().name
        link.unlink()
        link.symlink_to(blob)
    monkeypatch.setenv("HF_HUB_CACHE", str(moved))
    assert first_answer(gpuinfer, NAME)[0]


def test_a_model_in_python_is_named_likewise_and_called_by_its_last_part(cached, model):
    with library.LLM(NAME) as llm, library.LLM(str(model)) as same:
        found, wanted = (one.answer("Hello", max_new_tokens=3).result() for one in (llm, same))
        assert found.tokens == wanted.tokens
    with pytest.raises(UsageError, match=r"add download=True"):
        library.LLM("acme/other")


def test_a_folder_of_that_name_is_taken_and_said(gpuinfer, cached, model):
    (taken := Path(NAME)).parent.mkdir()
    taken.symlink_to(tiny_checkpoint("qwen2"))
    text, errors = first_answer(gpuinfer, NAME)
    assert text == first_answer(gpuinfer, taken.resolve())[0]
    assert f"'{NAME}' is a folder here, and is taken" in errors


def without(*gone: str) -> Any:
    return lambda snapshot: [(snapshot / name).unlink() for name in gone]


def list_files(snapshot: Path) -> None:
    """What huggingface_hub writes before it fetches the first file."""
    files = {name: {"size": 1, "blob_id": "x"} for name in WHOLE}
    (trees := snapshot.parents[1] / "trees").mkdir()
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (without("model.safetensors"), NAME, "only a part of 'acme/Tiny-Llama' is in"),
        (without("model.safetensors"), NAME, "it lacks its weights. To fetch the rest, add --download."),
        (without("config.json"), NAME, "it lacks config.json."),
        (lambda one: [list_files(one), without("tokenizer.json")(one)], NAME, "it lacks tokenizer.json."),
        (lambda one: None, f"{NAME}@v2", "with other revisions only: main. Name one, as --model acme/Tiny-Llama@main."),
        (lambda one: None, "acme/tiny-llama", "Did you mean 'acme/Tiny-Llama'?"),
        (lambda one: None, f"{NAME}/a.gguf", "without a.gguf"),
        (lambda one: None, f"{NAME}@../../refs", "there is no model folder"),
    ],
)
def test_what_the_cache_cannot_give_is_refused_with_the_cure(gpuinfer, cached, change, name, said):
    change(cached)
    code, message = refusal(gpuinfer, name)
    assert code == 2
    assert said in message


# Fetching


def test_only_what_the_model_needs_is_fetched_and_that_once(gpuinfer, hub, model):
    refusal(gpuinfer, NAME)
    assert hub.asked == []  # never by itself
    text = first_answer(gpuinfer, NAME, "--download")[0]
    assert text == first_answer(gpuinfer, model)[0]
    assert hub.fetched == sorted([*WHOLE, "chat_template.jinja"])
    asked = len(hub.asked)
    assert first_answer(gpuinfer, NAME, "--download")[0] == text
    assert first_answer(gpuinfer, NAME)[0] == text
    assert len(hub.asked) == asked  # what is there asks nothing


def test_a_revision_is_fetched_beside_the_others(gpuinfer, hub):
    first_answer(gpuinfer, f"{NAME}@v1", "--download")
    assert any("/revision/v1" in one for one in hub.asked)
    assert "with other revisions only: v1" in refusal(gpuinfer, NAME)[1]


def test_a_fetch_that_broke_off_is_taken_up_by_the_next(gpuinfer, hub, cache):
    hub.repositories[NAME].forbidden = {"model.safetensors"}
    code, message = refusal(gpuinfer, NAME, "--download")
    assert (code, "answers 403 for 'acme/Tiny-Llama'. Check the token" in message) == (1, True)
    assert "it lacks its weights" in refusal(gpuinfer, NAME)[1]
    hub.repositories[NAME].forbidden = ()
    hub.asked.clear()
    first_answer(gpuinfer, NAME, "--download")
    assert hub.fetched == ["model.safetensors"]


def test_a_file_whose_connection_is_cut_goes_on_where_it_was(gpuinfer, hub, model, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # of 10 MB otherwise: what has come of one is lost
    hub.repositories[NAME].cut = {"model.safetensors": 100_000}
    assert first_answer(gpuinfer, NAME, "--download")[0] == first_answer(gpuinfer, model)[0]
    assert [begin for name, begin in hub.ranges if name == "model.safetensors"] == [0, 100_000]


@pytest.mark.thorough
def test_tune_and_bench_serve_take_a_name_of_the_cache(gpuinfer, cached):
    Path("p.jsonl").write_text('{"prompt": "Hello"}\n' * 4)
    words = ("--max-new-tokens", "2", "--input", "p.jsonl", "--budget", "10s", "--quiet")
    code, out, errors = gpuinfer("tune", "generate", "--model", NAME, *words)
    assert code == 0, errors
    assert f"gpuinfer generate --model {NAME}" in " ".join(out.split())
    words = ("--output-tokens", "2", "--rate", "4", "--duration", "1s", "--json", "found.json")
    code, _, errors = gpuinfer("bench", "serve", "--model", NAME, *words)
    assert code == 0, errors
    assert json.loads(Path("found.json").read_text())["runs"][0]["errors"]["failed"] == 0


def test_a_token_comes_from_the_environment(gpuinfer, hub, monkeypatch):
    hub.repositories[NAME].token = "hf_right"
    assert "or it is private" in refusal(gpuinfer, NAME, "--download")[1]
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    first_answer(gpuinfer, NAME, "--download")


GGUFS = Repository({"a-Q4_0.gguf": b"GGUF", "a-Q8_0.gguf": b"GGUF", "README.md": b"#"})


@pytest.mark.parametrize(
    ("change", "name", "code", "said"),
    [
        pytest.param({}, "acme/none", 2, "no model 'acme/none' on HUB, or it is private. Check the name", id="unknown"),
        pytest.param({"gated": True}, NAME, 2, "Agree on HUB/acme/Tiny-Llama, then set HF_TOKEN", id="gated"),
        pytest.param({}, f"{NAME}@v9", 2, "has no revision 'v9'", id="no revision"),
        pytest.param({"sizes": {"model.safetensors": 1 << 60}}, NAME, 1, "free. Free some, or put the", id="disk full"),
        pytest.param({"files": {"config.json": b"{}"}}, NAME, 2, "has no weights that are read here", id="no weights"),
        pytest.param({"files": GGUFS.files}, NAME, 2, f"Name one: --model {NAME}/a-Q4_0.gguf", id="several GGUFs"),
        pytest.param({"files": GGUFS.files}, f"{NAME}/b.gguf", 2, "has no file b.gguf. It has a-Q4_0", id="no file"),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_cure(gpuinfer, hub, change, name, code, said):
    for field, value in change.items():
        setattr(hub.repositories[NAME], field, value)
    ended, message = refusal(gpuinfer, name, "--download")
    assert ended == code
    assert said in message.replace(hub.url, "HUB")


def test_no_network_an_ailing_hub_and_offline_mode_are_told_apart(gpuinfer, hub, monkeypatch):
    hub.down = True
    assert refusal(gpuinfer, NAME, "--download")[1].endswith("Try again later; what came is kept.")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, message = refusal(gpuinfer, NAME, "--download")
    assert (code, "Check the network" in message) == (1, True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, message = refusal(gpuinfer, NAME, "--download")
    assert (code, "HF_HUB_OFFLINE forbids to fetch it. Unset it" in message) == (1, True)


def test_a_fresh_process_knows_the_hub_s_own_address():
    """The hub's package loads its modules when they are used: what another test has imported must not help."""
    words = "from gpuinfer.text.hub_download import hub_address; print(hub_address())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    told = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=False)
    assert told.stdout.startswith("https://"), told.stderr
