"""Rows of any shape on a CUDA device that is not there: what is asked of it, what orders it, and the answers.

What comes back from fake tensors is made up, and no answer is sound: `check=False` lets it through.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from streamed import FIRST, SECOND, found, in_threads, plant
from torch import nn

import gpuinfer
from gpuinfer.api import Setup
from gpuinfer.errors import BackendError, BadResult
from gpuinfer.models import forward_leaves_cuda
from gpuinfer.models.forward_leaves import LeavesForward
from gpuinfer.models.forward_leaves_cuda import CudaLeavesForward, DeviceRows
from gpuinfer.models.model_object import LocalModel, object_spec
from gpuinfer.models.open_model import open_model
from gpuinfer.models.row_layout import RowBatch, SingleRow, layout_of_row, leaves_of, packed_rows

ANSWERED = "models/forward_leaves_cuda.py CudaLeavesForward._brought_back"  # waits for the event behind its copies
OPENED = "models/forward_leaves_cuda.py CudaLeavesForward.__init__"  # for the weights
WEIGHTS = "models/model_object.py LocalModel.build"


class Reader(nn.Module):
    """An image and tokens to three answers, of which one is no number for a row with the token 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.look = nn.Conv2d(2, 3, 3)
        self.words = nn.Embedding(9, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, image, tokens):
        seen = torch.relu_(self.look(self.dropout(image)).mean((2, 3)))
        read = torch.where(tokens == 0, torch.nan, self.words(tokens).sum(2))
        return {"seen": seen, "read": read, "first": tokens[:, 0] * 2}


def rows_of(count, seed=0):
    dice = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 2, 6, 5, generator=dice)
    tokens = torch.randint(1, 9, (count, 3), generator=dice)
    return [{"image": image, "tokens": words} for image, words in zip(images, tokens, strict=True)]


LAYOUT = layout_of_row(rows_of(1)[0])


def single(row):
    return SingleRow(leaves_of(row))


def batch(rows):
    return RowBatch([torch.stack(column) for column in zip(*map(leaves_of, rows), strict=True)], len(rows))


def packed(rows):
    block = np.zeros((len(rows), LAYOUT.row_bytes), np.uint8)
    packed_rows(batch(rows).leaves, LAYOUT, len(rows), block)
    return block


def opened(source, layout=LAYOUT, dtype="float32", devices=("cuda:0",), check=True, **options):
    spec = object_spec(source, layout, check=check)
    tuning = {"max_rows": None, "in_flight": None, "chunk_rows": None, "threads": None, "graphs": True}
    setup = Setup(model=spec, devices=devices, dtype=dtype)
    return open_model(spec, setup, SimpleNamespace(compile=False, compute="auto", **tuning | options))


def counted(monkeypatch):
    """How often pinned memory is made from here on."""
    made, empty = [], torch.empty

    def noted(*size, **named):
        if named.get("pin_memory"):
            made.append(size)
        return empty(*size, **named)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pytest.fail("takes pinned memory for each batch"))
    return made


def of_cpu(model, rows):
    """The answer to each row, on the CPU."""
    forward = LeavesForward(model.eval(), LAYOUT, torch.device("cpu"), torch.float32, chunk_rows=64)
    return [one.value for one in forward([single(row) for row in rows])]


