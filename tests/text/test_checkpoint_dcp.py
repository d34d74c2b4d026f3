"""Torch distributed checkpoints: all names that trainers give tensors, all ways to cut them, and no code is run."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import forking
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from text.decoders import opened
from text.decoders import same_weights as same
from text.tiny import tiny_checkpoint
from text.tiny_diffusion import FAMILIES as DIFFUSION
from text.tiny_diffusion import tiny_diffusion
from text.toy import run
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.serving.openai.model_options import ModelOptions, check_model, text_model
from gpuinfer.text.checkpoint import open_checkpoint, save_folder
from gpuinfer.text.checkpoint.distributed_checkpoint import TensorChunk, _check_cover
from gpuinfer.text.checkpoint.loader import read_other_weights
from gpuinfer.text.generator import open_generator
from gpuinfer.text.text_options import TorchModelOptions


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def saved(state, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is but one process
        dcp.save(state, checkpoint_id=folder)
    return folder


def spec(folder: Path, base: Path) -> ModelSpec:
    return ModelSpec(str(folder), str(folder), arguments={"base_model": str(base)}, kind="text")


def trained(folder: Path, base: Path | None = None):
    return open_checkpoint(spec(folder, base or tiny_checkpoint("llama")))


def wrapped(state):
    return {
        name.replace("model.", "model._fsdp_wrapped_module.").replace("mlp.", "mlp._checkpoint_wrapped_module."): tensor
        for name, tensor in state.items()
    }


SAVED = {
    "the state dict itself": lambda state: state,
    "beside an optimiser": lambda state: {
        "model": state,
        "optimizer": {"state": {name: {"exp_avg": 2 * one} for name, one in state.items()}, "lr": 0.1},
        "step": 7,
    },
    "deep down": lambda state: {"state_dict": {"model": state}, "rng": [1, 2]},
    "with slashes": lambda state: {f"state_dict/model/{name}": one for name, one in state.items()},
    "from DDP": lambda state: {f"module.{name}": one for name, one in state.items()},
    "from FSDP": wrapped,
    "compiled": lambda state: {f"_orig_mod.{name}": one for name, one in state.items()},
    "without its body's name": lambda state: {name.replace("model.", "", 1): one for name, one in state.items()},
    "beside its average": lambda state: {"model": state, "ema": {name: one + 1 for name, one in state.items()}},
}


@pytest.mark.parametrize("how", SAVED)
def test_weights_are_found_under_whatever_names_a_trainer_has_given_them(how, tmp_path):
    folder = tiny_checkpoint("llama", seed=1)
    checkpoint, own = trained(saved(SAVED[how](tensors(folder)), tmp_path / "dcp")), opened(folder)
    assert same(checkpoint.weights(torch.float32), own.weights(torch.float32))
    assert checkpoint.store.digests(own.store.tensors) == own.store.digests(own.store.tensors)
    assert checkpoint.language.folder == tiny_checkpoint("llama")


@pytest.mark.parametrize("family", [*DIFFUSION, "qwen2", "gpt2"])
def test_other_families_are_found_under_their_own_names_and_keep_ties_and_dtype(family, tmp_path):
    if family in DIFFUSION:
        base, folder = tiny_diffusion(family), tiny_diffusion(family, seed=1)
    else:
        base, folder = tiny_checkpoint(family), tiny_checkpoint(family, seed=1, dtype="bfloat16")
    states = [tensors(folder), {"model": tensors(folder)}, wrapped(tensors(folder))]
    for number, state in enumerate(states if family in DIFFUSION else states[1:2]):
        checkpoint = trained(saved(state, tmp_path / str(number)), base)
        assert (checkpoint.shape, checkpoint.dtype) == (opened(folder).shape, opened(folder).dtype)
        assert same(checkpoint.weights(torch.bfloat16), opened(folder).weights(torch.bfloat16))


def test_answers_are_those_of_transformers_with_the_same_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tiny_checkpoint("qwen2", seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    place = saved({"model": model.state_dict()}, tmp_path / "dcp")
    tuning = TorchModelOptions(slots=2, threads=1)
    generator = open_generator(spec(place, tiny_checkpoint("qwen2")), Setup(devices=("cpu",), dtype="float32"), tuning)
    prompt = Prompt(text="The quick brown fox", sampling=Sampling(temperature=0, max_tokens=12, ignore_eos=True))
    [prepared] = generator.prepare([prompt])
    [outcome] = run(generator, [prompt])
    generator.close()
    inputs = torch.from_numpy(prepared.tokens.astype(np.int64))[None]
    expected = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    assert list(outcome.completions[0].tokens) == expected[0, inputs.shape[1] :].tolist()


def test_a_running_model_takes_the_weights_and_a_folder_is_written_with_them(tmp_path):
    folder = tiny_checkpoint("llama", seed=1)
    place, wanted = saved({"model": tensors(folder)}, tmp_path / "dcp"), opened(folder).weights(torch.float32)
    assert same(read_other_weights(opened(tiny_checkpoint("llama")), str(place), torch.float32), wanted)
    save_folder(trained(place), tmp_path / "whole")
    assert same(opened(tmp_path / "whole").weights(torch.float32), wanted)


SHARDING = """
import os
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from safetensors.torch import load_file
import transformers

