"""`--adapter NAME=DIR`: who answers, what is refused, and going on with an output under the same weights alone."""

from __future__ import annotations

import json
import shutil

import pytest
from forking import run
from random_adapters import peft_folder
from text.decoders import opened
from text.tiny import tiny_checkpoint

from gpuinfer.errors import UsageError
from gpuinfer.serving.openai.model_options import adapter_folders
from gpuinfer.serving.serve_options import ServeOptions, served_spec
from gpuinfer.workloads.generate.workload import Generate


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    shape, here = opened(tiny_checkpoint("qwen2")).shape, tmp_path_factory.mktemp("flags")
    return [peft_folder(here / str(seed), shape, 4, seed) for seed in range(2)]


def test_rows_are_answered_by_the_adapter_that_they_name_or_else_by_the_first(adapters, tmp_path):
    rows = [{"id": str(one), "prompt": "The tide"} | ({} if one is None else {"adapter": one}) for one in (None, *"ab")]
    rows += [{"id": "base", "prompt": "The tide", "adapter": ""}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [word for name, folder in zip("ab", adapters, strict=True) for word in ("--adapter", f"{name}={folder}")]
    drawing = ("--max-new-tokens", "8", "--temperature", "0", "--logprobs", "0")
    command = ["gpuinfer", "generate", "--model", tiny_checkpoint("qwen2"), *drawing, *flags]
    done = run([*command, "--input", "prompts.jsonl"], tmp_path)
    assert done.returncode == 0, done.stderr
    logprobs = {row["id"]: str(row["logprobs"]) for row in map(json.loads, done.stdout.splitlines())}
    assert logprobs["None"] == logprobs["a"]
    assert len({logprobs["a"], logprobs["b"], logprobs["base"]}) == 3


def test_an_output_is_gone_on_with_under_the_same_weights_alone(adapters, tmp_path):
    def settings(*given):
        return Generate(model="tiny", prompt=["a"], adapter=[f"a={one}" for one in given]).deciding_settings("")

    shutil.copytree(adapters[0], tmp_path / "a")
    began = settings(tmp_path / "a")
    assert began == settings(adapters[0]), "they lie elsewhere now"
    shutil.copytree(adapters[1], tmp_path / "a", dirs_exist_ok=True)
    assert began != settings(tmp_path / "a")
    assert "adapters" not in settings()


def test_a_server_has_them_from_its_start_and_what_is_no_adapter_is_refused(adapters, tmp_path):
    spec = served_spec(ServeOptions(model=str(tiny_checkpoint("qwen2")), adapter=[f"policy={adapters[0]}"]))
    assert spec.arguments["adapters"] == {"policy": str(adapters[0].resolve())}
    with pytest.raises(UsageError, match="--adapter is said of a model of text"):
        served_spec(ServeOptions(model="blobnet", adapter=["policy=x"]))
    for given, why in (
        ("policy", "--adapter policy: not of the form NAME=DIR"),
        (f"a={tmp_path}", "no adapter_config"),
    ):
        with pytest.raises(UsageError, match=why):
            adapter_folders([given])
