"""Fixtures of a CUDA device that is not there: see `fake_device.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_device import fake_device, load_guard
from host_waits import Device


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