rank, how, source, place, meeting = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
if how == "fsdp":
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    state = {"model": fully_shard(model, mesh=mesh).state_dict()}
else:
    kinds = [Shard(0), Shard(1), Replicate()]
    found = sorted(load_file(f"{source}/model.safetensors").items())
    ways = [kinds[at % 3] if one.dim() > 1 else Shard(0) for at, (_, one) in enumerate(found)]
    state = {name: distribute_tensor(one, mesh, [way]) for (name, one), way in zip(found, ways)}
dcp.save(state, checkpoint_id=place)
dist.barrier()
os._exit(0)  # the files are whole; how gloo's threads end, which abort at times on a loaded machine, is not our matter
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["tensors", "fsdp"])
def test_tensors_that_two_processes_share_are_put_together(how, tmp_path):
    """Of sizes that two cannot share evenly."""
    odd = {"vocab_size": 385, "intermediate_size": 161}
    base, folder = tiny_checkpoint("llama", **odd), tiny_checkpoint("llama", seed=1, **odd)
    arguments = [how, str(folder), str(tmp_path / "dcp"), str(tmp_path / "meeting")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SHARDING]
    ranks = [subprocess.Popen([*command, str(rank), *arguments], env=environment) for rank in range(2)]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    checkpoint = trained(tmp_path / "dcp", base)
    assert max(len(one.chunks) for one in checkpoint.store.tensors.values()) == 2
    assert same(checkpoint.weights(torch.float32), opened(folder).weights(torch.float32))


class Vandal:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def edited(place: Path, change, protocol: int = 4) -> None:
    metadata = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301  our own
    (place / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata, protocol))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", ["in the place of all", "within", "in a tensor"])
def test_what_would_run_code_is_refused_and_runs_nothing(protocol, where, tmp_path):
    place = saved(tensors(tiny_checkpoint("llama")), tmp_path / "dcp")
    vandal = Vandal(tmp_path / "ran")
    if where == "in a tensor":
        archive = io.BytesIO()
        torch.save(vandal, archive, pickle_protocol=protocol)
        chunk = trained(place).store.tensors["model.norm.weight"].chunks[0]
        with chunk.path.open("r+b") as file:
            file.seek(chunk.start)
            file.write(archive.getvalue())
        edited(place, lambda metadata: shortened(metadata, "model.norm.weight", len(archive.getvalue())))
    else:
        edited(place, lambda _: vandal if where == "in the place of all" else Metadata({}, vandal, {}), protocol)
    with pytest.raises(UsageError, match=r"mkdir|would run code|damaged"):
        trained(place).weights(torch.float32)
    assert not (tmp_path / "ran").exists()


def shortened(metadata, name: str, length: int) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            info.length = length


def test_metadata_that_contradicts_itself_is_refused(tmp_path):
    place = saved(tensors(tiny_checkpoint("llama")), tmp_path / "dcp")
    whole = (place / ".metadata").read_bytes()
    half = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([192, 64]))]

    def head(metadata):
        return metadata.state_dict_metadata["lm_head.weight"]

    def file(metadata):
        return next(iter(metadata.storage_data.values()))

    def without_place(metadata):
        metadata.storage_data = {k: one for k, one in metadata.storage_data.items() if k.fqn != "lm_head.weight"}

    for change, why in (
        (lambda all: setattr(file(all), "relative_path", "../../secret.distcp"), "no .distcp file of its own folder"),
        (lambda all: setattr(file(all), "transform_descriptors", ["zstd"]), "compressed"),
        (lambda all: setattr(head(all), "chunks", half), "cannot have|not all of it"),
        (lambda all: setattr(head(all), "size", torch.Size([1 << 40, 1 << 40])), "no metadata of a checkpoint"),
        (lambda all: setattr(head(all).chunks[0], "offsets", torch.Size([1, 0])), "has no file|beyond its end"),
        (without_place, "has no file"),
        (lambda all: shortened(all, "lm_head.weight", 100), "cannot have 100 bytes"),
    ):
        (place / ".metadata").write_bytes(whole)
        edited(place, change)
        with pytest.raises(UsageError, match=why):
            trained(place)


