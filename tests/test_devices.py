"""Several devices in one process: a copy of the model on each, and one queue. Stand-ins on the CPU are devices here."""

from __future__ import annotations

import asyncio
import logging
import re

import failing_devices
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import Backend, Limits, ModelSpec, Setup, lane_device, retire_lane
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.lanes import FreeLanes, forward_lanes
from gpuinfer.errors import BackendDied, BackendError, DeviceLost, UsageError
from gpuinfer.host import machine
from gpuinfer.models import device as devices
from gpuinfer.models import model_options
from gpuinfer.models.device import device_labels, merged_readings, resolve_devices, setups_of
from gpuinfer.models.open_model import DataParallel, ModelCopy, Opened
from gpuinfer.models.out_of_memory import says_lost
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import run_virtual

FEATURES = 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def from_the_first():
    failing_devices.made = 0


def setup(model="well", names=("cpu", "cpu"), **changes):
    spec = ModelSpec(f"failing_devices:{model}", None, FEATURES)
    return Setup(spec, names, **changes)


def block(rows=2, value=1.0):
    return np.full((rows, FEATURES), value, np.float32)


async def asked(model, count=12, names=("cpu", "cpu"), value=lambda number: 1.0, rows=2, **options):
    """What comes of so many blocks, asked one after another, and the backend's words on its devices."""
    backend = InProcess(setup(model, names), **options)
    engine = Engine(backend, Dynamic())
    await engine.start()
    found = []
    try:
        for number in range(count):
            try:
                found.append(await engine.submit(block(rows, value(number)), rows=rows))
            except BackendError as error:
                found.append(error)
        return found, backend.device(), engine.snapshot()
    finally:
        await engine.close()


async def test_all_devices_answer_and_each_is_told_of():
    backend = InProcess(setup())
    engine = Engine(backend, Dynamic(), max_queue_rows=10_000)
    await engine.start()
    answers = await asyncio.gather(*(engine.submit(block(value=n), rows=2) for n in range(40)))
    told, lanes = backend.device(), engine.snapshot().lanes
    await engine.close()
    assert [float(answer[0, 0]) for answer in answers] == [4.0 * n for n in range(40)]
    assert backend.limits.in_flight == 2
    assert backend.limits.devices == ("cpu:0", "cpu:1")
    assert [lane["name"] for lane in lanes] == ["forward cpu:0 0", "forward cpu:1 0"]
    assert sum(one["rows"] for one in told["devices"].values()) == 80
    assert told["name"].startswith("2 x ")


async def test_a_device_that_fails_is_named_and_its_batches_go_to_the_others(caplog):
    with caplog.at_level(logging.ERROR):
        found, told, snapshot = await asked("second_fails")
    assert all(float(answer[0, 0]) == 4.0 for answer in found)
    assert told["devices"]["cpu:1"]["failed"] == failing_devices.LOST
    assert not told["devices"]["cpu:0"]["failed"]
    assert snapshot.errors["failed"] == 0
    assert [record.message for record in caplog.records if "cpu:1 failed" in record.message] != []
    assert len(caplog.records) == 1  # once


async def test_rows_that_take_their_device_along_are_not_tried_on_another():
    found, told, _ = await asked("asserts", 1)
    assert isinstance(found[0], DeviceLost)
    assert sum(bool(one["failed"]) for one in told["devices"].values()) == 1


async def test_a_bad_row_costs_no_device():
    found, told, _ = await asked("well", 6, value=lambda number: -9.0 if number == 2 else 1.0)
    assert [isinstance(one, BackendError) for one in found] == [False, False, True, False, False, False]
    assert not any(one["failed"] for one in told["devices"].values())


@pytest.mark.parametrize("deterministic", [True, False])
async def test_answers_are_those_of_one_device(deterministic):
    rows = np.random.default_rng(3).integers(0, 2, (64, 32), dtype=np.uint8)
    spec = ModelSpec("blobnet-small", None, 32, "uint8", {"actions": 9, "seats": 4})
    found = []
    for names in (("cpu",), ("cpu", "cpu"), ("cpu",) * 3):
        backend = InProcess(Setup(spec, names, deterministic=deterministic))
        engine = Engine(backend, Dynamic())
        await engine.start()
        parts = await asyncio.gather(*(engine.submit(rows[at : at + 8], rows=8) for at in range(0, 64, 8)))
        await engine.close()
        found.append([np.concatenate([part[output] for part in parts]) for output in (0, 1)])
    torch.set_num_threads(1)
    for other in found[1:]:
        for expected, answer in zip(found[0], other, strict=True):
            if deterministic:
                np.testing.assert_array_equal(expected, answer)
            else:
                np.testing.assert_allclose(expected, answer, atol=1e-5)


