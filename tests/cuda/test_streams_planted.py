"""Races that are planted are found, each of them, and what a device would refuse while a graph is captured."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch
from recording import Cuda, UnrecordedQueue, missing
from streamed import (
    FIRST,
    SECOND,
    SHAPE,
    SPECS,
    WAIT_S,
    Training,
    adapt,
    blocks_of,
    decoder_of,
    exchange,
    forward_of_rows,
    found,
    generator_of,
    in_threads,
    plant,
    random_weights,
    split_decoder,
    stages,
    two_rows,
)

from gpuinfer.api import BackendContext
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models import cuda_graphs, losses
from gpuinfer.models.cuda_graphs import captured, own_stream, release_cached_memory, wait_for_device
from gpuinfer.models.forward_cuda import CudaForward, ForwardSlot
from gpuinfer.models.pinned_memory import register
from gpuinfer.models.pipeline import stage as stage_cuda
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.pipeline.stage import CudaStage, LaunchedValues
from gpuinfer.models.pipeline.staged_forward import OnCuda, StagedForward, ToCuda
from gpuinfer.text.decoder import torch_static
from gpuinfer.text.decoder.torch_batch import Uploads
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.decoder.torch_layers import on_device
from gpuinfer.text.decoder.torch_static import Replays
from gpuinfer.text.sampling import torch_path
from gpuinfer.text.stages.staged_decoder import StagedDecoder
from gpuinfer.workloads.optimizer import Stepper


@pytest.fixture
def cuda(recorded):
    return recorded


ONE, TWO = (FIRST,) * 3, (FIRST, SECOND, SECOND)


def rows(monkeypatch):
    """Batches of two threads, that are launched together, of two steps each."""
    launch = CudaForward._launch

    def launched(forward, *given):
        Cuda.running.both.wait()
        return launch(forward, *given)

    monkeypatch.setattr(CudaForward, "_launch", launched)
    forward = forward_of_rows()
    for one in in_threads(2, lambda number: forward(blocks_of("bytes", [60], number)[0])):
        np.concatenate([answers["policy"] for answers in one])


def rows_without_memory(monkeypatch):
    """Rows that are on their way to the device when there is no memory for more than half of them."""
    forward, launch = forward_of_rows(), CudaForward._launch

    def launched(forward, slot, rows, *given):
        if rows > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return launch(forward, slot, rows, *given)

    monkeypatch.setattr(CudaForward, "_launch", launched)
    forward(blocks_of("bytes", [40])[0])


def micro_batches(places, kind="bytes"):
    def run(monkeypatch):
        pipeline = Pipeline(stages(places, kind), BackendContext().lane)
        forward = StagedForward(pipeline, OnCuda(SPECS[kind]), 8, even=False, fixed_shape=False, alone=False)
        for number in range(2):
            np.concatenate(forward(blocks_of(kind, [40], number)[0]))
        pipeline.close()

    return run


def micro_batches_in_time(monkeypatch):
    """Each is loaded once the one before it is on its way to the device."""
    on_its_way, load, enter = UnrecordedQueue(), OnCuda.load, ToCuda.__call__
    on_its_way.put(None)

    def loaded(moving, *given):
        on_its_way.get(timeout=WAIT_S)
        return load(moving, *given)

    def entered(stage, rows):
        there = enter(stage, rows)
        on_its_way.put(None)
        return there

    monkeypatch.setattr(OnCuda, "load", loaded)
    monkeypatch.setattr(ToCuda, "__call__", entered)
    micro_batches(ONE)(monkeypatch)


def steps(**options):
    def run(monkeypatch):
        decoder = decoder_of(**options)
        with cuda_graphs.own_stream(FIRST):
            for step in two_rows(4):
                decoder.forward(step)
            decoder.swap(decoder.pack(decoder_of(graphs=False)._weights))
            for step in two_rows(2):
                decoder.forward(step)

    return run


def answers(monkeypatch):
    """Of a generator, which composes each step before it has seen the tokens of the one before."""
    with own_stream(FIRST):
        generator = generator_of()
        prompts = [Prompt(text=text, sampling=Sampling(max_tokens=4, ignore_eos=True)) for text in ("abc", "hello")]
        for ticket, prepared in enumerate(generator.prepare(prompts)):
            generator.add(ticket, prepared)
        while generator.busy:
            generator.step()
        generator.close()


def weights(make, shape):
    def run(monkeypatch):
        decoder = make(shape)
        with own_stream(FIRST):
            decoder.forward(next(two_rows()))
            exchange(decoder, shape)
            for step in two_rows():
                decoder.forward(step)
        decoder.close()

    return run


def adapters(monkeypatch):
    decoder = decoder_of()
    with own_stream(FIRST):
        adapt(decoder, SHAPE)
    decoder.close()


def converted(monkeypatch):
    """Weights that are on the device already, in another number format."""
    decoder = decoder_of(dtype=torch.bfloat16)

    def pack(number):
        return decoder.pack(on_device(random_weights(SHAPE), FIRST, torch.float32))

    with own_stream(FIRST):
        decoder.swap(in_threads(1, pack)[0])


def text_in_stages(monkeypatch):
    decoder = split_decoder()
    with own_stream(FIRST):
        logits = [decoder.forward(step) for step in two_rows()]
        [one.add_(1) for one in logits]
    decoder.close()


def training(monkeypatch):
    Training().steps(3)


def capture_beside(monkeypatch):
    """Another thread takes memory meanwhile."""
    replays, value = Replays(FIRST, True), torch.zeros(4, device=FIRST)

    def work(form):
        in_threads(1, lambda number: torch.zeros(8, device=FIRST))
        value.add_(1)

    for _ in range(3):
        replays(work, 4)


PLANTS = {
    "answers are read before they are there": (
        rows, CudaForward, "_attempt", "slot.done.synchronize()", "pass", "the host in .* reading",
    ),
    "rows are staged over those that are being copied": (
        rows, CudaForward, "_attempt", "slot.done.synchronize()", "pass", "the host in .* writing",
    ),
    "rows are staged again while those that there was no memory for are being copied": (
        rows_without_memory, CudaForward, "_attempt", "slot.stream.synchronize()", "pass", "the host in .* writing",
    ),
    "the event is recorded on another stream than the kernels are on": (
        rows, CudaForward, "_attempt", "with torch.cuda.stream(slot.stream):", "if True:", "the host in .* reading",
    ),
    "buffers are used before they have been made": (
        rows, CudaForward, "__init__", "wait_for_device(device)", "pass", "copy_ reading .* zeros writing",
    ),
    "two slots have one working memory for their graphs": (
        rows, ForwardSlot, "__init__", "torch.cuda.graph_pool_handle()", "(0, 99)", "working memory of graphs",
    ),
    "a stage does not wait for the one before": (
        micro_batches(ONE), LaunchedValues, "for_stream", "stream.wait_event(self._event)", "pass", "relu writing",
    ),
    "what leaves for another device does not wait for the stage": (
        micro_batches(TWO), LaunchedValues, "for_stream", "self._away.wait_event(self._event)", "pass", "relu writing",
    ),
    "a stage's memory is given back while the next one reads it": (
        micro_batches(ONE), stage_cuda, "_used_on", "tensor.record_stream(stream)", "pass", "memory that was freed",
    ),
    "memory is given back while it leaves for another device": (
        micro_batches(TWO), stage_cuda, "_used_on", "tensor.record_stream(stream)", "pass", "memory that was freed",
    ),
    "the last stage's answers are read one micro-batch too early": (
        micro_batches(ONE), CudaStage, "compute", "self._wait(0 if self._leave is not None else BEHIND)",
        "self._wait(BEHIND)", "the host in .* reading",
    ),
    "micro-batches are loaded into the same pinned memory": (
        micro_batches_in_time, OnCuda, "load", "torch.empty((shape, *self._shape), dtype=self._dtype, pin_memory=True)",
        "self.__dict__.setdefault('kept', torch.empty((64, *self._shape), dtype=self._dtype, pin_memory=True))[:shape]",
        "the host in .* writing",
    ),
    "a stage of text begins before its cache is made": (
        text_in_stages, CudaStage, "at_work", "wait_for_device(self.device)", "pass", "zeros writing",
    ),
    "logits of the last stage are used at once": (
        text_in_stages, StagedDecoder, "_here", "outcome.for_stream(torch.cuda.current_stream(self.device))",
        "outcome._value", "add_ writing",
    ),
    "a step is written over the one that is being copied": (
        steps(graphs=False), Uploads, "room", "copied.synchronize()", "pass", "the host in .* writing",
    ),
    "a step is written over the one that a graph is to read": (
        steps(), Uploads, "room", "copied.synchronize()", "pass", "the host in .* writing",
    ),
    "tokens are read before they have come": (
        answers, torch_path.Download, "values", "self._done.synchronize()", "pass", "the host in .* reading",
    ),
    "weights are exchanged for others under the graphs": (
        steps(), TorchDecoder, "swap", "own.copy_(other)", "self._weights = packed", "a graph uses memory that has",
    ),
    "packed weights are given back while they are copied": (
        weights(decoder_of, SHAPE), TorchDecoder, "swap",
        "keep_for_steps(torch_layers.tensors_of(packed))", "pass", "memory that was freed",
    ),
    "packed weights are given back while a stage copies them": (
        weights(split_decoder, SHAPE), TorchDecoder, "swap",
        "keep_for_steps(torch_layers.tensors_of(packed))", "pass", "memory that was freed",
    ),
    "an adapter is given back while a step computes with it": (
        adapters, TorchDecoder, "unload", "keep_for_steps(", "tuple(", "memory that was freed",
    ),
    "weights are copied before they are packed": (
        converted, TorchDecoder, "_made_here", "event_behind(self.device).synchronize()", "pass",
        "copy_ reading .* copy_ writing",
    ),
    "a model's own stream does not wait for what was loaded": (
        steps(), cuda_graphs, "own_stream", "stream.wait_stream(torch.cuda.default_stream(device))", "pass", "zeros",
    ),
    "weights are stepped on a stream that the next pass does not wait for": (
        training, Stepper, "step", "self._optimizer.step()",
        "with torch.cuda.stream(torch.cuda.Stream(self._device)):\n            self._optimizer.step()",
        "_fused_adamw_ writing",
    ),
    "a loss is read before it is there": (
        training, losses, "read_loss", ".cpu()", ".to('cpu', non_blocking=True).numpy()", "the host in .* reading",
    ),
    "no thread may take memory while another one captures": (
        capture_beside, torch_static, "captured", '"thread_local"', '"global"', "memory outside of its pool",
    ),
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("planted", PLANTS.values(), ids=PLANTS)
def test_a_race_that_is_planted_is_found(cuda, monkeypatch, planted):
    scenario, owner, name, old, new, words = planted
    plant(monkeypatch, owner, name, old, new)
    scenario(monkeypatch)
    assert any(re.search(words, one) for one in found(cuda)), found(cuda)


UNPLANTED = {scenario: name for name, (scenario, *_) in reversed(PLANTS.items())}


@pytest.mark.sample(5)
@pytest.mark.parametrize("scenario", UNPLANTED, ids=[f"not that {name}" for name in UNPLANTED.values()])
def test_where_they_are_planted_there_is_none(cuda, monkeypatch, scenario):
    scenario(monkeypatch)
    assert found(cuda) == []


class Beside:
    """A stream that is captured, in this thread, and another one with its event."""

    def __init__(self):
        self.captured, self.other = torch.cuda.Stream(FIRST), torch.cuda.Stream(FIRST)
        self.value = torch.zeros(4, device=FIRST)
        self.before = torch.cuda.Event()
        self.before.record(self.other)
        torch.cuda.synchronize(FIRST)

    def run(self, here=None, elsewhere=None):
        """`here` in the thread that captures, `elsewhere` in another one meanwhile."""
        with captured(self.captured, torch.cuda.graph_pool_handle()):
            self.value.add_(1)
            self.event = torch.cuda.Event()
            self.event.record(self.captured)
            if here is not None:
                here(self)
            if elsewhere is not None:
                in_threads(1, lambda number: elsewhere(self))


def on_other(work):
    def run(beside):
        with torch.cuda.stream(beside.other):
            work(beside)

    return run


def on_captured(work):
    def run(beside):
        with torch.cuda.stream(beside.captured):
            work(beside)

    return run


HERE = {
    "the device is waited for": lambda beside: torch.cuda.synchronize(FIRST),
    "another stream is waited for": lambda beside: beside.other.synchronize(),
    "an event is waited for": lambda beside: beside.before.synchronize(),
    "an event is queried": lambda beside: beside.before.query(),
    "a value is read back": lambda beside: beside.value[0].item(),
    "pageable memory is copied": lambda beside: torch.zeros(4).to(FIRST),
    "pinned memory is taken": lambda beside: torch.zeros(4, pin_memory=True),
    "memory is taken on another stream": on_other(lambda beside: torch.zeros(4, device=FIRST)),
    "cached memory is given back": lambda beside: torch.cuda.empty_cache(),
    "it waits for an event of no capture": lambda beside: beside.captured.wait_event(beside.before),
    "another stream waits for it": lambda beside: beside.other.wait_event(beside.event),
}
ELSEWHERE = {
    "the device is waited for": HERE["the device is waited for"],
    "another device is waited for": lambda beside: torch.cuda.synchronize(SECOND),
    "the stream is waited for": lambda beside: beside.captured.synchronize(),
    "an event of the stream is queried": lambda beside: beside.event.query(),
    "cached memory is given back": HERE["cached memory is given back"],
    "another stream waits for it": HERE["another stream waits for it"],
    "it launches on the stream": on_captured(lambda beside: beside.value.add_(1)),
}
ALLOWED = {
    "it launches on another stream": on_other(lambda beside: torch.zeros(4, device=FIRST).add_(1)),
    "it waits for another stream": lambda beside: beside.other.synchronize(),
    "it queries an event of another stream": lambda beside: beside.before.query(),
    "it takes pinned memory": lambda beside: torch.zeros(4, pin_memory=True),
    "it copies from pageable memory": lambda beside: torch.zeros(4).to(FIRST),
    "it pins memory": lambda beside: register(np.zeros(8), FIRST),
}


@pytest.mark.parametrize(
    ("here", "elsewhere"),
    [pytest.param(work, None, id=f"in the thread that captures, {name}") for name, work in HERE.items()]
    + [pytest.param(None, work, id=f"in another thread, {name}") for name, work in ELSEWHERE.items()],
)
def test_what_breaks_a_capture_is_found(cuda, here, elsewhere):
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Beside().run(here, elsewhere)
    assert len(cuda.wrong) == 1
    assert cuda.graphs == 0


@pytest.mark.parametrize("work", ALLOWED.values(), ids=ALLOWED)
def test_what_another_thread_may_do_meanwhile_is_not(cuda, work):
    Beside().run(elsewhere=work)
    assert found(cuda) == []
    assert cuda.graphs == 1


@pytest.mark.parametrize("wait", [lambda: wait_for_device(FIRST), release_cached_memory], ids=["device", "cache"])
def test_who_waits_for_the_device_or_gives_memory_back_lets_a_capture_end(cuda, wait):
    thread = threading.Thread(target=wait)

    def begin(beside):
        thread.start()
        cuda.wait_until_blocked(cuda_graphs._one, WAIT_S)

    Beside().run(here=begin)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert found(cuda) == []


@pytest.mark.parametrize("release", [11, 12])
def test_after_a_capture_that_fails_cached_memory_can_be_given_back(guard, monkeypatch, release):
    """Until 2.12 torch's allocator stays at it."""
    if why := missing():
        pytest.skip(why)
    monkeypatch.setattr(torch, "__version__", f"2.{release}.0+cu130")
    with Cuda(ends_pools=release > 11).recording() as cuda:
        replays, value = Replays(FIRST, True), torch.zeros(4, device=FIRST)
        for _ in range(3):
            replays(lambda form: value.add_(1).sum().item(), 4)
        assert not replays.wanted
        release_cached_memory()
        assert cuda.capturing_pools == []
        assert cuda.released == (cuda.ends_pools is False)


def test_memory_is_not_unpinned_while_a_device_reads_it(cuda):
    shared = np.zeros((64, 4), np.float32)
    registration, stream = register(shared, FIRST), torch.cuda.Stream(FIRST)
    with torch.cuda.stream(stream):
        there = torch.from_numpy(shared).to(FIRST, non_blocking=True)
    registration.close()
    assert there.shape == (64, 4)
    assert "unpinned writing" in found(cuda)[0]
