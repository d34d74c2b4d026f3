"""What CUDA is asked for, as far as a machine without it can tell: a `torch.cuda` that writes down what is done.

What must not wait, and what breaks a capture, is tested on the recorded device of `tests/cuda`.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpuinfer
from gpuinfer.host import machine
from gpuinfer.models.cuda_graphs import captured, new_stream
from gpuinfer.text.decoder import torch_static
from gpuinfer.text.decoder.torch_static import Replays

SOURCES = Path(gpuinfer.__file__).parent
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    __slots__ = ("__dict__", "cuda_stream")

    def __init__(self, device, handle=None):
        self.device, self.cuda_stream = device, handle or id(self)


class Cuda:
    """Current streams, the captures that there were, and what was launched."""

    def __init__(self, monkeypatch):
        self.at_once = 0
        self.current = {FIRST: "default 0", SECOND: "default 1"}
        self.captures, self.events = [], []
        self.end_fails = False
        for name in ("stream", "graph", "set_stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        graph = SimpleNamespace(replay=lambda: self.events.append("launched"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))

    def current_stream(self, device):
        return self.current[device]

    def set_stream(self, stream):
        place = SECOND if stream == "default 1" else getattr(stream, "device", FIRST)
        self.current[place] = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current[stream.device] = self.current[stream.device], stream
        yield
        self.current[stream.device] = before

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        """As torch's: where the capture fails, its stream stays the current one."""
        self.at_once += 1
        self.current[stream.device] = stream
        self.captures.append((stream.device, capture_error_mode))
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            self.at_once -= 1
        if self.end_fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.current[stream.device] = "default 1"


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def test_the_graphs_of_a_device_are_captured_on_that_device(cuda):
    """torch's own stream for captures is of whatever device was the first to capture."""
    for place in (FIRST, SECOND):
        replays = Replays(place, True)
        for _ in range(3):
            replays(lambda form: None, 8)
    assert cuda.captures == [(FIRST, "thread_local"), (SECOND, "thread_local")]
    assert cuda.events == ["launched", "launched"]


def test_nothing_but_capturing_waits_for_a_whole_device():
    texts = {path.name: path.read_text() for path in SOURCES.rglob("*.py")}
    assert [name for name, text in texts.items() if "torch.cuda.synchronize(" in text] == ["cuda_graphs.py"]


def test_after_a_capture_that_fails_the_stream_is_the_one_before_and_the_error_its_own(cuda):
    with pytest.raises(torch.OutOfMemoryError), captured(SimpleNamespace(device=SECOND), None):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert cuda.current[SECOND] == "default 1"
    cuda.end_fails = True
    with pytest.raises(RuntimeError, match="not permitted"), captured(SimpleNamespace(device=SECOND), None):
        pass
    assert cuda.current[SECOND] == "default 1"


def test_a_graph_that_there_was_no_memory_for_is_tried_again_later(cuda, monkeypatch, caplog):
    monkeypatch.setattr(torch_static, "FIRST_PAUSE", 4)
    full = [True]

    def work(form):
        if cuda.at_once and full:
            full.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    replays = Replays(FIRST, True)
    for steps, captures, launches in ((6, 1, []), (2, 2, ["launched"])):
        for _ in range(steps):
            replays(work, 8)
        assert (len(cuda.captures), cuda.events) == (captures, launches)
    assert [record.getMessage()[:40] for record in caplog.records] == ["there is no memory for a further CUDA gr"]


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("2,3", 2), ("GPU-1-2-3", 1), ("", 1), ("0,1,2,3,4,5", 4)], ids=str
)
def test_devices_are_those_that_the_process_may_see(visible, count, monkeypatch, tmp_path):
    """Without any there is a lane in any case."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.cuda_devices() == count


def test_a_stream_is_nobody_elses_until_it_ends_and_there_are_no_weak_references_to_it(monkeypatch):
    """torch hands out a few of a device in turn; one that has had a weak reference crashes torch 2.11."""
    handles = itertools.cycle((11, 12, 13))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device, next(handles)))
    first, second = new_stream(FIRST), new_stream(FIRST)
    with pytest.raises(TypeError, match="weak reference"):
        weakref.ref(first)
    for _ in range(4):
        assert new_stream(FIRST).cuda_stream == 13  # which nobody holds on to
    third = new_stream(FIRST)
    assert {one.cuda_stream for one in (first, second, third)} == {11, 12, 13}
    del second
    fourth = new_stream(FIRST)
    assert new_stream(FIRST).cuda_stream in {11, 12, 13}
    assert fourth.cuda_stream == 12
