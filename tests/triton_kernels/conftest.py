"""Kernels in Triton without a GPU. Triton comes with vLLM, and runs them in an interpreter where TRITON_INTERPRET
was set before it was imported, as `make vllm` does.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / part) for part in ("text", "adapters")]


@pytest.fixture(scope="session")
def interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("set TRITON_INTERPRET=1, as `make vllm` does")
    pytest.importorskip("triton")


@pytest.fixture
def made_current(monkeypatch):
    """The tensors whose device is made the current one, which Triton launches on, at the moment."""
    tensors = []

    @contextmanager
    def device_of(tensor):
        tensors.append(tensor)
        yield
        tensors.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return tensors