@given(
    good_for=st.lists(st.integers(0, 6) | st.just(1000), min_size=2, max_size=4),
    values=st.lists(st.integers(0, 8), min_size=1, max_size=30),
)
def test_whatever_fails_an_answer_is_right_or_says_that_devices_failed(good_for, values):
    blocks = [block(value=value) for value in values]
    copies = [
        ModelCopy(f"cpu:{number}", CPU, Opened(None, Limits(8), forward_of(steps), None, dict, None))
        for number, steps in enumerate(good_for)
    ]
    answer = DataParallel(copies)
    for one, value in zip(blocks, values, strict=True):
        working = sum(not copy.count.failed for copy in copies)
        try:
            assert answer([one])[0][0, 0] == FEATURES * value
        except BackendDied:
            assert all(copy.count.failed for copy in copies)
        except DeviceLost:
            assert working - sum(not copy.count.failed for copy in copies) == 2
    answered = sum(copy.count.batches for copy in copies)
    assert answered <= sum(good_for)
    assert sum(copy.count.running for copy in copies) == 0


def forward_of(steps):
    model = failing_devices.Sums(steps - 2, failing_devices.LOST)

    def forward(blocks):
        return [model(torch.from_numpy(one)).detach().numpy() for one in blocks]

    return forward


# Which device a batch goes to


class Paced(Backend):
    """Two devices, of which the second takes longer; keeps where batches went."""

    def __init__(self, setup=None, /, slow=4.0, lost_after=10**9, **options):
        super().__init__(setup, **options)
        self.limits = Limits(1, 2, devices=("a", "b"))
        self.slow, self.lost_after, self.went = slow, lost_after, []

    async def infer(self, batch):
        self.went.append(lane_device())
        if lane_device() == "b" and self.went.count("b") > self.lost_after:
            retire_lane()
        await asyncio.sleep(0.004 * (self.slow if self.went[-1] == "b" else 1.0))
        return [request.payload for request in batch]


def test_what_a_device_that_fails_should_have_written_another_one_writes():
    def writing(steps):
        forward = forward_of(steps)

        def write(blocks, targets):
            for (part,), answer in zip(targets, forward(blocks), strict=True):
                part[:] = answer
            return [True] * len(blocks)

        return write

    copies = [
        ModelCopy(f"cpu:{number}", CPU, Opened(None, Limits(8), None, None, dict, None, write=writing(steps)))
        for number, steps in enumerate((0, 1000))
    ]
    place = np.zeros((2, 1), np.float32)
    assert DataParallel(copies).write([block(value=3)], [[place]]) == [True]
    assert place.tolist() == [[FEATURES * 3]] * 2
    assert [bool(copy.count.failed) for copy in copies] == [True, False]


def test_a_lane_that_is_retired_gets_no_further_batch():
    backend = Paced(slow=1.0, lost_after=2)

    async def asked_at_once():
        engine = Engine(backend, Dynamic(), clock=asyncio.get_running_loop().time)
        await engine.start()
        await asyncio.gather(*(engine.submit(1) for _ in range(30)))
        await engine.close()

    run_virtual(asked_at_once())
    assert backend.went.count("b") == 3
    assert len(backend.went) == 30


def test_a_second_batch_goes_to_an_idle_device_of_the_same_speed():
    free = FreeLanes(forward_lanes(Limits(8, 4, devices=("a", "b", "a", "b")), lambda: 0.0))
    for lane in [free.take(4), free.take(4)]:
        free.took(lane, 4, 0.02)
        free.put(lane)
    assert {free.take(4).device, free.take(4).device} == {"a", "b"}


def test_a_device_that_was_slow_once_is_tried_again():
    free = FreeLanes(forward_lanes(Limits(8, 2, devices=("a", "b")), lambda: 0.0))
    went = []
    for number in range(300):
        lane = free.take(4)
        went.append(lane.device)
        free.took(lane, 4, 0.1 if number == 0 else 0.03 if lane.device == "b" else 0.01)
        free.put(lane)
    assert went[0] == "a"  # whose first batch is slow
    assert went[1:50] == ["b"] * 49
    assert went[200:].count("a") >= 90


# Names


def test_stand_ins_on_the_cpu_share_its_cores():
    found = resolve_devices(("cpu", "cpu"))
    assert device_labels(found) == ["cpu:0", "cpu:1"]
    assert [one.processes for one in setups_of(Setup(processes=3), found)] == [6, 6]


