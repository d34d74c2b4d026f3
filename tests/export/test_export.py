"""`gpuinfer export`: an ONNX file that ONNX Runtime answers with as torch does, or none."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

import gpuinfer as package
from gpuinfer.models import onnx_export
from gpuinfer.models.networks import BlobNetSmall
from gpuinfer.models.positions import PositionsFolder, checked

FEATURES, ACTIONS, SEATS = 12, 5, 2
SIZES = "--features 12 --actions 5 --seats 2"
MIRRORED = [4, 3, 2, 1, 0, *range(5, 12)], [4, 3, 2, 1, 0]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What self-play leaves, of a game that has a symmetry."""
    observation = np.random.default_rng(0).integers(0, 2, (rows := 40, FEATURES), dtype=np.uint8)
    observation[:, 0] = 1
    folder = PositionsFolder(tmp_path_factory.mktemp("records") / "games")
    folder.open({"game": "made up", "game_options": {"size": 3}}, resume=False)
    folder.declare(checked([MIRRORED], FEATURES, ACTIONS, "the test"))
    folder.write(
        {
            "observation": observation,
            "legal": observation[:, :ACTIONS].astype(bool),
            "policy": np.full((rows, ACTIONS), 1 / ACTIONS, np.float32),
            "value": np.zeros((rows, SEATS), np.float32),
            "player": np.zeros(rows, np.int8),
            "game": np.zeros(rows, np.int64),
            "move": np.arange(rows, dtype=np.int16),
            "finished": np.zeros(1, np.int64),
            "returns": np.zeros((1, SEATS), np.float32),
        }
    )
    folder.close(1)
    return folder.path


@pytest.fixture
def export(gpuinfer, tmp_path):
    """The command in this process; its exit code, report and complaints."""

    def run(words):
        code, out, err = gpuinfer("export", *words.split(), "--out", str(tmp_path / "net.onnx"), "--json", "-")
        return code, json.loads(out) if out else None, err

    return run


def answers(path: Path, rows: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"features": rows})


def test_a_trained_network_answers_in_onnx_runtime_as_in_torch(export, records, tmp_path):
    network, weights = BlobNetSmall(FEATURES, ACTIONS, SEATS).eval(), tmp_path / "trained.safetensors"
    save_file(network.state_dict(), weights)
    code, report, _ = export(f"--model blobnet-small --weights {weights} --records {records}")
    assert (code, report["kept"]) == (0, True)
    assert report["difference"] < 1e-5
    assert [one["rows"] for one in report["batches"]] == [1, 2, 3, 7, 32, 257]
    for count in (1, 5, 64):
        rows = np.random.default_rng(count).integers(0, 2, (count, FEATURES)).astype(np.float32)
        with torch.inference_mode():
            wanted = [tensor.numpy() for tensor in network(torch.from_numpy(rows))]
        for here, there in zip(wanted, answers(tmp_path / "net.onnx", rows), strict=True):
            np.testing.assert_allclose(there, here, atol=1e-5)


@pytest.mark.thorough
def test_the_file_says_what_it_is_and_nothing_of_the_machine(export, records, tmp_path):
    assert export(f"--model blobnet-small --records {records} --seed 3")[0] == 0
    model = onnx.load(path := tmp_path / "net.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 18)]
    shapes = {
        one.name: [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim]
        for one in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {"features": ["batch", 12], "policy_logits": ["batch", 5], "values": ["batch", 2]}
    told = {one.key.removeprefix("gpuinfer."): one.value for one in model.metadata_props}
    assert told["version"] == package.__version__
    assert (told["model"], told["game"], told["actions"]) == ("blobnet-small", "made up", "5")
    assert json.loads(told["game_options"]) == {"size": 3}
    assert json.loads(told["symmetries"]) == {"features": [MIRRORED[0]], "actions": [MIRRORED[1]]}
    assert len(told["digest"]) == 64
    content = path.read_bytes()
    for place in (os.getcwd(), str(Path(package.__file__).parent), str(Path(torch.__file__).parent), str(tmp_path)):
        assert place.encode() not in content
    path.unlink()
    assert export(f"--model blobnet-small --records {records} --seed 3")[0] == 0
    assert path.read_bytes() == content, "the same network is the same file"


@pytest.mark.thorough
def test_positions_of_a_game_are_played_where_there_are_no_records(export, tmp_path):
    code, report, _ = export("--model blobnet-small --game connect-four")
    assert (code, report["inputs"]) == (0, {"features": ["batch", 91]})
    assert report["metadata"]["gpuinfer.game"] == "connect-four"
    assert len(json.loads(report["metadata"]["gpuinfer.symmetries"])["actions"][0]) == 7
    assert (tmp_path / "net.onnx").stat().st_size == report["bytes"]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "sizes", "outputs"),
    [
        ("Convolutions", SIZES, {"policy_logits": 5, "values": 2}),
        ("Attention", SIZES, {"policy_logits": 5, "values": 2}),
        ("Named", "--features 12", {"win": 3, "draw": 2}),
        ("Alone", "--features 12", {"answer": 5}),
    ],
)
def test_a_network_of_ones_own_answers_batches_of_any_size(export, tmp_path, name, sizes, outputs):
    code, report, err = export(f"--model exported_networks:{name} {sizes}")
    assert code == 0, err
    assert report["outputs"] == {key: ["batch", width] for key, width in outputs.items()}
    for count in (1, 11):
        found = answers(tmp_path / "net.onnx", np.ones((count, FEATURES), np.float32))
        assert [one.shape for one in found] == [(count, width) for width in outputs.values()]


def test_a_file_that_answers_otherwise_is_not_kept(export, tmp_path):
    code, report, err = export(f"--model exported_networks:Noisy {SIZES} --tolerance 0.001")
    assert (code, report["kept"]) == (4, False)
    assert report["difference"] > 0.01
    assert "0.001 is allowed" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("got", "wanted", "difference"),
    [
        ([0.25], [0.0], 0.25),
        ([150.0], [100.0], 0.5),  # relative where answers are large
        ([-np.inf, 1.0], [-np.inf, 1.0], 0.0),
        ([0.0], [-np.inf], np.inf),
        ([np.nan], [np.nan], np.inf),
        ([1.0], [1.0, 1.0], np.inf),
    ],
)
def test_differences(got, wanted, difference):
    assert onnx_export.apart(np.array(got, np.float32), np.array(wanted, np.float32)) == difference


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (f"--model tiny {SIZES}", 2, "model of text"),
        (f"--model . {SIZES}", 2, "gpuinfer serve --model ."),
        (f"--model rollout {SIZES}", 2, "no network"),
        ("--model blobnet", 2, "--records DIR"),
        (f"--model blobnet {SIZES} --game blob", 2, "Leave one of them out"),
        (f"--model blobnet {SIZES} --players 3", 2, "--players"),
        (f"--model blobnet {SIZES} --weights gone.pt", 2, "no file 'gone.pt'"),
        ("--model blobnet-small --game exported_networks:Unshown", 2, "Or give --records DIR"),
        (f"--model exported_networks:Branching {SIZES}", 1, "without branches"),
        (f"--model blobnet-small {SIZES}", 2, "pip install 'gpuinfer[onnx]'"),  # without one of the packages
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(export, tmp_path, monkeypatch, words, code, said):
    if "pip install" in said:
        find = importlib.util.find_spec
        without = lambda name, *more: None if name == "onnxscript" else find(name, *more)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", without)
    found, report, err = export(words)
    assert (found, report) == (code, None)
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("gpuinfer: ")]) == 1
    assert list(tmp_path.iterdir()) == []
