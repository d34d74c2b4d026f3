"""`gpuinfer.Batcher` over a central server: rows of any shape and dtype there and answers back, as in one process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from row_models import BAD_ROW, FaultyRow, ImageScores, MaskedMeans, ThreeInputs, TokenSums, doubled

import gpuinfer
from gpuinfer.errors import BackendError, BadResult, RequestError, UsageError

pytestmark = [
    pytest.mark.usefixtures("children_forked"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def same(found, wanted):
    """Whether two answers have the same form, dtypes and shapes, and nearly the same numbers."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    alike = type(found) is type(wanted) and found.dtype == wanted.dtype and found.shape == wanted.shape
    return alike and np.allclose(np.asarray(found), np.asarray(wanted), atol=1e-6)


@pytest.mark.parametrize(
    ("model", "row_of"),
    [
        pytest.param(ImageScores, lambda n: torch.rand(3, 32, 32) + n, id="images"),
        pytest.param(ImageScores, lambda n: np.random.rand(3, 32, 32).astype(np.float32), id="images of numpy"),
        pytest.param(TokenSums, lambda n: torch.arange(7) + (n << 40), id="tokens of int64, larger than float32 holds"),
        pytest.param(
            MaskedMeans,
            lambda n: {"ids": torch.arange(5) * n, "mask": torch.arange(5) < n},
            id="a dict of int64 and bool",
        ),
        pytest.param(
            ThreeInputs,
            lambda n: (torch.rand(2, 3) * n, torch.full((3,), n, dtype=torch.int32), torch.rand(4).half()),
            id="a tuple of float32, int32 and float16",
        ),
        pytest.param(lambda: doubled, lambda n: torch.rand(3) + n, id="a function of a file"),
        pytest.param(lambda: torch.nn.Linear(3, 2), lambda n: torch.rand(3) + n, id="a module of torch"),
        pytest.param(lambda: torch.jit.script(ImageScores()), lambda n: torch.rand(3, 32, 32), id="TorchScript"),
        pytest.param(lambda: torch.relu, lambda n: torch.rand(3) - n, id="a function of torch"),
    ],
)
def test_rows_and_answers_travel_as_they_are(model, row_of):
    made = model()
    rows = [row_of(n) for n in range(3)]
    with gpuinfer.Batcher(made) as here:
        wanted = [here.predict(row) for row in rows]
        with gpuinfer.Batcher(made, backend="central") as batcher:
            found = list(batcher.map(rows))
            assert all(map(same, found, wanted)), (found, wanted)


def test_several_devices_serve_batches_that_a_caller_brings():
    model, images = ImageScores(), torch.rand(9, 3, 32, 32)
    with torch.no_grad():
        wanted = model(images)
    with gpuinfer.Batcher(model, backend="central", devices="cpu,cpu", max_rows=4) as batcher:
        assert torch.allclose(batcher.predict_batch(images), wanted, atol=1e-5)
        assert batcher.predict_batch(images[:1]).shape == (1, 5)
        assert set(batcher.stats()["device"]["devices"]) == {"cpu:0", "cpu:1"}


def test_a_row_at_which_the_model_raises_fails_alone():
    with gpuinfer.Batcher(FaultyRow(), backend="central", check=False) as batcher:
        asked = [batcher.submit(torch.full((3,), float(n))) for n in (1, BAD_ROW, 3)]
        assert asked[0].result()[0] == 2
        assert asked[2].result()[0] == 6
        with pytest.raises(BackendError, match="this row is bad"):
            asked[1].result()
        assert batcher.predict(torch.tensor([torch.nan, 1, 1])).isnan().any()  # nobody checks


def test_answers_are_checked_and_rows_are_like_the_first():
    with gpuinfer.Batcher(doubled, backend="central") as batcher:
        assert batcher.predict(torch.ones(2))[0] == 2
        with pytest.raises(BadResult, match="NaN"):
            batcher.predict(torch.tensor([torch.nan, 1]))
        with pytest.raises(RequestError, match="give it to predict_batch"):
            batcher.predict(torch.ones(2, 2))


def test_rows_of_several_lengths_are_padded_to_the_longest():
    longest = torch.zeros(6, dtype=torch.int64)
    with gpuinfer.Batcher(TokenSums(), backend="central", ragged="pad", pad_value=100, example=longest) as batcher:
        assert [one.item() for one in batcher.predict(torch.tensor([1, 2, 3]))] == [306, 6]
        assert [one.tolist() for one in batcher.predict_batch(torch.tensor([[1, 2], [3, 4]]))] == [[403, 407], [6, 6]]
        assert batcher.predict(torch.ones(6, dtype=torch.int64))[0] == 6
        with pytest.raises(RequestError, match=r"this row has 7 where the example has 6.*the longest row"):
            batcher.predict(torch.ones(7, dtype=torch.int64))
    for options in ({"ragged": "group", "example": longest}, {"ragged": "pad"}):
        with pytest.raises(UsageError, match='Give ragged="pad" and the longest row as the example'):
            gpuinfer.Batcher(TokenSums(), backend="central", **options)


def test_what_cannot_go_to_another_process_is_refused_with_the_cure():
    class Local(torch.nn.Module):
        pass

    for model, cure in (
        (lambda row: row, "a lambda cannot be imported by another process"),
        (Local(), r"'Local', made inside a function, cannot be .*from nets import Local"),
    ):
        with pytest.raises(UsageError, match=cure):
            gpuinfer.Batcher(model, backend="central")


PROGRAM = """
import torch, gpuinfer
class Net(torch.nn.Module):
    def forward(self, row):
        return row * 2
def main():
    with gpuinfer.Batcher(Net(), backend="central") as batcher:
        print(batcher.predict(torch.ones(2)).tolist())
"""
GUARDED = PROGRAM + "if __name__ == '__main__':\n    main()\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "written", "said"),
    [
        pytest.param(GUARDED, True, "[2.0, 2.0]", id="a class of the program itself"),
        pytest.param(PROGRAM + "main()", True, "below `if __name__ == '__main__':`", id="without the guard"),
        pytest.param(GUARDED, False, "in a notebook or at a prompt", id="a class that lies in no file"),
    ],
)
def test_a_class_of_the_main_program(program, written, said, tmp_path):
    (tmp_path / "program.py").write_text(program)
    words = [str(tmp_path / "program.py")] if written else ["-c", program]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)
    assert said in done.stdout + done.stderr
