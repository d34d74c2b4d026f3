"""Fixtures of a CUDA device that is not there: see `fake_device.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fake_device import fake_device, load_guard
from host_waits import Device
from recording import Cuda, missing
from replaced import KERNELS, Inline, at_once


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A device guard for CUDA in this process, which a CPU build of torch lacks."""
    if not load_guard(tmp_path_factory.mktemp("guard")):
        pytest.skip("there is no C++ compiler for the device guard that fake CUDA tensors need")


@pytest.fixture
def fake_cuda(guard: None) -> Iterator[torch.device]:
    """Tensors on this device are fake within the test, and events are over at once."""
    with fake_device() as device:
        yield device


@pytest.fixture
def cuda(guard: None) -> Iterator[Device]:
    """The one CUDA device, of fake tensors, beside real memory of the host: see `host_waits.py`."""
    with Device() as device:
        yield device


@pytest.fixture
def recorded(guard: None) -> Iterator[Cuda]:
    """`torch.cuda` as recorded within the test, whose tensors have values: see `recording.py`."""
    if why := missing():
        pytest.skip(why)
    torch.set_num_threads(1)
    with Cuda().recording() as one:
        yield one


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of text have two layers, and none of our own kernels, which have tests of their own; attention has a CUDA
    kernel's strides.
    """
    from gpuinfer.text.checkpoint import built_in
    from gpuinfer.text.decoder import torch_decoder, triton_layers
    from gpuinfer.text.sampling import triton_draws

    shape = replace(built_in.tiny_shape(), layers=2)
    monkeypatch.setitem(built_in.BUILT_IN, "tiny", lambda: shape)
    monkeypatch.setattr(triton_layers, "has_triton", lambda: False)
    monkeypatch.setattr(triton_draws, "has_triton", lambda: False)
    monkeypatch.setattr(torch_decoder, "scaled_dot_product_attention", KERNELS["memory-efficient"])


@pytest.fixture
def stages_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages compute in the thread of the test, and their layers are timed there, twice each."""
    from gpuinfer.models.pipeline import open_pipeline, stage_plan
    from gpuinfer.text.stages import open_staged_decoder as open_staged_text
    from gpuinfer.text.stages import open_staged_decoder as timing_of_text

    for opening, times in ((open_pipeline, stage_plan), (open_staged_text, timing_of_text)):
        monkeypatch.setattr(opening, "Pipeline", Inline)
        monkeypatch.setattr(times, "in_thread", at_once)
    monkeypatch.setattr(stage_plan, "MOST", 1)
    monkeypatch.setattr(timing_of_text, "PASSES", 1)