@pytest.fixture
def three_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Card {number}")


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("cuda",), ["cuda:0", "cuda:1", "cuda:2"]),
        (("all",), ["cuda:0", "cuda:1", "cuda:2"]),
        (("auto",), ["cuda:0"]),
        (("cuda:2", "cuda:0"), ["cuda:2", "cuda:0"]),
    ],
)
def test_cuda_and_all_are_every_device(three_cards, names, labels):
    assert device_labels(resolve_devices(names)) == labels


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("cuda:0", "cuda:7"),
            "no device 'cuda:7': this machine has cuda:0 (Card 0), cuda:1 (Card 1), cuda:2 (Card 2).",
        ),
        (("cuda:1", "cuda:1"), "names cuda:1 twice"),
        (("cuda:1", "cuda"), "names cuda:1 twice"),
        (("cpu", "cuda:0"), "mixes the CPU with CUDA devices"),
    ],
)
def test_devices_that_cannot_be_had_together(three_cards, names, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        resolve_devices(names)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        pytest.param(("cuda:1", "cuda:0", "cuda:1"), "names cuda:1 twice", id="twice"),
        pytest.param(("cpu", "cuda:0"), "mixes the CPU with CUDA devices", id="two kinds"),
        pytest.param(("cpu", "gpu"), "no device named 'gpu'", id="no such name"),
        pytest.param(("cpu", "cpu"), None, id="stand-ins"),
        pytest.param(("auto",), None, id="whatever there is"),
        pytest.param(("cuda", "cuda:1"), None, id="every one of them, and one: torch has to say"),
    ],
)
@pytest.mark.parametrize("kind", [InProcess, Central])
async def test_names_that_say_it_themselves_are_refused_without_torch(kind, names, said, monkeypatch):
    monkeypatch.setattr(devices, "resolve_devices", lambda names: [])
    backend = kind(Setup(model=ModelSpec("blobnet-small"), devices=names))
    if said is None:
        await backend.check()
    else:
        with pytest.raises(UsageError, match=said):
            await backend.check()


@pytest.mark.parametrize(
    ("names", "there", "asked"),
    [
        pytest.param(("cuda:1",), 2, False, id="the second of two"),
        pytest.param(("cuda:2",), 2, True, id="the third of two"),
        pytest.param(("cuda",), 0, True, id="there is no driver"),
        pytest.param(("auto", "cpu", "all"), 0, False, id="none is named"),
    ],
)
def test_torch_is_asked_for_a_device_that_seems_not_to_be_there(names, there, asked, monkeypatch):
    monkeypatch.setattr(machine, "has_cuda", lambda: there > 0)
    monkeypatch.setattr(machine, "cuda_devices", lambda: max(1, there))
    assert model_options.may_be_missing(names) is asked


async def test_a_device_that_is_not_there_is_refused_before_the_start():
    with pytest.raises(UsageError, match=r"no device 'cuda:99'"):
        await InProcess(Setup(model=ModelSpec("blobnet-small"), devices=("cuda:99",))).check()


def test_a_backend_of_one_device_refuses_several():
    for names in (("cpu", "cpu"), ("all",)):
        with pytest.raises(UsageError, match="only one can be served"):
            _ = Setup(devices=names).device


def test_several_readings_are_one():
    readings = [
        {"name": "A", "reserved_mb": 3.0, "utilisation": 0.5},
        {"name": "A", "reserved_mb": 4.0, "utilisation": 1},
    ]
    assert merged_readings(readings) == {"name": "2 x A", "reserved_mb": 7.0, "utilisation": 0.75}
    assert devices.merged_readings([{"name": "A"}, {"name": "B"}]) == {"name": "A, B"}


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: out of memory", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_which_words_mean_that_a_device_is_gone(words, lost):
    assert says_lost(RuntimeError(words)) is lost


# Text


async def test_text_on_two_devices_is_that_on_one():
    from text.tiny import tiny_checkpoint

    from gpuinfer.generation import Prompt, Sampling

    spec = ModelSpec(str(tiny_checkpoint("llama")), kind="text")
    prompts = [
        Prompt(text=f"row {n}", key=str(n), samples=1 + n % 2, sampling=Sampling(max_tokens=6, ignore_eos=True))
        for n in range(10)
    ]
    found = []
    for names in (("cpu",), ("cpu", "cpu")):
        backend = InProcess(Setup(spec, names, deterministic=True), slots=4, context=64)
        engine = Engine(backend, Dynamic())
        await engine.start()
        answers = await asyncio.gather(*(engine.submit(one, rows=one.samples) for one in prompts))
        found.append([[done.tokens for done in answer.completions] for answer in answers])
        told, slots = backend.device(), engine.limits.slots
        await engine.close()
    assert found[0] == found[1]
    assert slots == told["model"]["slots"] == 8
    assert told["in_force"]["slots"] == 4
    assert all(one["rows"] for one in told["devices"].values())
