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
from text.tiny import tiny_checkpoint

from gpuinfer.api import Backend, Limits, ModelSpec, Setup, lane_device, retire_lane
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.lanes import FreeLanes, forward_lanes
from gpuinfer.errors import BackendDied, BackendError, DeviceLost, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models import device as devices
from gpuinfer.models.device import device_labels, merged_readings, resolve_devices, setups_of
from gpuinfer.models.open_model import DataParallel, ModelCopy, Opened
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import run_virtual

FEATURES = 4
TWO = ("cpu", "cpu")


@pytest.fixture(autouse=True)
def from_the_first():
    failing_devices.made = 0
    yield
    torch.set_num_threads(1)


def block(rows=2, value=1.0):
    return np.full((rows, FEATURES), value, np.float32)


async def asked(
    requests, model="well", names=TWO, spec=None, rows=lambda request: len(request), at_once=True, **options
):
    """The answers, or errors, to these requests; the backend's words on its devices; a snapshot."""
    deterministic = options.pop("deterministic", False)
    spec = spec or ModelSpec(f"failing_devices:{model}", None, FEATURES)
    backend = InProcess(Setup(spec, names, deterministic=deterministic), **options)
    engine = Engine(backend, Dynamic(), max_queue_rows=10_000)
    await engine.start()
    try:
        asking = [engine.submit(one, rows=rows(one)) for one in requests]
        if at_once:
            found = await asyncio.gather(*asking, return_exceptions=True)
        else:
            found = [(await asyncio.gather(one, return_exceptions=True))[0] for one in asking]
        return found, backend.device(), engine.snapshot(), backend.limits
    finally:
        await engine.close()


async def test_all_devices_answer_and_each_is_told_of():
    found, told, snapshot, limits = await asked([block(value=n) for n in range(40)])
    assert [float(answer[0, 0]) for answer in found] == [4.0 * n for n in range(40)]
    assert (limits.in_flight, limits.devices) == (2, ("cpu:0", "cpu:1"))
    assert [lane["name"] for lane in snapshot.lanes] == ["forward cpu:0 0", "forward cpu:1 0"]
    assert sum(one["rows"] for one in told["devices"].values()) == 80
    assert told["name"].startswith("2 x ")


async def test_a_device_that_fails_is_named_once_and_its_batches_go_to_the_others(caplog):
    with caplog.at_level(logging.ERROR):
        found, told, snapshot, _ = await asked([block()] * 12, "second_fails", at_once=False)
    assert all(float(answer[0, 0]) == 4.0 for answer in found)
    assert [told["devices"][name]["failed"] for name in ("cpu:0", "cpu:1")] == ["", failing_devices.LOST]
    assert snapshot.errors["failed"] == 0
    (said,) = caplog.messages
    assert "cpu:1 failed" in said


async def test_rows_that_take_their_device_along_are_not_tried_on_another_and_a_bad_row_costs_none():
    (found,), told, *_ = await asked([block()], "asserts")
    assert isinstance(found, DeviceLost)
    assert sum(bool(one["failed"]) for one in told["devices"].values()) == 1
    found, told, *_ = await asked([block(value=-9.0 if number == 2 else 1.0) for number in range(6)], at_once=False)
    assert [isinstance(one, BackendError) for one in found] == [False, False, True, False, False, False]
    assert not any(one["failed"] for one in told["devices"].values())


@pytest.mark.parametrize("deterministic", [True, False])
async def test_answers_are_those_of_one_device(deterministic):
    rows = np.random.default_rng(3).integers(0, 2, (64, 32), dtype=np.uint8)
    spec, found = ModelSpec("blobnet-small", None, 32, "uint8", {"actions": 9, "seats": 4}), []
    for names in (("cpu",), TWO, ("cpu",) * 3):
        parts, *_ = await asked(np.split(rows, 8), spec=spec, names=names, deterministic=deterministic)
        found.append([np.concatenate([part[output] for part in parts]) for output in (0, 1)])
    for other in found[1:]:
        for expected, answer in zip(found[0], other, strict=True):
            np.testing.assert_allclose(expected, answer, atol=0 if deterministic else 1e-5, rtol=0)


async def test_text_on_two_devices_is_that_on_one():
    spec, sampling = ModelSpec(str(tiny_checkpoint("llama")), kind="text"), Sampling(max_tokens=6, ignore_eos=True)
    prompts = [Prompt(text=f"row {n}", key=str(n), samples=1 + n % 2, sampling=sampling) for n in range(10)]
    told = {"spec": spec, "rows": lambda prompt: prompt.samples, "deterministic": True, "slots": 4, "context": 64}
    (one, *_), (two, words, _, limits) = [await asked(prompts, names=names, **told) for names in (("cpu",), TWO)]
    one, two = ([[done.tokens for done in answer.completions] for answer in answers] for answers in (one, two))
    assert one == two
    assert (limits.slots, words["model"]["slots"], words["in_force"]["slots"]) == (8, 8, 4)
    assert all(device["rows"] for device in words["devices"].values())


def copies_of(*steps, writing=False):
    """A copy of the model for each number of steps that its device is good for."""

    def opened(model):
        def forward(blocks):
            return [model(torch.from_numpy(one)).detach().numpy() for one in blocks]

        def write(blocks, targets):
            for (part,), answer in zip(targets, forward(blocks), strict=True):
                part[:] = answer
            return [True] * len(blocks)

        return Opened(None, Limits(8), forward, None, dict, None, write=write if writing else None)

    models = [failing_devices.Sums(good_for - 2, failing_devices.LOST) for good_for in steps]
    return [ModelCopy(f"cpu:{n}", torch.device("cpu"), opened(model)) for n, model in enumerate(models)]