def test_chunks_that_overlap_are_refused(tmp_path):
    def check(*chunks):
        _check_cover("a", (4, 4), [TensorChunk(offsets, sizes, tmp_path, 0, 0) for offsets, sizes in chunks])

    check(((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2)))
    for second, why in (((1, 0), "overlap"), ((3, 0), "beyond its end")):
        with pytest.raises(ValueError, match=why):
            check(((0, 0), (2, 4)), (second, (2, 4)))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_byte_is_told_or_does_no_harm(place, byte, whole):
    data = bytearray((whole / "metadata").read_bytes())
    data[int(place * len(data))] = byte
    (whole / "dcp" / ".metadata").write_bytes(data)
    with contextlib.suppress(UsageError):
        trained(whole / "dcp").weights(torch.float32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint, and its metadata beside it."""
    folder = tmp_path_factory.mktemp("damaged")
    saved(tensors(tiny_checkpoint("llama")), folder / "dcp")
    shutil.copy(folder / "dcp" / ".metadata", folder / "metadata")
    return folder


NOT_IT = {
    "misspelt": (
        lambda state: {name.replace("o_proj", "out_proj"): one for name, one in state.items()},
        "o_proj.weight' .* is missing .is it 'model.layers.0.self_attn.out_proj.weight'",
    ),
    "another model": (lambda state: {"weight": torch.zeros(3)}, "holds no tensor 'embed_tokens.weight'"),
    "two of them": (lambda state: {"actor": state, "critic": state}, "several models: 'actor"),
    "with more": (lambda state: {**state, "model.extra.weight": torch.zeros(3)}, "'model.extra.weight' is not part"),
}


@pytest.mark.parametrize("kind", NOT_IT)
def test_a_checkpoint_of_another_model_is_refused_by_its_tensors(kind, tmp_path):
    change, why = NOT_IT[kind]
    with pytest.raises(UsageError, match=why):
        trained(saved(change(tensors(tiny_checkpoint("llama"))), tmp_path / "dcp"))


def test_files_and_folders_that_are_absent_or_cut_short_are_named(tmp_path):
    with pytest.raises(UsageError, match=re.escape("has no .metadata")):
        trained(tmp_path)
    with pytest.raises(UsageError, match="--base-model"):
        trained(tmp_path, tmp_path / "nothing")
    place = saved(tensors(tiny_checkpoint("llama")), tmp_path / "dcp")
    [file] = place.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(UsageError, match=re.escape(file.name)):
        trained(place).weights(torch.float32)
    file.unlink()
    with pytest.raises(UsageError, match=re.escape(file.name)):
        trained(place).weights(torch.float32)


def test_flags_name_a_checkpoint_and_its_base_together(tmp_path):
    (tmp_path / "dcp").mkdir()
    for flags, why in (
        ({"dcp_path": "dcp"}, "go together"),
        ({"dcp_path": "none", "base_model": "."}, "--dcp-path: there is no folder"),
        ({"dcp_path": "dcp", "base_model": "none"}, "--base-model: there is no folder"),
        ({"dcp_path": "dcp", "base_model": ".", "checkpoint": "x"}, "and not both"),
    ):
        with pytest.raises(UsageError, match=why):
            check_model(ModelOptions(**{name: tmp_path / path for name, path in flags.items()}), "serve")
    options = ModelOptions(dcp_path=tmp_path / "dcp", base_model=tmp_path)
    check_model(options, "serve")
    found = text_model(options)
    assert (found.name, found.weights) == (str(tmp_path / "dcp"),) * 2
    assert found.arguments == {"base_model": str(tmp_path)}


@pytest.mark.thorough
def test_commands_take_it_and_verify_finds_it_to_be_what_transformers_computes(tmp_path):
    place = saved({"model": tensors(tiny_checkpoint("llama", seed=1))}, tmp_path / "dcp")
    model = ["--dcp-path", str(place), "--base-model", str(tiny_checkpoint("llama"))]
    verifying = ("--json", "v.json", "--dtype", "float32", "--batch-sizes", "3")
    for words in (("generate", *model, "--prompt", "The sea", "--output", "a.jsonl"), ("verify", *model, *verifying)):
        done = forking.run(["gpuinfer", *words], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "gpuinfer = transformers" in done.stdout
