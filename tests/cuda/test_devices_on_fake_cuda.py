"""What CUDA devices are asked beside computing: which there are, what they hold, if they answer, how fast they are."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.models.cuda_graphs import new_stream
from gpuinfer.models.device import Gauge, device_labels, device_name, resolve_device, resolve_devices, setups_of
from gpuinfer.models.out_of_memory import answers, is_lost
from gpuinfer.models.pipeline.stage_plan import count_for
from gpuinfer.text import text_roofline
from gpuinfer.text.checkpoint.built_in import tiny_shape
from gpuinfer.text.generator import Tuning, open_generator
from gpuinfer.text.generator.fault_isolation import FaultIsolation
from gpuinfer.text.generator.setup import CUDA_CANVAS_TOKENS, CUDA_STEP_TOKENS, usual_step_tokens
from gpuinfer.text.precision import computes_in
from gpuinfer.text.transformer import Masking


def test_devices_are_found_by_name(cuda):
    cuda.devices = 2
    found = resolve_devices(("cuda:0", "cuda:1"))
    assert (
        found == resolve_devices(("cuda",)) == resolve_devices(("all",)) == [torch.device(f"cuda:{n}") for n in (0, 1)]
    )
    assert (resolve_device("auto"), device_labels(found)) == (cuda.device, ["cuda:0", "cuda:1"])
    setup = Setup(devices=("cuda",))
    assert [own.devices for own in setups_of(setup, found)] == [("cuda:0",), ("cuda:1",)]
    with pytest.raises(UsageError, match="no device 'cuda:2'"):
        resolve_device("cuda:2")
    with pytest.raises(UsageError, match="Name several"):
        count_for(SimpleNamespace(parallel="pipeline", stages="auto", split_points=None), found[:1], 4, "blobnet")


def test_a_gauge_tells_what_tensors_and_allocator_hold(cuda):
    cuda.allocated = 3 << 20
    read = Gauge(cuda.device).read()
    assert (read["name"], read["allocated_mb"], read["reserved_mb"]) == (device_name(cuda.device), 3.0, 3.0)


def test_a_device_that_still_answers_is_not_lost(cuda):
    with cuda.waiting_only_in("models/out_of_memory.py answers"):
        assert answers(cuda.device)
        assert not is_lost(RuntimeError("CUDA error: invalid configuration argument"), cuda.device)


def test_steps_are_larger_on_a_device_and_weights_meet_rows_of_their_own_format(cuda):
    shape = tiny_shape()
    assert usual_step_tokens(shape, cuda.device) == CUDA_STEP_TOKENS
    assert usual_step_tokens(replace(shape, masking=Masking(1)), cuda.device) == CUDA_CANVAS_TOKENS
    assert computes_in(torch.bfloat16, cuda.device, deterministic=True) == "bfloat16"


@pytest.mark.usefixtures("text")
def test_the_roofline_of_text_waits_for_the_device_after_each_pass(cuda, monkeypatch):
    generator = open_generator(
        ModelSpec("tiny", kind="text"), Setup(devices=("cuda:0",)), Tuning(slots=2, context=32, step_tokens=16)
    )
    monkeypatch.setattr(text_roofline, "LOOK_S", 0.0)
    threads = torch.get_num_threads()
    generator.decoder.use(threads + 1)
    assert torch.get_num_threads() == threads  # which are the processor's
    with cuda.waiting_only_in("text/text_roofline.py _look", "text/decoder/torch_batch.py Uploads.room"):
        found = text_roofline.measure_roofline(generator.decoder, rows=2, step_tokens=16, seconds=0.0)
    assert found.at_rows == 2


def test_memory_that_ran_out_is_given_back_before_a_smaller_step(cuda):
    troubles = FaultIsolation(SimpleNamespace(rows=[]))
    assert troubles.failed(["a", "b"], 8, torch.OutOfMemoryError("CUDA out of memory.")) is None
    assert cuda.log == ["the cache is emptied"]


def test_a_stream_is_nobody_elses_until_it_ends_and_there_are_no_weak_references_to_it(monkeypatch):
    """A stream that has had one crashes torch 2.11 when the next with its number is taken."""
    numbers = itertools.cycle(range(70, 73))

    class Stream:
        __slots__ = ("__dict__", "cuda_stream")

        def __init__(self, device):
            self.cuda_stream = next(numbers)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    held = [new_stream() for _ in range(3)]
    assert [one.cuda_stream for one in held] == [70, 71, 72]
    with pytest.raises(TypeError, match="weak reference"):
        weakref.ref(held[0])
    del held[1]
    assert [new_stream().cuda_stream for _ in range(2)] == [71, 71]  # each given back at once