@given(
    st.lists(st.integers(0, 6) | st.just(1000), min_size=2, max_size=4),
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
)
def test_whatever_fails_an_answer_is_right_or_says_that_devices_failed(good_for, values):
    copies = copies_of(*good_for)
    answer = DataParallel(copies)
    for value in values:
        working = sum(not copy.count.failed for copy in copies)
        try:
            assert answer([block(value=value)])[0][0, 0] == FEATURES * value
        except BackendDied:
            assert all(copy.count.failed for copy in copies)
        except DeviceLost:
            assert working - sum(not copy.count.failed for copy in copies) == 2
    assert sum(copy.count.batches for copy in copies) <= sum(good_for)
    assert sum(copy.count.running for copy in copies) == 0


def test_what_a_device_that_fails_should_have_written_another_one_writes():
    copies, place = copies_of(0, 1000, writing=True), np.zeros((2, 1), np.float32)
    assert DataParallel(copies).write([block(value=3)], [[place]]) == [True]
    assert place.tolist() == [[FEATURES * 3]] * 2
    assert [bool(copy.count.failed) for copy in copies] == [True, False]


# Which device a batch goes to


def test_a_lane_that_is_retired_gets_no_further_batch():
    went = []

    class Losing(Backend):
        limits = Limits(1, 2, devices=("a", "b"))

        async def infer(self, batch):
            went.append(lane_device())
            if lane_device() == "b" and went.count("b") > 2:
                retire_lane()
            await asyncio.sleep(0.004)
            return [request.payload for request in batch]

    async def asked_at_once():
        engine = Engine(Losing(), Dynamic(), clock=asyncio.get_running_loop().time)
        await engine.start()
        await asyncio.gather(*(engine.submit(1) for _ in range(30)))
        await engine.close()

    run_virtual(asked_at_once())
    assert (went.count("b"), len(went)) == (3, 30)


def test_a_batch_goes_to_an_idle_device_of_the_same_speed_and_one_that_was_slow_once_is_tried_again():
    free = FreeLanes(forward_lanes(Limits(8, 4, devices=("a", "b", "a", "b")), lambda: 0.0))
    for lane in [free.take(4), free.take(4)]:
        free.took(lane, 4, 0.02)
        free.put(lane)
    assert {free.take(4).device, free.take(4).device} == {"a", "b"}

    free, went = FreeLanes(forward_lanes(Limits(8, 2, devices=("a", "b")), lambda: 0.0)), []
    for number in range(300):
        lane = free.take(4)
        went.append(lane.device)
        free.took(lane, 4, 0.1 if number == 0 else 0.03 if lane.device == "b" else 0.01)
        free.put(lane)
    assert went[:50] == ["a"] + ["b"] * 49  # whose first batch is slow
    assert went[200:].count("a") >= 90


# Names


def test_stand_ins_on_the_cpu_share_its_cores_and_their_readings_are_one():
    found = resolve_devices(TWO)
    assert device_labels(found) == ["cpu:0", "cpu:1"]
    assert [one.processes for one in setups_of(Setup(processes=3), found)] == [6, 6]
    readings = [{"name": "A", "reserved_mb": mb, "utilisation": share} for mb, share in ((3.0, 0.5), (4.0, 1))]
    assert merged_readings(readings) == {"name": "2 x A", "reserved_mb": 7.0, "utilisation": 0.75}
    assert merged_readings([{"name": "A"}, {"name": "B"}]) == {"name": "A, B"}


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("cuda",), ["cuda:0", "cuda:1", "cuda:2"]),
        (("all",), ["cuda:0", "cuda:1", "cuda:2"]),
        (("auto",), ["cuda:0"]),
        (("cuda:2", "cuda:0"), ["cuda:2", "cuda:0"]),
        (
            ("cuda:0", "cuda:7"),
            "no device 'cuda:7': this machine has cuda:0 (Card 0), cuda:1 (Card 1)",
        ),
        (("cuda:1", "cuda:1"), "names cuda:1 twice"),
        (("cuda:1", "cuda"), "names cuda:1 twice"),
        (("cpu", "cuda:0"), "mixes the CPU with CUDA devices"),
    ],
)
def test_names_mean_these_devices_or_cannot_be_had_together(names, labels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Card {number}")
    if isinstance(labels, list):
        assert device_labels(resolve_devices(names)) == labels
    else:
        with pytest.raises(UsageError, match=re.escape(labels)):
            resolve_devices(names)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("cuda:1", "cuda:0", "cuda:1"), "names cuda:1 twice"),
        (("cpu", "cuda:0"), "mixes the CPU with CUDA devices"),
        (("cpu", "gpu"), "no device named 'gpu'"),
        (TWO, None),
        (("auto",), None),
        (("cuda", "cuda:1"), None),  # torch has to say
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


async def test_a_device_that_is_not_there_and_several_where_one_can_be_served_are_refused():
    with pytest.raises(UsageError, match=r"no device 'cuda:99'"):
        await InProcess(Setup(model=ModelSpec("blobnet-small"), devices=("cuda:99",))).check()
    for names in (TWO, ("all",)):
        with pytest.raises(UsageError, match="only one can be served"):
            _ = Setup(devices=names).device
