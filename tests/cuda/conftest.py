"""Fake CUDA tensors: they have a device, a shape, strides and a number format, and no values.

What would raise on a device for its strides or formats raises here too, and so does what reads a value back, which on
a device would wait for it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

GUARD = Path(__file__).with_name("guard.cpp")


class Event:
    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A device guard for CUDA in this process, which a CPU build of torch lacks."""
    if torch.version.cuda is not None:
        return
    if (compiler := shutil.which("c++") or shutil.which("g++")) is None:
        pytest.skip("there is no C++ compiler for the device guard that fake CUDA tensors need")
    place, built = Path(torch.__file__).parent, tmp_path_factory.mktemp("guard") / "guard.so"
    options = ["-shared", "-fPIC", "-std=c++20", "-I", place / "include", GUARD, "-L", place / "lib", "-lc10"]
    subprocess.run([compiler, *options, "-o", built], check=True, timeout=120)
    ctypes.CDLL(str(built))


@pytest.fixture
def fake_cuda(guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Tensors on this device are fake within the test, and events are over at once."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.device("cuda", 0)
