"""Fake CUDA tensors: they have a device, a shape, strides and a number format, and no values.

What would raise on a device for its strides or formats raises here too, and so does what reads a value back, which on
a device would wait for it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

GUARD = Path(__file__).with_name("guard.cpp")


class Event:
    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def load_guard(folder: Path) -> bool:
    """Compile a device guard for CUDA, which a CPU build of torch lacks, and load it. False without a C++ compiler."""
    if torch.version.cuda is not None:
        return True
    if (compiler := shutil.which("c++") or shutil.which("g++")) is None:
        return False
    place, built = Path(torch.__file__).parent, folder / "guard.so"
    options = ["-shared", "-fPIC", "-std=c++20", "-I", place / "include", GUARD, "-L", place / "lib", "-lc10"]
    subprocess.run([compiler, *options, "-o", built], check=True, timeout=120)
    ctypes.CDLL(str(built))
    return True


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Tensors on this device are fake within the block, and events are over at once."""
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),  # fake tensors have none
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield torch.device("cuda", 0)
