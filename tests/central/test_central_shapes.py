"""`CentralServer` with a model that the program has made, and its clients, which ask for rows of any shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from row_models import BAD_ROW, FaultyRow, ImageScores, MaskedMeans, TokenSums, doubled
from torch import nn

from gpuinfer import CentralServer
from gpuinfer.errors import BackendError, RequestError

pytestmark = pytest.mark.usefixtures("children_forked")

IMAGE = (3, 32, 32)


@pytest.fixture(scope="module")
def masked():
    row = {"ids": torch.zeros(3, dtype=torch.int64), "mask": torch.zeros(3, dtype=torch.bool)}
    with CentralServer(MaskedMeans(), example=row) as server, server.client() as client:
        yield client


def test_a_model_object_answers_images_as_it_does_here():
    model, images = ImageScores().eval(), torch.rand(5, *IMAGE)
    with torch.no_grad():
        wanted = model(images)
    with CentralServer(model, example=images[0]) as server, server.client() as client:
        torch.testing.assert_close(client.evaluate(images), wanted, rtol=1e-4, atol=1e-5)
        found = client.evaluate(images.numpy())
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        asked = [client.submit(images[n : n + 1]) for n in range(5)]
        torch.testing.assert_close(torch.cat([one.result() for one in asked]), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(nn.Linear(4, 2), {"inputs": 4}, id="an object, of features"),
        pytest.param(
            nn.Linear, {"example": [0.0] * 4, "arguments": {"in_features": 4, "out_features": 2}}, id="a class"
        ),
        pytest.param(doubled, {"example": np.zeros(4, np.float32)}, id="a function of a batch"),
        pytest.param("row_models:Reversed", {"example": torch.zeros(2, 2)}, id="a name"),
        pytest.param("row_models:Reversed", {"inputs": (2, 2)}, id="a name, and a shape"),
    ],
)
@pytest.mark.sample(2)
def test_what_may_be_the_model(model, options):
    shape = (2, 2) if isinstance(model, str) else (4,)
    rows = np.random.rand(3, *shape).astype(np.float32)
    with CentralServer(model, **options) as server, server.client() as client:
        found = client.evaluate(rows)
    if isinstance(model, nn.Module):
        np.testing.assert_allclose(found, model(torch.from_numpy(rows)).detach(), rtol=1e-5)
    elif model is doubled:
        np.testing.assert_array_equal(found, rows * 2)
    elif isinstance(model, str):
        np.testing.assert_array_equal(found, rows[:, ::-1])
    else:
        assert found.shape == (3, 2)


def test_dicts_go_and_come_in_their_own_dtypes(masked):
    ids, mask = torch.tensor([[1, 2, 1 << 60], [4, 5, 7]]), torch.tensor([[True, True, True], [False, True, True]])
    found = masked.evaluate({"ids": ids, "mask": mask})
    assert {name: part.dtype for name, part in found.items()} == {
        "any": torch.bool, "kept": torch.int64, "mean": torch.float32,
    }  # fmt: skip
    assert found["kept"].tolist() == [3, 2]
    assert found["mean"][1] == 6


def test_tuples_of_answers_keep_whole_numbers_whole():
    with CentralServer(TokenSums(), example=torch.zeros(2, dtype=torch.int64)) as server, server.client() as client:
        total, count = client.evaluate(torch.tensor([[1 << 60, 1], [2, 3]]))
        assert (total.tolist(), count.tolist()) == ([(1 << 60) + 1, 5], [2, 2])


def test_rows_are_written_into_a_block_that_travels_without_a_copy():
    with CentralServer(doubled, example=np.zeros(4, np.float32)) as server, server.client() as client:
        block = client.block(2)
        block[:, :16].view(np.float32)[:] = [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert client.evaluate(block).tolist() == [[2, 4, 6, 8], [10, 12, 14, 16]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param({"ids": torch.zeros(1, 3, dtype=torch.int64)}, "the same names", id="a name less"),
        pytest.param(torch.zeros(1, 3), "the same names", id="a tensor"),
        pytest.param({"ids": torch.zeros(1, 3), "mask": torch.zeros(1, 3).bool()}, r"to\(torch.int64\)", id="a dtype"),
        pytest.param(
            {"ids": torch.zeros(1, 4).long(), "mask": torch.zeros(1, 3).bool()}, "same shape|lengths", id="a shape"
        ),
        pytest.param(
            {"ids": torch.zeros(2, 3).long(), "mask": torch.zeros(1, 3).bool()}, "2, 1 rows. Give each", id="counts"
        ),
        pytest.param({"ids": torch.zeros(3).long(), "mask": torch.zeros(3).bool()}, r"row\[None\]", id="a row alone"),
        pytest.param({"ids": torch.zeros(0, 3).long(), "mask": torch.zeros(0, 3).bool()}, "without rows", id="no rows"),
        pytest.param("text", "made of tensors", id="no rows at all"),
    ],
)
def test_rows_unlike_those_of_the_server_are_refused_with_the_cure(masked, rows, said):
    with pytest.raises(RequestError, match=said):
        masked.evaluate(rows)
    assert masked.evaluate({"ids": torch.ones(1, 3).long(), "mask": torch.ones(1, 3).bool()})["kept"] == 3


def test_a_block_at_which_the_model_raises_fails_alone():
    with CentralServer(FaultyRow(), example=torch.zeros(2)) as server, server.client() as client:
        good, bad = client.submit(torch.ones(2, 2)), client.submit(torch.full((2, 2), float(BAD_ROW)))
        assert good.result().tolist() == [[2, 2], [2, 2]]
        with pytest.raises(BackendError, match="this row is bad"):
            bad.result()