def assert_same(answer, expected):
    assert answer.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(answer[name].cpu().numpy(), value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_is_one_copy_there_and_one_wait_and_its_memory_is_used_again(cuda, monkeypatch, dtype):
    one = opened(LocalModel(Reader()), dtype=dtype)
    assert (one.limits.in_flight, one.answer.shapes) == (2, ((3,), (3,), ()))
    made = counted(monkeypatch)
    for count in (40, 3, 40, 25, 1):
        sent, waited = cuda.sent, cuda.waited
        with cuda.waiting_only_in(ANSWERED):
            answers = one.forward([single(row) for row in rows_of(count)])
        assert (cuda.sent - sent, cuda.waited - waited, len(answers)) == (1, 1, count)
    for ask in (
        [batch(rows_of(7))],
        [packed(rows_of(7))],
        [single(rows_of(1)[0]), batch(rows_of(30)), packed(rows_of(2))],
    ):
        sent, waited = cuda.sent, cuda.waited
        with cuda.waiting_only_in(ANSWERED):
            one.forward(ask)
        assert (cuda.sent - sent, cuda.waited - waited) == (1, 1)
    assert (
        len(made) <= 4
    )  # of each lane for rows and for answers, at most; those of the trial are large enough for more
    one.forward([batch(rows_of(2000))])
    assert len(made) <= 8


def test_larger_batches_than_a_step_are_sent_at_once_and_waited_for_once(cuda):
    one = opened(LocalModel(Reader()), chunk_rows=16, check=False)
    with cuda.waiting_only_in(ANSWERED):
        (answer,) = one.forward([batch(rows_of(50))])
    assert cuda.waits[ANSWERED] == 3  # two when it was tried
    assert answer.value["seen"].shape == (50, 3)


class Hungry(nn.Module):
    """Has no memory for more than so many rows at once."""

    rows = 40

    def forward(self, features):
        if len(features) > Hungry.rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return features * 2


def test_steps_that_do_not_fit_are_halved(cuda, monkeypatch, caplog):
    monkeypatch.setattr(Hungry, "rows", 16)
    row = torch.zeros(4)
    one = opened(LocalModel(Hungry()), layout_of_row(row), chunk_rows=64, check=False)
    (answer,) = one.forward([RowBatch([torch.zeros(50, 4)], 50)])
    assert answer.value.shape == (50, 4)
    assert "out of memory at 50 rows" in caplog.text
    assert cuda.log.count("the cache is emptied") == 2
    monkeypatch.setattr(Hungry, "rows", 0)
    with pytest.raises(BackendError, match=r"single row of model 'Hungry' on cuda:0"):
        one.forward([SingleRow([row])])


def test_a_compiled_module_is_given_few_sizes(cuda):
    sizes = []

    class OptimizedModule(nn.Module):  # as torch.compile calls its own
        def forward(self, features):
            sizes.append(len(features))
            return features * 2

    one = opened(LocalModel(OptimizedModule()), layout_of_row(torch.zeros(4)), chunk_rows=48, check=False)
    for rows in (1, 17, 40, 100):
        (answer,) = one.forward([RowBatch([torch.zeros(rows, 4)], rows)])
        assert answer.value.shape == (rows, 4)
    assert sizes == [16, 16, 16, 32, 48, 48, 48, 16]  # after two that tried it


def test_a_function_of_arrays_computes_on_the_cpu_and_others_on_the_device(cuda):
    def doubled(rows):
        assert isinstance(rows, np.ndarray) or rows.is_cuda
        return rows * 2

    for row in (np.ones(3, np.float32), torch.ones(3)):
        (answer,) = opened(LocalModel(doubled), layout_of_row(row), check=False).forward([SingleRow([row])])
        assert type(answer.value) is type(row)


@pytest.mark.parametrize(("device", "size"), [("cpu", 64 << 20), ("cuda:0", 256 << 20)])
def test_a_batch_of_large_rows_has_fewer(cuda, device, size):
    row = torch.zeros(3, 224, 224)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert opened(LocalModel(model), layout_of_row(row), devices=(device,)).limits.max_rows == size // row.nbytes


# Its order


@pytest.fixture
def model(recorded):
    return Reader()


def forward_of(model, device=FIRST, **options):
    module = LocalModel(model).build(device, torch.float32)
    return CudaLeavesForward(module, LAYOUT, device, torch.float32, **({"chunk_rows": 64, "lanes": 2} | options))


def test_several_threads_have_their_own_answers_which_later_batches_leave_alone(recorded, model):
    forward = forward_of(model)

    def ask(number):
        kept = []
        for turn in range(3):
            rows = rows_of(5 + 3 * number + turn, seed=10 * number + turn)
            kept.append((rows, forward([single(row) for row in rows])))
        return kept

    asked = [one for kept in in_threads(3, ask) for one in kept]
    for rows, answers in asked:
        for answer, expected in zip(answers, of_cpu(model, rows), strict=True):
            assert_same(answer.value, expected)
    assert found(recorded) == []
    assert len({stream for stream in recorded.streams if stream.launched}) == 3  # the default one made the weights


@pytest.mark.parametrize("options", [{}, {"chunk_rows": 4}], ids=["whole", "in steps"])
def test_rows_of_all_kinds_share_a_batch_and_those_on_the_device_stay_there(recorded, model, options):
    forward, rows = forward_of(model, **options), rows_of(12)
    there = [{name: value.to(FIRST) for name, value in row.items()} for row in rows[3:9]]
    joined = DeviceRows([torch.stack(column) for column in zip(*map(leaves_of, there[1:]), strict=True)], 5)
    requests = [
        *map(single, rows[:2]),
        batch(rows[2:3]),
        DeviceRows([leaf[None] for leaf in leaves_of(there[0])], 1, single=True),
        joined,
        single(rows[9]),
        packed(rows[10:]),
    ]
    there.clear()
    answers = [getattr(one, "value", one) for one in forward(requests)]
    assert [one["seen"].device.type for one in answers[:6]] == ["cpu", "cpu", "cpu", "cuda", "cuda", "cpu"]
    alone, several = {0, 1, 3, 5}, []
    for place, one in enumerate(answers):
        parts = (
            [one] if place in alone else [dict(zip(one, row, strict=True)) for row in zip(*one.values(), strict=True)]
        )
        several += [{name: torch.as_tensor(value) for name, value in part.items()} for part in parts]
    for answer, expected in zip(several, of_cpu(model, rows), strict=True):
        assert_same(answer, expected)
    assert found(recorded) == []


def test_a_row_with_an_answer_that_is_no_number_fails_alone(recorded, model):
    forward, rows = forward_of(model), rows_of(6)
    for row in rows[1:3]:
        row["tokens"][1] = 0
    there = DeviceRows([leaf[None].to(FIRST) for leaf in leaves_of(rows[2])], 1, single=True)
    answers = forward([single(rows[0]), there, single(rows[1]), *map(single, rows[3:])])
    assert [isinstance(one, BadResult) for one in answers] == [False, True, True, False, False, False]
    assert "Reader" not in str(answers[1])
    assert found(recorded) == []


def test_rows_on_another_device_are_answered_there(recorded, model):
    forward, rows = forward_of(model), rows_of(4)
    with torch.cuda.stream(torch.cuda.Stream(SECOND)):
        there = DeviceRows([leaf.to(SECOND) for leaf in batch(rows).leaves], 4)
        ((answer,),) = in_threads(1, lambda number: forward([there]))
        assert {part.device for part in answer.value.values()} == {SECOND}
        doubled = {name: (part * 2).cpu() for name, part in answer.value.items()}
        del answer
    for place, expected in enumerate(of_cpu(model, rows)):
        assert_same({name: part[place] / 2 for name, part in doubled.items()}, expected)
    assert found(recorded) == []


@pytest.mark.parametrize("devices", ["cuda:0", ["cuda:0", "cuda:1"]], ids=["one device", "two devices"])
def test_a_batcher_answers_rows_where_they_lie(recorded, model, devices):
    rows = rows_of(24)
    there = [{name: value.to(FIRST) for name, value in row.items()} for row in rows]
    with gpuinfer.Batcher(model, devices=devices, example=rows[0], max_rows=8) as batcher:
        here = list(batcher.map(rows))
        kept = list(batcher.map(there))
        (alone,) = in_threads(1, lambda number: batcher.predict(there[0]))
        image, tokens = (torch.stack(column) for column in zip(*map(leaves_of, there), strict=True))
        joined = batcher.predict_batch({"image": image, "tokens": tokens})
        with pytest.raises(BackendError, match="index out of range"):
            batcher.predict({"image": rows[0]["image"], "tokens": rows[0]["tokens"] + 100})
    assert {part.device.type for one in here for part in one.values()} == {"cpu"}
    assert {part.device for one in [*kept, alone, joined] for part in one.values()} == {FIRST}
    for place, expected in enumerate(of_cpu(model, rows)):
        for answer in (here[place], kept[place], {name: part[place] for name, part in joined.items()}):
            assert_same(answer, expected)
    assert found(recorded) == []


def batches(model):
    forward = forward_of(model)
    for number in range(3):
        forward([single(row) for row in rows_of(8, number)])


def batches_of_a_model_that_is_there(model):
    """In another number format."""
    batches(model.to(FIRST, torch.float64))


def batches_on_the_device(model):
    """Made on one stream, and used there, while a lane goes on."""
    forward = forward_of(model)
    with torch.cuda.stream(torch.cuda.Stream(FIRST)):
        for number in range(2):
            there = DeviceRows([leaf.to(FIRST, non_blocking=True) * 1 for leaf in batch(rows_of(8, number)).leaves], 8)
            ((answer,),) = in_threads(1, lambda number, there=there: forward([there]))
            used = [part * 2 for part in answer.value.values()]
            answer = None
            assert used[0].shape == (8, 3)


def a_batch_that_fails(model):
    forward = forward_of(model, lanes=1)
    for token in (100, 1):
        rows = rows_of(8)
        rows[3]["tokens"][0] = token
        try:
            forward([single(row) for row in rows])
        except IndexError:
            assert token == 100  # of which the model has no embedding


PLANTS = {
    "answers are read before they are there": (
        batches, CudaLeavesForward, "_brought_back", "lane.done.synchronize()", "pass", "the host in .* reading",
    ),
    "rows are staged over those that are being copied": (
        batches, CudaLeavesForward, "_brought_back", "lane.done.synchronize()", "pass", "the host in .* writing",
    ),
    "the kernels are on another stream than the event": (
        batches, CudaLeavesForward, "_answered", ", torch.cuda.stream(lane.stream)", "", "the host in .* reading",
    ),
    "a batch begins before the weights are there": (
        batches_of_a_model_that_is_there, forward_leaves_cuda, "wait_for_device", "torch.cuda.synchronize(device)",
        "pass", "convolution reading .* copy_ writing",
    ),
    "rows are joined before they have been written": (
        batches_on_the_device, CudaLeavesForward, "_uploaded", "torch.cuda.current_stream(device).wait_event(event)",
        "pass", "cat reading .* mul writing",
    ),
    "answers are given back while their owner's stream reads them": (
        batches_on_the_device, forward_leaves_cuda, "kept_there", "part.record_stream(one.stream)", "pass",
        "memory that was freed",
    ),
    "a lane is used again while the rows of a batch that failed are being copied": (
        a_batch_that_fails, CudaLeavesForward, "_answered", "lane.stream.synchronize()", "pass",
        "the host in .* writing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTS.values(), ids=PLANTS)
def test_a_race_that_is_planted_is_found(recorded, model, monkeypatch, planted):
    scenario, owner, name, old, new, words = planted
    plant(monkeypatch, owner, name, old, new)
    scenario(model)
    assert any(re.search(words, one) for one in found(recorded)), found(recorded)


@pytest.mark.parametrize(
    "scenario", [batches, batches_of_a_model_that_is_there, batches_on_the_device, a_batch_that_fails]
)
def test_where_they_are_planted_there_is_none(recorded, model, scenario):
    scenario(model)
    assert found(recorded) == []
