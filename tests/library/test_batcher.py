"""`gpuinfer.Batcher`: rows of any shape, models that are objects, threads and coroutines, waiting and refusing."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed

import numpy as np
import pytest
import torch
from torch import nn

import gpuinfer
from gpuinfer.errors import BackendError, BadResult, Closed, Expired, QueueFull, RequestError, UsageError
from gpuinfer.models.processor import has_bfloat16

PATIENCE_S = 60.0


class Convolutions(nn.Module):
    """Images [3, 8, 8] to 5 numbers, with dropout."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.first, self.drop, self.last = nn.Conv2d(3, width, 3), nn.Dropout(0.5), nn.Linear(width, 5)

    def forward(self, images):
        return self.last(self.drop(torch.relu(self.first(images)).mean((2, 3))))


class TwoHeads(nn.Module):
    """Token ids int64 [6] and a mask bool [6] to a dict of a sum and a count."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 3)

    def forward(self, ids, mask):
        kept = self.embed(ids) * mask[..., None]
        return {"sum": kept.sum(1), "count": mask.sum(1)}


class Blocking:
    """A function of a batch that waits for `go`; `started` is set once it has a batch of rows (not of the try)."""

    def __init__(self):
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, rows):
        if bool((rows >= 100).any()):
            self.started.set()
            assert self.go.wait(PATIENCE_S)
        return rows


def like(found, wanted):
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(like(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(like, found, wanted))
    return type(found) is type(wanted) and np.allclose(np.asarray(found), np.asarray(wanted), atol=1e-5)


torch.manual_seed(3)
IMAGES, HEADS = Convolutions().eval(), TwoHeads().eval()
IDS, MASK = torch.tensor([1, 2, 3, 4, 0, 0]), torch.tensor([True] * 4 + [False] * 2)
ROWS = {
    "an image": (IMAGES, torch.randn(3, 8, 8)),
    "an image as an array": (IMAGES, np.random.default_rng(0).random((3, 8, 8), np.float32)),
    "an image of the wrong float": (IMAGES, np.random.default_rng(0).random((3, 8, 8))),
    "names": (HEADS, {"mask": MASK, "ids": IDS}),
    "places": (HEADS, (IDS, MASK)),
    "a number": (lambda rows: rows * 2, np.float32(3)),
    "a whole number": (lambda rows: rows * 2, np.int64(2**40)),
    "half": (lambda rows: rows.float().sum(1), torch.ones(7, dtype=torch.float16)),
    "no dimension": (lambda rows: (rows, rows + 1), torch.tensor(5)),
    "nested": (lambda row: row["a"] + row["b"][0] * row["b"][1], {"a": IDS, "b": (IDS, MASK)}),
    "truth": (lambda rows: ~rows, torch.tensor([True, False])),
    "bytes": (lambda rows: rows.sum(1, dtype=torch.int64), torch.tensor([250, 250], dtype=torch.uint8)),
}


def scripted(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which torch says of it, and people still have
        return torch.jit.script(model)


def direct(model, row):
    """What the model answers to a batch of this row alone."""

    def batched(value):
        if isinstance(value, dict):
            return {name: batched(one) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(map(batched, value))
        if isinstance(value, torch.Tensor):
            return value[None]
        array = np.asarray(value)[None]
        as_is = not isinstance(model, nn.Module)
        return array if as_is else torch.from_numpy(array.astype(np.float32))

    given = batched(row)
    with torch.no_grad():
        if isinstance(given, tuple):
            answer = model(*given)
        elif isinstance(given, dict) and isinstance(model, nn.Module):
            answer = model(**given)
        else:
            answer = model(given)

    def alone(value):
        if isinstance(value, dict):
            return {name: alone(one) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(map(alone, value))
        if isinstance(value, torch.Tensor) and isinstance(row, np.ndarray | np.generic):
            value = value.numpy()
        return value[0]

    return alone(answer)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_any_shape_has_the_models_answer(name):
    model, row = ROWS[name]
    with gpuinfer.Batcher(model) as batcher:
        answers = [batcher.predict(row), *batcher.map([row] * 5), batcher.submit(row).result(PATIENCE_S)]
    wanted = direct(model, row)
    assert all(like(answer, wanted) for answer in answers), (answers[0], wanted)


def test_the_object_is_given_back_untouched_and_its_weights_are_shared():
    model = Convolutions().train()
    row = torch.randn(3, 8, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with gpuinfer.Batcher(model) as batcher:
        first = batcher.predict(row)
        assert like(first, batcher.predict(row)), "dropout is off"
        with torch.no_grad():
            model.last.bias += 1.0
        assert like(batcher.predict(row), first + 1.0), "new weights count from the next batch on"
        assert not first.requires_grad
    with torch.no_grad():
        model.last.bias -= 1.0
    assert all(one.training for one in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.allclose(tensor, before[name], atol=1e-6) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(Convolutions, {"arguments": {"width": 6}}, id="a class"),
        pytest.param(scripted(IMAGES), {}, id="TorchScript"),
        pytest.param("test_batcher:Convolutions", {"arguments": {"width": 3}}, id="a name"),
        pytest.param(IMAGES, {"dtype": torch.bfloat16}, id="bfloat16"),
        pytest.param(Convolutions().to(torch.bfloat16), {}, id="in bfloat16"),
        pytest.param(IMAGES, {"strategy": gpuinfer.Adaptive}, id="a strategy as a class"),
        pytest.param(IMAGES, {"strategy": gpuinfer.Dynamic("2ms", max_rows=8)}, id="the first option by place"),
        pytest.param(IMAGES, {"strategy": "priority", "max_rows": "2k"}, id="a strategy by name"),
        pytest.param(IMAGES, {"strategy": gpuinfer.Adaptive(latency_target="50ms")}, id="a strategy"),
        pytest.param(IMAGES, {"devices": ["cpu", "cpu"]}, id="two devices"),
        pytest.param(IMAGES, {"example": torch.zeros(3, 8, 8)}, id="an example"),
        pytest.param(IMAGES, {"deterministic": True, "seed": 3}, id="deterministic"),
    ],
)
def test_a_model_is_an_object_a_class_or_a_name(model, options):
    with gpuinfer.Batcher(model, **options) as batcher:
        assert batcher.predict(torch.ones(3, 8, 8)).shape == (5,)


def test_pythons_numbers_are_taken_as_the_dtype_of_the_rows():
    with gpuinfer.Batcher(lambda rows: rows / 2) as batcher:
        found = [batcher.predict(row) for row in ([1.5, 2.5], [1, 2], [True, False], np.ones(2, np.float32))]
    assert [one.tolist() for one in found] == [[0.75, 1.25], [0.5, 1.0], [0.5, 0.0], [0.5, 0.5]]


def test_many_threads_share_batches_and_each_has_its_own_answer():
    with gpuinfer.Batcher(lambda rows: rows * 2, example=torch.zeros(())) as batcher, ThreadPoolExecutor(16) as pool:
        numbers = [torch.tensor(float(number)) for number in range(400)]
        assert [float(one) for one in pool.map(batcher.predict, numbers)] == [2.0 * n for n in range(400)]
        assert batcher.stats()["batches"]["count"] < 400


async def test_coroutines_share_batches_and_each_has_its_own_answer():
    async with gpuinfer.Batcher(lambda rows: rows * 2) as batcher:
        numbers = [torch.tensor(float(number)) for number in range(300)]
        answers = await asyncio.gather(*(batcher(one, priority="high", timeout="60s") for one in numbers))
        assert [float(one) for one in answers] == [2.0 * n for n in range(300)]
        assert [float(one) async for one in batcher.stream(numbers)] == [2.0 * n for n in range(300)]
        unordered = [float(one) async for one in batcher.stream(numbers, ordered=False)]
        assert sorted(unordered) == [2.0 * n for n in range(300)]
        assert (await batcher.batch(torch.arange(10.0))).tolist() == [2.0 * n for n in range(10)]
        assert batcher.stats()["batches"]["rows_mean"] > 2


async def test_one_that_is_open_for_threads_is_awaited_from_any_loop_too():
    """As in a notebook, where a loop runs already."""
    with gpuinfer.Batcher(lambda rows: rows + 1) as batcher:
        assert float(batcher.predict(torch.tensor(1.0))) == 2.0
        assert float(await batcher(torch.tensor(2.0))) == 3.0
        elsewhere = await asyncio.to_thread(lambda: asyncio.run(asked(batcher, torch.tensor(3.0))))
        assert float(elsewhere) == 4.0


async def asked(batcher, row):
    return await batcher(row, timeout=PATIENCE_S)


def test_it_works_under_uvloop():
    uvloop = pytest.importorskip("uvloop")

    async def main():
        async with gpuinfer.Batcher(lambda rows: rows + 1) as batcher:
            return await asyncio.gather(*(batcher(torch.tensor(float(n))) for n in range(50)))

    assert [float(one) for one in uvloop.run(main())] == [n + 1.0 for n in range(50)]


def test_a_batch_of_one_caller_is_divided_and_joined():
    rows = torch.arange(25.0)
    with gpuinfer.Batcher(lambda rows: {"double": rows * 2, "same": rows}, max_rows=8, devices="cpu,cpu") as batcher:
        for split in (False, True):
            found = batcher.predict_batch(rows, split=split)
            assert like(found, {"double": rows * 2, "same": rows})
        assert batcher.stats()["batches"]["rows_max"] <= 8
        arrays = gpuinfer.Batcher(lambda rows: rows * 2)
        with arrays:
            assert like(arrays.predict_batch(np.arange(5.0)), np.arange(5.0) * 2)


@pytest.mark.parametrize("ragged", ["pad", "group"])
def test_rows_of_several_lengths_share_batches(ragged):
    def summed(ids, mask):
        assert ids.shape == mask.shape
        return (ids * mask).sum(1)

    rows = [(torch.arange(1, n), torch.ones(n - 1, dtype=torch.int64)) for n in (3, 9, 4, 33, 9, 2)]
    with gpuinfer.Batcher(summed, ragged=ragged) as batcher:
        assert [int(one) for one in batcher.map(rows)] == [sum(range(1, n)) for n in (3, 9, 4, 33, 9, 2)]


def test_map_reads_rows_as_they_are_needed_and_stops_when_it_is_left():
    read = []

    def rows():
        for number in range(10**6):
            read.append(number)
            yield torch.tensor(float(number))

    with gpuinfer.Batcher(lambda rows: rows, max_rows=4) as batcher:
        for answer in batcher.map(rows()):
            if float(answer) == 50:
                break
        assert len(read) < 200
        numbers = [torch.tensor(float(number)) for number in range(100)]
        assert sorted(float(one) for one in batcher.map(numbers, ordered=False)) == list(map(float, range(100)))


def test_a_bar_is_drawn_on_standard_error(capsys):
    with gpuinfer.Batcher(lambda rows: rows) as batcher:
        assert len(list(batcher.map([torch.zeros(1)] * 7, progress=True))) == 7
    assert "7/7" in capsys.readouterr().err


def test_a_full_queue_waits_or_refuses():
    model = Blocking()
    rows = [torch.tensor(100.0)] * 3
    with gpuinfer.Batcher(model, queue="refuse", max_queue_rows=2, example=rows[0]) as batcher:
        futures = [batcher.submit(one) for one in rows[:2]]
        with pytest.raises(QueueFull, match=r'2 of 2 rows are outstanding.*queue="wait"'):
            batcher.submit(rows[2])
        model.go.set()
        assert [float(one.result(PATIENCE_S)) for one in futures] == [100.0] * 2
        assert float(batcher.predict(rows[2])) == 100.0
    model = Blocking()
    with gpuinfer.Batcher(model, max_queue_rows=2, example=rows[0]) as batcher, ThreadPoolExecutor(8) as pool:
        asked_for = [pool.submit(batcher.predict, rows[0]) for _ in range(8)]
        assert model.started.wait(PATIENCE_S)
        assert not any(one.done() for one in asked_for)
        model.go.set()
        assert [float(one.result(PATIENCE_S)) for one in as_completed(asked_for)] == [100.0] * 8


async def test_a_coroutine_waits_for_room_or_is_refused():
    model = Blocking()
    row = torch.tensor(100.0)
    async with gpuinfer.Batcher(model, max_queue_rows=2, queue="refuse", example=row) as batcher:
        first = [asyncio.ensure_future(batcher(row)) for _ in range(2)]
        await asyncio.to_thread(model.started.wait, PATIENCE_S)
        with pytest.raises(QueueFull):
            await batcher(row)
        model.go.set()
        assert [float(one) for one in await asyncio.gather(*first)] == [100.0, 100.0]
    async with gpuinfer.Batcher(lambda rows: rows, max_queue_rows=2, example=row) as batcher:
        assert len(await asyncio.gather(*(batcher(row) for _ in range(20)))) == 20


def test_timeouts_and_cancellation_reach_the_engine():
    model = Blocking()
    row = torch.tensor(100.0)
    with gpuinfer.Batcher(model, max_rows=1, example=row) as batcher:
        held = batcher.submit(row)
        assert model.started.wait(PATIENCE_S)
        with pytest.raises(Expired):
            batcher.predict(row, timeout="50ms")
        for _ in range(3):
            with pytest.raises(Expired, match=r"no answer within 1e-09 s|deadline passed"):
                batcher.predict(row, timeout=1e-9)
        waiting = batcher.submit(row)
        assert waiting.cancel()
        with pytest.raises(CancelledError):
            waiting.result(PATIENCE_S)
        model.go.set()
        assert float(held.result(PATIENCE_S)) == 100.0
        errors = batcher.stats()["errors"]
    assert errors["cancelled"] + errors["expired"] == 5


async def test_an_awaited_row_is_cancelled_or_late():
    model = Blocking()
    row = torch.tensor(100.0)
    async with gpuinfer.Batcher(model, max_rows=1, example=row) as batcher:
        held = asyncio.ensure_future(batcher(row))
        await asyncio.to_thread(model.started.wait, PATIENCE_S)
        for seconds in (0.05, 1e-9):
            with pytest.raises(Expired, match=r"no answer within|deadline passed"):
                await batcher(row, timeout=seconds)
        waiting = asyncio.ensure_future(batcher(row))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        model.go.set()
        assert float(await held) == 100.0


def test_a_row_at_which_the_model_raises_fails_alone():
    def picky(rows):
        if bool((rows == 13).any()):
            raise ValueError("thirteen")
        return rows

    with gpuinfer.Batcher(picky) as batcher:
        futures = [batcher.submit(torch.tensor(float(number))) for number in range(20)]
        failed = [number for number, one in enumerate(futures) if one.exception(PATIENCE_S)]
        assert failed == [13]
        with pytest.raises(BackendError, match=r"picky.*ValueError: thirteen"):
            futures[13].result()


def test_an_answer_that_is_no_number_fails_its_row_unless_that_is_allowed():
    rows = [torch.tensor(1.0), torch.tensor(-1.0)]
    with gpuinfer.Batcher(torch.sqrt) as batcher:
        futures = [batcher.submit(one) for one in rows]
        assert float(futures[0].result(PATIENCE_S)) == 1.0
        with pytest.raises(BadResult, match="check=False"):
            futures[1].result(PATIENCE_S)
    with gpuinfer.Batcher(torch.sqrt, check=False) as batcher:
        assert torch.isnan(batcher.predict(rows[1]))


def test_leaving_the_block_answers_what_was_asked():
    with gpuinfer.Batcher(lambda rows: rows, max_rows=2) as batcher:
        futures = [batcher.submit(torch.tensor(float(number))) for number in range(50)]
    assert [float(one.result(0)) for one in futures] == list(map(float, range(50)))
    batcher.close()
    with pytest.raises(Closed, match="Make another"):
        batcher.predict(torch.tensor(1.0))


BAD_ROWS = [
    ((torch.zeros(3, 8, 8),), [(torch.zeros(2, 3, 8, 8), "That is a batch of 2 rows: give it to predict_batch")]),
    ((torch.zeros(3, 8, 8),), [(torch.zeros(3, 8, 9), "Give all rows the same shape")]),
    ((torch.zeros(3, 8, 8),), [(torch.zeros(4, 8, 8), 'ragged="pad"')]),
    ((torch.zeros(3, 8, 8),), [(torch.zeros(3, 8, 8).double(), r"row\.to\(torch\.float32\)")]),
    ((np.zeros(4, np.int64),), [(np.zeros(4, np.int32), r"row\.astype\(np\.int64\)")]),
    (({"a": torch.zeros(1)},), [({"b": torch.zeros(1)}, "the same names and places"), (torch.zeros(1), "same names")]),
    ((torch.zeros(1),), [("text", "Turn it into one of these"), (None, "Turn it"), ([[1], [1, 2]], "Turn it")]),
    (
        (torch.zeros(1),),
        [(np.array(["a"]), "Convert it to one of bool"), ({}, "one or more names"), ((), "empty tuple")],
    ),
]


@pytest.mark.parametrize(("first", "others"), BAD_ROWS)
def test_a_row_unlike_the_others_is_refused_with_the_cure(first, others):
    with gpuinfer.Batcher(lambda *rows, **named: torch.zeros(len([*rows, *named.values()][0]))) as batcher:
        batcher.predict(first[0])
        for row, cure in others:
            with pytest.raises(RequestError, match=cure):
                batcher.predict(row)
        batcher.predict(first[0])


BAD_USE = [
    (lambda: gpuinfer.Batcher(3), "neither a torch.nn.Module nor a function"),
    (lambda: gpuinfer.Batcher(IMAGES, strategy="adaptve"), "Did you mean 'adaptive'"),
    (lambda: gpuinfer.Batcher(IMAGES, strategy=7), r"gpuinfer\.Adaptive"),
    (lambda: gpuinfer.Adaptive(latency_target="soon"), "latency_target='soon' is no time. Give seconds"),
    (lambda: gpuinfer.Batcher(IMAGES, ragged="yes"), "'pad', 'group'"),
    (lambda: gpuinfer.Batcher(IMAGES, queue="maybe"), "'wait', 'refuse'"),
    (lambda: gpuinfer.Batcher(IMAGES, arguments={"width": 2}), "Leave them out"),
    (lambda: gpuinfer.Batcher(Convolutions, arguments={"with": 2}), "pass the object"),
    (lambda: opened(IMAGES, max_rowz=3), "Did you mean 'max_rows'"),
    (lambda: opened(IMAGES, backend="centrl"), "Did you mean 'central'"),
    (lambda: opened(IMAGES, devices="cuda:7"), r'devices="cpu"|no device'),
    (lambda: opened("nowhere:net"), "nowhere"),
    (lambda: opened(nn.Linear(3, 2)), r"was given 2 rows of float32 \[3, 8, 8\]|shapes cannot be multiplied"),
    (lambda: opened(lambda rows: rows.sum()), "Let the first dimension of each answer be that of the rows"),
    (lambda: opened(lambda rows: "no"), "a tensor or an array, or a tuple or dict of these"),
    (lambda: gpuinfer.Batcher(lambda rows: rows, backend="central"), "a lambda.*nets.py.*import scaled"),
    (lambda: gpuinfer.Batcher(IMAGES, max_batch_size=8), "That is max_rows=… here"),
    (lambda: gpuinfer.Batcher(IMAGES, device="cpu"), "That is devices=… here"),
    (lambda: opened(IMAGES, devices=7), "no device 'cuda:7'|devices=\"cpu\""),
    (lambda: gpuinfer.Batcher(IMAGES, max_queue_rows=0), "Give 1 or more"),
    (lambda: pickle.dumps(gpuinfer.Batcher(IMAGES)), "gpuinfer.CentralServer"),
    (lambda: gpuinfer.Batcher(IMAGES, max_wait=0.01), "strategy=gpuinfer.Dynamic"),
    (lambda: gpuinfer.Batcher(IMAGES)(torch.zeros(3, 8, 8)), r"y = await batcher\(row\).*call batcher.predict"),
    (lambda: list(gpuinfer.Batcher(IMAGES).map({"images": torch.zeros(2, 3, 8, 8)})), "goes to predict_batch"),
]


def opened(model, **options):
    with gpuinfer.Batcher(model, example=torch.zeros(3, 8, 8), **options):
        pass


@pytest.mark.parametrize(("use", "cure"), BAD_USE)
def test_bad_use_is_refused_with_the_cure_in_pythons_words(use, cure):
    with pytest.raises(UsageError, match=cure) as refused:
        use()
    assert " --" not in str(refused.value)
    assert " -B " not in str(refused.value)


def test_a_model_that_changes_its_batch_dimension_fails_its_rows():
    def odd(rows):
        return rows[:1] if len(rows) == 1 or bool((rows == 7).any()) else rows

    with gpuinfer.Batcher(lambda rows: odd(rows) if len(rows) < 4 else rows[:2], example=torch.zeros(())) as batcher:
        with pytest.raises(BackendError, match="Let the first dimension"):
            batcher.predict_batch(torch.full((4,), 7.0))
        assert float(batcher.predict(torch.tensor(1.0))) == 1.0


async def test_two_loops_and_wrong_doors_are_refused():
    async with gpuinfer.Batcher(lambda rows: rows, example=torch.zeros(())) as batcher:
        with pytest.raises(UsageError, match="opened by `with`"):
            batcher.predict(torch.zeros(()))
        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(asked(batcher, torch.zeros(()))))
        with pytest.raises(UsageError, match="open already"):
            await batcher.__aenter__()
        with pytest.raises(UsageError, match="Leave its `async with`"):
            batcher.close()
    with pytest.raises(Closed):
        await batcher(torch.zeros(()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_it_says_so():
    with gpuinfer.Batcher(lambda rows: rows, example=torch.zeros(())) as batcher:
        batcher.predict(torch.tensor(1.0))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                batcher.predict(torch.tensor(1.0))
            except BaseException as error:  # noqa: BLE001 (the parent reads it)
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert b"UsageError: this batcher came into this process by fork" in os.read(reading, 1000)
        os.close(reading)
        os.close(writing)


def test_figures_and_the_verdict_can_be_asked_at_any_time():
    batcher = gpuinfer.Batcher(IMAGES, example=torch.zeros(3, 8, 8))
    assert batcher.stats()["throughput"] is not None
    with batcher, batcher.live():
        list(batcher.map([torch.zeros(3, 8, 8)] * 50))
        report = batcher.report()
        assert report["workload"] == "batcher"
        assert report["progress"]["done"] == 50
        verdict = batcher.verdict()
    assert "bottleneck" in str(verdict)
    assert "<table>" in verdict._repr_html_()
    assert batcher.report()["progress"]["done"] == 50


def test_it_computes_in_the_dtype_of_a_half_precision_module():
    seen = []

    class Noting(nn.Linear):
        def forward(self, rows):
            seen.append((rows.dtype, self.weight.dtype))
            return super().forward(rows)

    half = torch.bfloat16 if has_bfloat16() else torch.float32  # which is faster where products of bfloat16 are slow
    for dtype, used in ((torch.bfloat16, half), (torch.float64, torch.float32)):
        seen.clear()
        with gpuinfer.Batcher(Noting(3, 2).to(dtype)) as batcher:
            assert batcher.predict(torch.ones(3)).dtype == torch.float32
        assert set(seen) == {(used, used)}


def test_a_list_of_rows_is_no_batch():
    rows = [torch.zeros(3, 8, 8)] * 2
    with gpuinfer.Batcher(IMAGES) as batcher, pytest.raises(RequestError, match=r"torch\.stack.*or give them to map"):
        batcher.predict_batch(rows)


def test_it_says_what_it_is():
    batcher = gpuinfer.Batcher(IMAGES)
    assert repr(batcher) == "<gpuinfer.Batcher of Convolutions on inprocess, not open yet>"
    with batcher:
        batcher.predict(torch.zeros(3, 8, 8))
        assert repr(batcher).endswith("open, rows of float32 [3, 8, 8]>")
    assert "closed" in repr(batcher)


def test_its_report_counts_from_its_opening_on_and_shows_its_options():
    """Else what the program did before would count as work, and no advice would name an option."""
    batcher = gpuinfer.Batcher(IMAGES, example=torch.zeros(3, 8, 8), max_rows=8, strategy=gpuinfer.Dynamic("3ms"))
    before = time.process_time()
    with batcher:
        report = batcher.report()
    assert report["cores"]["busy_s"] <= time.process_time() - before
    assert report["settings"]["backends"]["inprocess"]["max_rows"] == 8
    assert report["settings"]["strategies"]["dynamic"]["max_wait"] == 0.003


@pytest.mark.parametrize(
    ("change", "written"),
    [
        (("-B", "max_rows", 192), "max_rows=192"),
        (("-S", "max_wait", 0), "strategy=gpuinfer.Dynamic(max_wait=0)"),
        (("--", "dtype", "bfloat16"), "dtype='bfloat16'"),
        (None, ""),
    ],
)
def test_a_verdict_names_the_change_as_python_writes_it(change, written):
    batcher = gpuinfer.Batcher(IMAGES)
    report = batcher.report()
    made = change and dict(zip(("flag", "name", "value"), change, strict=True))
    command = change and f"gpuinfer batcher {change[0]} {change[1]}={change[2]}"
    report["bottleneck"] |= {"advice": "Do so.", "change": made, "command": command}
    verdict = gpuinfer.SessionVerdict(report)
    assert (verdict.advice, verdict.change) == ("Do so.", written)
    assert written in str(verdict)
    assert written.replace("'", "&#x27;") in verdict._repr_html_()
    assert "gpuinfer batcher" not in str(verdict)
    assert repr(verdict) == str(verdict)


@pytest.mark.thorough
@pytest.mark.usefixtures("children_forked")
async def test_figures_of_another_process_come_while_it_is_open_too():
    async with gpuinfer.Batcher(
        "test_batcher:Convolutions", example=torch.zeros(3, 8, 8), backend="central"
    ) as batcher:
        await asyncio.gather(*(batcher(torch.zeros(3, 8, 8)) for _ in range(20)))
        until = time.monotonic() + PATIENCE_S
        while batcher.stats()["batches"]["rows_mean"] is None and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert batcher.stats()["batches"]["rows_mean"] >= 1
        assert batcher.stats()["progress"]["done"] == 20


@pytest.mark.thorough
@pytest.mark.usefixtures("children_forked")
async def test_with_the_roofline_a_verdict_knows_what_larger_batches_would_bring():
    def refused(model, row):
        with pytest.raises(UsageError, match=r"roofline=True measures.*[Ll]eave it out"):
            gpuinfer.Batcher(model, example=row, roofline=True).predict(row)

    await asyncio.to_thread(refused, lambda rows: rows, torch.zeros(3))
    await asyncio.to_thread(refused, IMAGES, (torch.zeros(3, 8, 8), torch.zeros(1)))
    async with gpuinfer.Batcher(IMAGES, example=torch.zeros(3, 8, 8), max_rows=2, roofline=True) as batcher:
        await batcher.batch(torch.zeros(2000, 3, 8, 8))
        report, verdict = batcher.report(), batcher.verdict()
    assert report["roofline"]["rows_per_s"] > 0
    assert report["roofline"]["at_rows"] >= 64
    assert verdict.change.startswith("max_rows=") or "ther programs" in verdict.why  # where these have the machine


SCRIPTS = {
    "one that is never closed": (
        "import gpuinfer, torch\nb = gpuinfer.Batcher(lambda rows: rows)\nprint(float(b.predict(torch.tensor(2.0))))",
        "2.0",
    ),
    "an exception in the block": (
        "import gpuinfer, torch\nwith gpuinfer.Batcher(lambda rows: rows) as b:\n"
        "    b.submit(torch.tensor(2.0)).result()\n    raise SystemExit('over')",
        "over",
    ),
    "no import of torch": (
        "import sys, time\nbegan = time.perf_counter()\nimport gpuinfer\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, 'Batcher' in dir(gpuinfer))",
        "False False True",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends(name, tmp_path):
    script, said = SCRIPTS[name]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_left_when_it_is_closed():
    before = threading.active_count(), len(multiprocessing.active_children())
    with gpuinfer.Batcher(IMAGES) as batcher:
        batcher.predict(torch.zeros(3, 8, 8))
    gc.collect()
    until = time.monotonic() + PATIENCE_S
    while threading.active_count() > before[0] and time.monotonic() < until:
        time.sleep(0.01)
    assert (threading.active_count(), len(multiprocessing.active_children())) <= before


# What a reviewer found


def test_a_request_that_is_refused_holds_no_room():
    with gpuinfer.Batcher(lambda rows: rows, max_queue_rows=1, queue="refuse") as batcher:
        for _ in range(3):
            with pytest.raises(RequestError, match="priority"):
                batcher.submit(torch.zeros(1), priority="urgent")
        for number in range(200):
            assert float(batcher.predict(torch.tensor([float(number)]))) == number


def test_a_callback_may_ask_again_and_ask_for_figures():
    found = []
    with gpuinfer.Batcher(lambda rows: rows + 1, max_queue_rows=1, example=torch.zeros(())) as batcher:
        done = threading.Event()

        def again(future):
            found.append((float(future.result()), batcher.stats()["batches"]["count"]))
            if len(found) < 5:
                batcher.submit(future.result()).add_done_callback(again)
            else:
                done.set()

        batcher.submit(torch.tensor(0.0)).add_done_callback(again)
        assert done.wait(PATIENCE_S)
    assert [value for value, _ in found] == [1.0, 2.0, 3.0, 4.0, 5.0]


async def test_leaving_the_block_answers_what_was_awaited():
    async with gpuinfer.Batcher(lambda rows: rows, max_rows=1, example=torch.zeros(())) as batcher:
        asked_for = [asyncio.ensure_future(batcher(torch.tensor(float(number)))) for number in range(20)]
        await asyncio.sleep(0)
    assert [float(await one) for one in asked_for] == list(map(float, range(20)))
    async with gpuinfer.Batcher(lambda rows: rows) as batcher:
        first = asyncio.ensure_future(batcher(torch.tensor(1.0)))
        await asyncio.sleep(0)  # it opens the model while the block is left
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], torch.Tensor | Closed)


async def test_another_loop_does_not_open_it():
    async with gpuinfer.Batcher(lambda rows: rows) as batcher:
        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(asked(batcher, torch.zeros(()))))
        assert float(await batcher(torch.tensor(1.0))) == 1.0


async def test_a_timeout_bounds_the_wait_for_room_too():
    model, row = Blocking(), torch.tensor(100.0)
    async with gpuinfer.Batcher(model, max_queue_rows=1, example=row) as batcher:
        held = asyncio.ensure_future(batcher(row))
        await asyncio.to_thread(model.started.wait, PATIENCE_S)
        with pytest.raises(Expired, match=r"no answer within 0\.05 s"):
            await batcher(row, timeout=0.05)
        model.go.set()
        assert float(await held) == 100.0


async def test_answers_are_given_while_rows_still_come():
    asked_for, answered = [], asyncio.Event()

    async def rows():
        for number in range(3):
            asked_for.append(number)
            yield torch.tensor(float(number))
            if number == 1:
                await asyncio.wait_for(answered.wait(), PATIENCE_S)  # it needs an answer to go on

    async with gpuinfer.Batcher(lambda rows: rows) as batcher:
        found = []
        async for answer in batcher.stream(rows()):
            found.append(float(answer))
            answered.set()
    assert found == [0.0, 1.0, 2.0]


def test_a_bad_row_is_raised_at_its_place():
    with gpuinfer.Batcher(lambda rows: rows) as batcher:
        answers = batcher.map([torch.zeros(2), torch.ones(2), torch.zeros(3), torch.ones(2)])
        assert [one.tolist() for one in (next(answers), next(answers))] == [[0.0, 0.0], [1.0, 1.0]]
        with pytest.raises(RequestError, match="Rows of several lengths"):
            next(answers)


class Uncopyable(Convolutions):
    """A module that holds a lock, so that it computes itself."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_copied_is_given_back_in_its_mode():
    model, row = Uncopyable(), torch.ones(3, 8, 8)
    with gpuinfer.Batcher(model, devices=["cpu", "cpu"]) as first:
        wanted = first.predict(row)
        with gpuinfer.Batcher(model) as second:
            assert like(second.predict(row), wanted)
        assert not model.training, "the first still computes with it"
        assert like(first.predict(row), wanted)
    assert all(one.training for one in model.modules())
    failing = gpuinfer.Batcher(model)
    with pytest.raises(UsageError):
        failing.predict(torch.ones(2))
    assert all(one.training for one in model.modules())


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows):
        self.calls += 1
        return rows


