"""Torch distributed checkpoints: whatever a trainer calls its tensors, however they are cut, and nothing runs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
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
from text.test_checkpoint_replacement import same
from text.tiny import tiny_checkpoint
from text.tiny_diffusion import FAMILIES as DIFFUSION
from text.tiny_diffusion import tiny_diffusion
from text.toy import run
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.serving.openai.model_options import ModelOptions, check_model, model_of
from gpuinfer.text.checkpoint import open_checkpoint, save_folder
from gpuinfer.text.checkpoint.loader import read_other_weights
from gpuinfer.text.generator import Tuning, open_generator


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def saved(state, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is but one process
        dcp.save(state, checkpoint_id=folder)
    return folder


def spec(folder: Path, base: Path) -> ModelSpec:
    return ModelSpec(str(folder), str(folder), arguments={"base_model": str(base)}, kind="text")


def trained(folder: Path, base: Path):
    return open_checkpoint(spec(folder, base))


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
    base, folder = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    checkpoint = trained(saved(SAVED[how](tensors(folder)), tmp_path / "dcp"), base)
    own = opened(folder)
    assert same(checkpoint.weights(torch.float32), own.weights(torch.float32))
    assert checkpoint.store.digests(own.store.tensors) == own.store.digests(own.store.tensors)
    assert checkpoint.language.folder == base


@pytest.mark.parametrize("family", DIFFUSION)
def test_diffusion_models_in_training_are_found_under_their_own_names(family, tmp_path):
    base, folder = tiny_diffusion(family), tiny_diffusion(family, seed=1)
    for number, state in enumerate((tensors(folder), {"model": tensors(folder)}, wrapped(tensors(folder)))):
        checkpoint = trained(saved(state, tmp_path / str(number)), base)
        assert checkpoint.shape == opened(folder).shape
        assert same(checkpoint.weights(torch.float32), opened(folder).weights(torch.float32))


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_tied_model_is_tied_and_keeps_its_dtype(family, tmp_path):
    folder = tiny_checkpoint(family, seed=1, dtype="bfloat16")
    checkpoint = trained(saved({"model": tensors(folder)}, tmp_path / "dcp"), tiny_checkpoint(family))
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.shape.tied
    assert same(checkpoint.weights(torch.bfloat16), opened(folder).weights(torch.bfloat16))


def test_answers_are_those_of_transformers_with_the_same_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tiny_checkpoint("qwen2", seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    place = saved({"model": model.state_dict()}, tmp_path / "dcp")
    tuning = Tuning(slots=2, threads=1)
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


def test_a_model_at_work_takes_the_weights_of_a_checkpoint(tmp_path):
    folder = tiny_checkpoint("llama", seed=1)
    place = saved({"model": tensors(folder)}, tmp_path / "dcp")
    found = read_other_weights(opened(tiny_checkpoint("llama")), str(place), torch.float32)
    assert same(found, opened(folder).weights(torch.float32))


def test_it_can_be_written_out_as_a_folder_that_transformers_opens(tmp_path):
    folder = tiny_checkpoint("llama", seed=1)
    save_folder(trained(saved(tensors(folder), tmp_path / "dcp"), tiny_checkpoint("llama")), tmp_path / "whole")
    assert same(opened(tmp_path / "whole").weights(torch.float32), opened(folder).weights(torch.float32))


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


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", ["in the place of all", "within"])
def test_metadata_that_would_run_something_is_refused_and_runs_nothing(protocol, where, tmp_path):
    base = tiny_checkpoint("llama")
    place = saved(tensors(base), tmp_path / "dcp")
    vandal = Vandal(tmp_path / "ran")
    what = vandal if where == "in the place of all" else Metadata({}, vandal, {})
    (place / ".metadata").write_bytes(pickle.dumps(what, protocol))
    with pytest.raises(UsageError, match="mkdir"):
        trained(place, base)
    assert not (tmp_path / "ran").exists()


def test_a_tensor_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    base = tiny_checkpoint("llama")
    place = saved(tensors(base), tmp_path / "dcp")
    checkpoint = trained(place, base)
    chunk = checkpoint.store.tensors["model.norm.weight"].chunks[0]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("archive/data.pkl", pickle.dumps(Vandal(tmp_path / "ran"), 2))
    data = bytearray(chunk.path.read_bytes())
    data[chunk.start : chunk.start + chunk.length] = bytes(chunk.length - len(archive.getvalue())) + archive.getvalue()
    chunk.path.write_bytes(data)
    with pytest.raises(UsageError, match="mkdir"):
        checkpoint.weights(torch.float32)
    assert not (tmp_path / "ran").exists()


def edited(place: Path, change) -> None:
    metadata = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301  our own
    change(metadata)
    (place / ".metadata").write_bytes(pickle.dumps(metadata, 4))


def first_chunk(metadata):
    return metadata.state_dict_metadata["lm_head.weight"].chunks[0]


def elsewhere(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../../secret.distcp"


def compressed(metadata):
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def halved(metadata):
    tensor = metadata.state_dict_metadata["lm_head.weight"]
    tensor.chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([192, 64]))


def huge(metadata):
    metadata.state_dict_metadata["lm_head.weight"].size = torch.Size([1 << 40, 1 << 40])


def shifted(metadata):
    first_chunk(metadata).offsets = torch.Size([1, 0])


def nowhere(metadata):
    metadata.storage_data = {key: one for key, one in metadata.storage_data.items() if key.fqn != "lm_head.weight"}


def too_short(metadata):
    for info in metadata.storage_data.values():
        info.length = 100


UNSOUND = {
    "a file of another folder": (elsewhere, "no .distcp file of its own folder"),
    "compressed": (compressed, "compressed"),
    "half of it missing": (halved, "cannot have|not all of it"),
    "a size beyond all": (huge, "no metadata of a checkpoint"),
    "a chunk beyond the end": (shifted, "nobody says|beyond its end"),
    "a tensor that lies nowhere": (nowhere, "nobody says where"),
    "too few bytes": (too_short, "cannot have 100 bytes"),
}


@pytest.mark.parametrize("unsound", UNSOUND)
def test_metadata_that_does_not_hold_together_is_refused(unsound, tmp_path):
    change, said = UNSOUND[unsound]
    base = tiny_checkpoint("llama")
    place = saved(tensors(base), tmp_path / "dcp")
    edited(place, change)
    with pytest.raises(UsageError, match=said):
        trained(place, base)


def test_chunks_that_overlap_are_refused(tmp_path):
    from gpuinfer.text.checkpoint.distributed_checkpoint import TensorChunk, _check_cover

    def chunk(offsets, sizes):
        return TensorChunk(offsets, sizes, tmp_path, 0, 0)

    _check_cover("a", (4, 4), [chunk((0, 0), (2, 4)), chunk((2, 0), (2, 2)), chunk((2, 2), (2, 2))])
    with pytest.raises(ValueError, match="overlap"):
        _check_cover("a", (4, 4), [chunk((0, 0), (2, 4)), chunk((1, 0), (2, 4))])
    with pytest.raises(ValueError, match="beyond its end"):
        _check_cover("a", (4, 4), [chunk((0, 0), (2, 4)), chunk((3, 0), (2, 4))])


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_byte_is_told_or_does_no_harm(place, byte, damaged):
    folder, metadata, base = damaged
    data = bytearray(metadata)
    data[int(place * len(data))] = byte
    (folder / ".metadata").write_bytes(data)
    with contextlib.suppress(UsageError):
        trained(folder, base).weights(torch.float32)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    base = tiny_checkpoint("llama")
    folder = saved(tensors(base), tmp_path_factory.mktemp("damaged") / "dcp")
    return folder, (folder / ".metadata").read_bytes(), base


def test_a_file_that_was_cut_short_is_told_with_its_tensor(tmp_path):
    base = tiny_checkpoint("llama")
    place = saved(tensors(base), tmp_path / "dcp")
    [file] = place.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(UsageError, match=re.escape(file.name)):
        trained(place, base).weights(torch.float32)
    file.unlink()
    with pytest.raises(UsageError, match=re.escape(file.name)):
        trained(place, base).weights(torch.float32)


def misspelt(state):
    return {name.replace("o_proj", "out_proj"): one for name, one in state.items()}


NOT_IT = {
    "misspelt": (misspelt, "o_proj.weight' .* is missing .is it 'model.layers.0.self_attn.out_proj.weight'"),
    "another model": (lambda state: {"weight": torch.zeros(3)}, "holds no tensor 'embed_tokens.weight'"),
    "two of them": (lambda state: {"actor": state, "critic": state}, "several models: 'actor"),
    "with more": (lambda state: {**state, "model.extra.weight": torch.zeros(3)}, "'model.extra.weight' is not part"),
}


@pytest.mark.parametrize("kind", NOT_IT)
def test_a_checkpoint_of_something_else_is_refused_by_its_tensors(kind, tmp_path):
    change, said = NOT_IT[kind]
    base = tiny_checkpoint("llama")
    with pytest.raises(UsageError, match=said):
        trained(saved(change(tensors(base)), tmp_path / "dcp"), base)


def test_a_folder_that_is_no_checkpoint_and_a_base_that_is_none_are_told(tmp_path):
    with pytest.raises(UsageError, match=re.escape("has no .metadata")):
        trained(tmp_path, tiny_checkpoint("llama"))
    with pytest.raises(UsageError, match="--base-model"):
        trained(tmp_path, tmp_path / "nothing")


def test_flags_name_a_checkpoint_and_its_base_together(tmp_path):
    def flags(**given):
        options = ModelOptions(**{name: tmp_path / path for name, path in given.items()})
        check_model(options, "serve")
        return model_of(options)

    (tmp_path / "dcp").mkdir()
    found = flags(dcp_path="dcp", base_model=".")
    assert (found.name, found.weights) == (str(tmp_path / "dcp"),) * 2
    assert found.arguments == {"base_model": str(tmp_path)}
    for wrong, said in (
        ({"dcp_path": "dcp"}, "go together"),
        ({"dcp_path": "none", "base_model": "."}, "--dcp-path: there is no folder"),
        ({"dcp_path": "dcp", "base_model": "none"}, "--base-model: there is no folder"),
        ({"dcp_path": "dcp", "base_model": ".", "checkpoint": "x"}, "and not both"),
    ):
        with pytest.raises(UsageError, match=said):
            flags(**wrong)


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forking.run(["gpuinfer", *words], cwd)


@pytest.mark.thorough
def test_commands_take_it_and_verify_finds_it_to_be_what_transformers_computes(tmp_path):
    place = saved({"model": tensors(tiny_checkpoint("llama", seed=1))}, tmp_path / "dcp")
    model = ["--dcp-path", str(place), "--base-model", str(tiny_checkpoint("llama"))]
    done = command("generate", *model, "--prompt", "The sea", "--output", "a.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command("verify", *model, "--json", "v.json", "--dtype", "float32", "--batch-sizes", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpuinfer = transformers" in done.stdout
