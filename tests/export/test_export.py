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
from gpuinfer.api import ModelSpec
from gpuinfer.models import onnx_export
from gpuinfer.models.networks import BlobNetSmall
from gpuinfer.models.positions import PositionsFolder, checked

FEATURES, ACTIONS, SEATS = 12, 5, 2
SIZES = ("--features", "12", "--actions", "5", "--seats", "2")
SETTINGS = {"game": "made up", "game_options": {"size": 3}}
MIRRORED = [4, 3, 2, 1, 0, *range(5, 12)], [4, 3, 2, 1, 0]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What self-play leaves, of a game that has a symmetry."""
    dice, rows = np.random.default_rng(0), 40
    observation = dice.integers(0, 2, (rows, FEATURES), dtype=np.uint8)
    observation[:, 0] = 1
    folder = PositionsFolder(tmp_path_factory.mktemp("records") / "games")
    folder.open(SETTINGS, resume=False)
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

    def run(*words):
        code, out, err = gpuinfer("export", *map(str, words), "--out", str(tmp_path / "net.onnx"), "--json", "-")
        return code, json.loads(out) if out else None, err

    return run


def answers(path: Path, rows: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"features": rows})


def test_a_trained_network_answers_in_onnx_runtime_as_in_torch(export, records, tmp_path):
    network = BlobNetSmall(FEATURES, ACTIONS, SEATS).eval()
    save_file(network.state_dict(), tmp_path / "trained.safetensors")
    weights = tmp_path / "trained.safetensors"
    code, report, _ = export("--model", "blobnet-small", "--weights", weights, "--records", records)
    assert (code, report["kept"]) == (0, True)
    assert report["difference"] < 1e-5
    assert [one["rows"] for one in report["batches"]] == [1, 2, 3, 7, 32, 257]
    for count in (1, 5, 64):
        rows = np.random.default_rng(count).integers(0, 2, (count, FEATURES)).astype(np.float32)
        with torch.inference_mode():
            wanted = [tensor.numpy() for tensor in network(torch.from_numpy(rows))]
        found = answers(tmp_path / "net.onnx", rows)
        for here, there in zip(wanted, found, strict=True):
            np.testing.assert_allclose(there, here, atol=1e-5)


def test_the_file_says_what_it_is_and_nothing_of_the_machine(export, records, tmp_path):
    assert export("--model", "blobnet-small", "--records", records, "--seed", "3")[0] == 0
    path = tmp_path / "net.onnx"
    model = onnx.load(path)
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
    assert export("--model", "blobnet-small", "--records", records, "--seed", "3")[0] == 0
    assert path.read_bytes() == content, "the same network is the same file"


def test_positions_of_a_game_are_played_where_there_are_no_records(export, tmp_path):
    code, report, _ = export("--model", "blobnet-small", "--game", "connect-four")
    assert (code, report["inputs"]) == (0, {"features": ["batch", 91]})
    told = report["metadata"]
    assert told["gpuinfer.game"] == "connect-four"
    assert len(json.loads(told["gpuinfer.symmetries"])["actions"][0]) == 7
    assert (tmp_path / "net.onnx").stat().st_size == report["bytes"]


def test_a_game_that_cannot_show_itself_is_exported_by_its_records(export):
    code, _, err = export("--model", "blobnet-small", "--game", "exported_networks:Unshown")
    assert code == 2
    assert "Or give --records DIR" in err


@pytest.mark.parametrize(
    ("name", "sizes", "outputs"),
    [
        pytest.param("Convolutions", SIZES, {"policy_logits": 5, "values": 2}, id="convolutions"),
        pytest.param("Attention", SIZES, {"policy_logits": 5, "values": 2}, id="attention"),
        pytest.param("Named", SIZES[:2], {"win": 3, "draw": 2}, id="a dict of answers"),
        pytest.param("Alone", SIZES[:2], {"answer": 5}, id="one answer"),
    ],
)
def test_a_network_of_ones_own_answers_batches_of_any_size(export, tmp_path, name, sizes, outputs):
    code, report, err = export("--model", f"exported_networks:{name}", *sizes)
    assert code == 0, err
    assert report["outputs"] == {key: ["batch", width] for key, width in outputs.items()}
    for count in (1, 11):
        found = answers(tmp_path / "net.onnx", np.ones((count, FEATURES), np.float32))
        assert [one.shape for one in found] == [(count, width) for width in outputs.values()]


def test_a_file_that_answers_otherwise_is_not_kept(export, tmp_path):
    code, report, err = export("--model", "exported_networks:Noisy", *SIZES, "--tolerance", "0.001")
    assert code == 4
    assert not report["kept"]
    assert report["difference"] > 0.01
    assert "0.001 is allowed" in err
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_cannot_be_exported_is_told_so(export, tmp_path):
    code, report, err = export("--model", "exported_networks:Branching", *SIZES)
    assert (code, report) == (1, None)
    assert "'exported_networks:Branching'" in err
    assert "without branches" in err
    assert len([line for line in err.splitlines() if not line.startswith("export")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_another_network_is_seen_by_the_comparison(tmp_path):
    spec = ModelSpec("blobnet-small", None, FEATURES, "float32", {"actions": ACTIONS, "seats": SEATS})
    own, other = onnx_export.open_exportable(spec, 0), onnx_export.open_exportable(spec, 1)
    path = tmp_path / "own.onnx"
    path.write_bytes(onnx_export.content(own, {}))
    rows = np.ones((4, FEATURES), np.float32)
    assert max(max(each.values()) for _, each in onnx_export.largest_differences(path, own, rows)) < 1e-5
    assert max(max(each.values()) for _, each in onnx_export.largest_differences(path, other, rows)) > 1e-3
    assert own.digest() != other.digest()


INF, NAN = np.float32("inf"), np.float32("nan")


@pytest.mark.parametrize(
    ("got", "wanted", "difference"),
    [
        pytest.param([0.25], [0.0], 0.25, id="absolute where answers are small"),
        pytest.param([150.0], [100.0], 0.5, id="relative where they are large"),
        pytest.param([-INF, 1.0], [-INF, 1.0], 0.0, id="the same infinity is none"),
        pytest.param([0.0], [-INF], INF, id="a finite number for an infinite one"),
        pytest.param([NAN], [NAN], INF, id="NaN is never right"),
        pytest.param([1.0], [1.0, 1.0], INF, id="another shape"),
    ],
)
def test_differences(got, wanted, difference):
    assert onnx_export.apart(np.array(got, np.float32), np.array(wanted, np.float32)) == difference


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--model", "tiny", *SIZES], "model of text", id="a built-in model of text"),
        pytest.param(["--model", ".", *SIZES], "gpuinfer serve --model .", id="a folder"),
        pytest.param(["--model", "rollout", *SIZES], "no network", id="rollout"),
        pytest.param(["--model", "blobnet"], "--records DIR", id="no sizes"),
        pytest.param(["--model", "blobnet", *SIZES, "--game", "blob"], "Leave one of them out", id="sizes twice"),
        pytest.param(["--model", "blobnet", *SIZES, "--players", "3"], "--players", id="players of no game"),
        pytest.param(["--model", "blobnet", *SIZES, "--weights", "gone.pt"], "no file 'gone.pt'", id="no weights"),
    ],
)
def test_what_cannot_be_is_refused(export, tmp_path, words, said):
    code, report, err = export(*words)
    assert (code, report) == (2, None)
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_without_the_packages_the_extra_is_named(export, tmp_path, monkeypatch):
    really = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "onnxscript" else really(name, *more)
    )
    code, _, err = export("--model", "blobnet-small", *SIZES)
    assert code == 2
    assert "pip install 'gpuinfer[onnx]'" in err
    assert list(tmp_path.iterdir()) == []
