"""What CUDA is asked for, as far as a machine without it can tell: a `torch.cuda` that writes down what is done."""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpuinfer
from gpuinfer.host import machine
from gpuinfer.models.cuda_graphs import captured, new_stream, wait_for_device
from gpuinfer.models.pipeline.stage import LaunchedValues
from gpuinfer.text.decoder import torch_static
from gpuinfer.text.decoder.torch_static import Replays

SOURCES = Path(gpuinfer.__file__).parent
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    def __init__(self, device, handle=None):
        self.device, self.cuda_stream = device, handle or id(self)


class Cuda:
    """Current device and streams of one thread; the streams that were captured on, and how many at once."""

    def __init__(self, monkeypatch):
        self.at_once = self.most = 0
        self.current = {FIRST: "default 0", SECOND: "default 1"}
        self.captures, self.events = [], []
        self.end_fails = False
        for name in ("device", "stream", "graph", "set_stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(
            torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.events.append("launched"))
        )
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))

    device = staticmethod(contextlib.nullcontext)

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
        self.most = max(self.most, self.at_once)
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


def test_one_graph_is_captured_at_a_time(cuda):
    inside, go_on = threading.Event(), threading.Event()
    stream = SimpleNamespace(device=SECOND)

    def slowly():
        with captured(stream, None):
            inside.set()
            go_on.wait(60.0)

    def other():
        with captured(stream, None):
            pass

    threads = [threading.Thread(target=slowly), threading.Thread(target=other)]
    threads[0].start()
    assert inside.wait(60.0)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(60.0)
    assert (cuda.most, len(cuda.captures)) == (1, 2)


def test_who_waits_for_the_whole_device_waits_for_a_capture_in_another_thread(cuda, monkeypatch):
    """Waiting for a device breaks a capture, whichever thread waits."""
    inside, go_on, said = threading.Event(), threading.Event(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("waited"))

    def slowly():
        with captured(SimpleNamespace(device=SECOND), None):
            inside.set()
            go_on.wait(60.0)
            said.append("captured")

    threads = [threading.Thread(target=slowly), threading.Thread(target=wait_for_device, args=(FIRST,))]
    threads[0].start()
    assert inside.wait(60.0)
    threads[1].start()
    threads[1].join(0.05)
    go_on.set()
    for thread in threads:
        thread.join(60.0)
    assert said == ["captured", "waited"]


def test_nothing_but_capturing_waits_for_a_whole_device():
    places = [
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if "torch.cuda.synchronize(" in path.read_text() and path.name != "cuda_graphs.py"
    ]
    assert places == []


def test_after_a_capture_that_fails_the_stream_is_the_one_before(cuda):
    cuda.end_fails = True
    with pytest.raises(RuntimeError, match="not permitted"), captured(SimpleNamespace(device=SECOND), None):
        pass
    assert cuda.current[SECOND] == "default 1"


def test_a_capture_without_memory_says_so_and_not_how_it_ended(cuda):
    with pytest.raises(torch.OutOfMemoryError), captured(SimpleNamespace(device=SECOND), None):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert cuda.current[SECOND] == "default 1"


def test_a_graph_that_there_was_no_memory_for_is_tried_again_later(cuda, monkeypatch, caplog):
    monkeypatch.setattr(torch_static, "FIRST_PAUSE", 4)
    full = [True]

    def work(form):
        if cuda.at_once and full:
            full.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    replays = Replays(FIRST, True)
    for _ in range(6):
        replays(work, 8)
    assert (len(cuda.captures), cuda.events) == (1, [])
    for _ in range(2):
        replays(work, 8)
    assert (len(cuda.captures), cuda.events) == (2, ["launched"])
    assert [record.getMessage()[:40] for record in caplog.records] == ["there is no memory for a further CUDA gr"]


class Tensor(torch.Tensor):
    """Writes down for whom its memory is kept, and on which stream it is copied."""

    def record_stream(self, stream):
        self.log.append(("kept for", stream.name))

    def to(self, device, *, non_blocking):
        self.log.append(("copied", self.cuda_.current[FIRST].name, str(device), non_blocking))
        return self


def stream_named(name, device, log):
    return SimpleNamespace(name=name, device=device, wait_event=lambda event: log.append((name, "waits for", event)))


def launched(cuda, log):
    value = torch.zeros(2).as_subclass(Tensor)
    value.log, value.cuda_ = log, cuda
    here, away = stream_named("stage 0", FIRST, log), stream_named("away", FIRST, log)
    return LaunchedValues((value, None), here, "event", away)


def test_a_stage_on_the_same_device_waits_for_the_one_before_and_keeps_its_memory(cuda):
    log = []
    launched(cuda, log).for_stream(stream_named("stage 1", FIRST, log))
    assert log == [("stage 1", "waits for", "event"), ("kept for", "stage 1")]


def test_what_another_device_needs_is_copied_by_the_stages_own_stream_for_that(cuda):
    log = []
    launched(cuda, log).for_stream(stream_named("stage 1", SECOND, log))
    assert log == [("away", "waits for", "event"), ("kept for", "away"), ("copied", "away", "cuda:1", True)]
    assert cuda.current[FIRST] == "default 0"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        pytest.param(None, 4, id="all"),
        pytest.param("2,3", 2, id="two of them"),
        pytest.param("GPU-1-2-3", 1, id="one by its UUID"),
        pytest.param("", 1, id="none: there is a lane in any case"),
        pytest.param("0,1,2,3,4,5", 4, id="more than there are"),
    ],
)
def test_devices_are_those_that_the_process_may_see(visible, count, monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.cuda_devices() == count


def test_a_stream_is_nobody_elses_as_long_as_there_are_any(monkeypatch):
    """torch hands out a few of a device in turn."""
    handles = itertools.cycle((11, 12, 13))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device, next(handles)))
    first, second = new_stream(FIRST), new_stream(FIRST)
    for _ in range(4):
        assert new_stream(FIRST).cuda_stream == 13  # which nobody holds on to
    third = new_stream(FIRST)
    assert {one.cuda_stream for one in (first, second, third)} == {11, 12, 13}
    del second
    assert new_stream(FIRST).cuda_stream == 12
    fourth = new_stream(FIRST)
    assert new_stream(FIRST).cuda_stream in {11, 12, 13}
    assert fourth.cuda_stream == 12