def test_buffers_that_a_forward_writes_to_are_its_own():
    model = Counting()
    with gpuinfer.Batcher(model) as batcher:
        batcher.predict(torch.ones(2))
    assert float(model.calls) == 0.0


@pytest.mark.parametrize("change", [lambda a: a[:, ::-1], lambda a: np.broadcast_to(a[:, :1], a.shape)])
def test_a_function_may_answer_with_any_array(change):
    with gpuinfer.Batcher(change) as batcher:
        assert batcher.predict(np.arange(3.0)).tolist() == change(np.arange(3.0)[None])[0].tolist()


@pytest.mark.parametrize(
    ("model", "cure"),
    [
        (Counting().forward, "it is an object that was made, a method"),
        (Blocking(), "it is an object that was made"),
        (nn.LazyLinear(3), "lazy layers"),
    ],
)
def test_what_cannot_go_to_another_process_is_refused_here(model, cure):
    with pytest.raises(UsageError, match=cure):
        gpuinfer.Batcher(model, backend="central") if "lazy" not in cure else opened(model)


def test_models_have_options_of_their_own():
    with gpuinfer.Models(a=torch.sin, b=torch.cos, options={"b": {"max_rows": 8}}) as models:
        for name in "ab":
            models[name].predict_batch(torch.zeros(40, 1))
        largest = {name: one["batches"]["rows_max"] for name, one in models.report().items()}
    assert largest == {"a": 40, "b": 8}


