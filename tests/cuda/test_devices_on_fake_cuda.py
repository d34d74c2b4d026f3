"""What CUDA devices are asked beside computing: which there are, what they hold, if they answer, how fast they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.models.device import Gauge, device_name
from gpuinfer.models.out_of_memory import answers, is_lost
from gpuinfer.text import text_roofline
from gpuinfer.text.generator import Tuning, open_generator
from gpuinfer.text.generator.fault_isolation import FaultIsolation


def test_a_gauge_tells_what_tensors_and_allocator_hold(cuda):
    cuda.allocated = 3 << 20
    read = Gauge(cuda.device).read()
    assert (read["name"], read["allocated_mb"], read["reserved_mb"]) == (device_name(cuda.device), 3.0, 3.0)


def test_a_device_that_still_answers_is_not_lost(cuda):
    with cuda.waiting_only_in("models/out_of_memory.py answers"):
        assert answers(cuda.device)
        assert not is_lost(RuntimeError("CUDA error: invalid configuration argument"), cuda.device)


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
