"""In which number format a text model is computed: by what the processor can do, and told."""

from __future__ import annotations

import pytest
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.text import precision
from gpuinfer.text.generator import Tuning, open_generator
from gpuinfer.workloads.generate.workload import Generate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[True, False], ids=["multiplies bfloat16", "does not"])
def multiplies(request, monkeypatch):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: request.param)
    return request.param


@pytest.mark.parametrize("deterministic", [False, True])
def test_bfloat16_is_multiplied_as_such_only_where_that_is_one_instruction_and_bits_do_not_count(
    multiplies, deterministic
):
    found = precision.computes_in(torch.bfloat16, CPU, deterministic=deterministic)
    assert found == ("bfloat16" if multiplies and not deterministic else "float32")


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float32, CPU), (torch.float16, CPU), (torch.bfloat16, CUDA), (torch.float32, CUDA)]
)
def test_all_else_is_computed_in_the_format_of_its_weights(multiplies, dtype, device):
    assert precision.computes_in(dtype, device, deterministic=False) == str(dtype).removeprefix("torch.")


def test_a_run_that_goes_on_must_compute_in_the_same_format(multiplies, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('"a"\n')
    setup = Setup(devices=("cpu",), dtype="bfloat16")
    own = Generate(setup, model="tiny", input=str(tmp_path / "prompts.jsonl"))
    assert own.deciding_settings()["computes_in"] == ("bfloat16" if multiplies else "float32")


def test_a_device_that_is_not_here_is_left_to_the_backend(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('"a"\n')
    own = Generate(Setup(devices=("cuda:77",), dtype="bfloat16"), model="tiny", input=str(tmp_path / "prompts.jsonl"))
    assert own.deciding_settings()["computes_in"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_facts_tell_what_is_computed_in(dtype):
    generator = open_generator(
        ModelSpec(name="tiny", kind="text", arguments={"context": 64}),
        Setup(devices=("cpu",), dtype=dtype, deterministic=True),
        Tuning(slots=1, threads=1),
    )
    generator.close()
    assert (generator.facts["dtype"], generator.facts["computes_in"]) == (dtype, "float32")