def test_other_programs_flags_are_left_as_they_are():
    from gpuinfer.library.choices import python_words

    assert python_words("git log --max-count=3, and --device cpu") == 'git log --max-count=3, and devices="cpu"'


class Sharing(nn.Module):
    """Answers with its own weights, whose memory rows would share."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 2))

    def forward(self, rows):
        return self.weight.expand(len(rows), 2)


def test_answers_share_no_memory_with_weights_rows_or_one_another():
    model, rows = Sharing(), np.ones((4, 3), np.float32)
    with gpuinfer.Batcher(model) as batcher:
        answer = batcher.predict_batch(torch.ones(3, 2))
        answer[0] += 5
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert answer[1].tolist() == [1.0, 1.0]
    with gpuinfer.Batcher(lambda rows: rows[:, 1:]) as batcher:
        answer = batcher.predict_batch(rows)
        rows[:] = 7
        assert answer.tolist() == [[1.0, 1.0]] * 4
    with gpuinfer.Batcher(nn.ReLU(inplace=True)) as batcher:
        given = torch.full((3, 2), -1.0)
        assert batcher.predict_batch(given).tolist() == [[0.0, 0.0]] * 3
        assert given.tolist() == [[-1.0, -1.0]] * 3


def test_an_answer_of_fewer_rows_than_were_given_is_refused_though_a_batch_is_padded():
    class Dropping(nn.Module):
        def forward(self, rows):
            return rows[rows[:, 0] >= 0]

    with gpuinfer.Batcher(Dropping(), example=torch.zeros(2)) as batcher:
        batch = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [3.0, 3.0]])
        for number in range(2):
            futures = [batcher.submit(row) for row in batch]
            found = [one.exception(PATIENCE_S) or one.result().tolist() for one in futures]
            assert all(isinstance(one, BackendError) or one == batch[at].tolist() for at, one in enumerate(found)), (
                number
            )


def test_a_deterministic_answer_has_the_same_bits_in_any_company():
    torch.manual_seed(0)
    net, rows = nn.Sequential(nn.Linear(301, 200), nn.ReLU(), nn.Linear(200, 7)), torch.randn(50, 301)
    with gpuinfer.Batcher(net, devices="cpu", deterministic=True, chunk_rows=32) as batcher:
        together = batcher.predict_batch(rows)
        assert all(torch.equal(batcher.predict(row), answer) for row, answer in zip(rows, together, strict=True))
        assert all(map(torch.equal, batcher.map(rows), together))


def test_an_option_of_compiling_compiles(monkeypatch):
    compiled = []

    def compile_eagerly(module, mode=None):
        class OptimizedModule(nn.Module):
            def forward(self, rows):
                compiled.append(len(rows))
                return module(rows)

        return OptimizedModule()

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    with gpuinfer.Batcher(nn.Linear(3, 2), devices="cpu", example=torch.zeros(3), compile=True) as batcher:
        for rows in (5, 20, 17):
            assert batcher.predict_batch(torch.zeros(rows, 3)).shape == (rows, 2)
    assert compiled == [16, 16, 16, 32, 32]  # after two that tried it
    monkeypatch.setattr(torch, "compile", lambda module, mode: nn.Flatten(9))
    with (
        pytest.raises(
            UsageError, match=r"cannot compile model 'Linear' here: IndexError: Dimension out of range .* Leave compile"
        ),
        gpuinfer.Batcher(nn.Linear(3, 2), devices="cpu", example=torch.zeros(3), compile=True),
    ):
        pass


def forward_threads():
    return [one.name for one in threading.enumerate() if one.name.startswith("gpuinfer-forward")]


@pytest.mark.parametrize("model", [nn.Identity(), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))])
def test_short_batches_of_torch_modules_need_no_thread(model, monkeypatch):
    monkeypatch.setattr("gpuinfer.backends.inprocess.SHORT_S", 60.0)  # whatever else this machine does
    monkeypatch.setattr("gpuinfer.backends.inprocess.LONG_S", 60.0)
    threads = torch.get_num_threads()
    with gpuinfer.Batcher(model, devices="cpu", example=torch.ones(3)) as batcher:
        before = set(forward_threads())
        rows = torch.randn(20, 3)
        assert torch.allclose(torch.stack(list(batcher.map(rows))), model(rows), atol=1e-6)
        assert set(forward_threads()) == before
    with gpuinfer.Batcher(Blocking(), devices="cpu", example=torch.ones(3)) as batcher:  # of somebody's own class
        batcher.predict(torch.ones(3))
        assert set(forward_threads()) > before
    assert torch.get_num_threads() == threads
