"""What orders work on the streams of a CUDA device, small enough for tests that record it (`recording.py`)."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path += [str(Path(__file__).parents[1] / part) for part in (".", "text", "adapters", "train")]

from random_adapters import random_adapter
from random_models import LLAMA, random_weights
from steps import step_of
from text.toy import END, VOCABULARY, toy_language
from train_models import ACTIONS, SEATS, batch_of
from train_models import FEATURES as OBSERVED

from gpuinfer.api import BackendContext, ModelSpec
from gpuinfer.models.forward_cuda import CudaForward
from gpuinfer.models.gradients import GradientPass
from gpuinfer.models.load import trainable
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.pipeline.stage import CudaStage
from gpuinfer.models.pipeline.staged_forward import ToCuda, from_cuda
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.generator import Generator
from gpuinfer.text.stages.staged_decoder import MicroBatchCutter, Portion, PortionSegment, StagedDecoder
from gpuinfer.workloads.optimizer import Stepper

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
WAIT_S = 60.0
FEATURES = 40
SPECS = {
    "bytes": ModelSpec("a-model", inputs=FEATURES, input_dtype="uint8"),
    "bits": ModelSpec("a-model", inputs=FEATURES, input_dtype="bits"),
}


def found(cuda):
    """All that was found, in memory that was given back last too."""
    with cuda.lock:
        cuda.drain()
    return cuda.races + cuda.wrong


def plant(monkeypatch, owner, name, old, new):
    """Have `owner.name` do something else: its source with `new` in the place of `old`."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, (name, old)
    made = {}
    exec(source.replace(old, new), function.__globals__, made)  # noqa: S102
    monkeypatch.setattr(owner, name, made[function.__name__])


class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow, self.shrink = nn.Linear(FEATURES, 16), nn.Linear(16, 3)

    def forward(self, rows):
        wide = torch.relu(self.grow(rows))
        return {"policy": self.shrink(wide), "sum": wide.sum(1, keepdim=True)}


MODEL = Answers()


def blocks_of(kind, sizes, seed=0):
    """Blocks of rows, and what they are as features."""
    rows = np.random.default_rng(seed).integers(0, 2, (sum(sizes), FEATURES)).astype(np.uint8)
    given = np.packbits(rows, axis=1, bitorder="little") if kind == "bits" else rows
    return [part.copy() for part in np.split(given, np.cumsum(sizes)[:-1])], rows


def expected(rows):
    with torch.no_grad():
        return {name: value.numpy() for name, value in MODEL(torch.from_numpy(rows).float()).items()}


def check(answers, rows):
    for name, value in expected(rows).items():
        np.testing.assert_allclose(np.concatenate([one[name] for one in answers]), value, rtol=1e-4, atol=1e-5)


def forward_of_rows(kind="bytes", **options):
    module = deepcopy(MODEL).to(FIRST).eval()
    return CudaForward(module, SPECS[kind], device=FIRST, dtype=torch.float32, **({"chunk_rows": 40} | options))


def in_threads(count, work: Callable[[int], object]):
    with ThreadPoolExecutor(count) as threads:
        return [one.result(WAIT_S) for one in [threads.submit(work, number) for number in range(count)]]


def stages(places, kind="bytes"):
    model = deepcopy(MODEL)
    parts = [nn.Sequential(model.grow, nn.ReLU()), nn.LeakyReLU(1.0), model.shrink]
    each = []
    for number, (part, place) in enumerate(zip(parts, places, strict=True)):
        enter = ToCuda(SPECS[kind], place, torch.float32) if number == 0 else None
        leave = from_cuda if number + 1 == len(parts) else None
        each.append(CudaStage(f"stage {number}", [part.to(place)], place, enter, leave))
    return each


SHAPE = replace(LLAMA, positions=64, vocabulary=VOCABULARY, end_tokens=(END,))
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, VOCABULARY, 64)]


def decoder_of(shape=SHAPE, device=FIRST, weights=None, dtype=torch.float32, **options):
    weights = random_weights(shape) if weights is None else weights
    return TorchDecoder(shape, weights, device, dtype, slots=4, pages=32, length=64, **options)


def generator_of(**options):
    return Generator(
        decoder_of(**options),
        toy_language(),
        seed=7,
        end_tokens=(END,),
        step_tokens=16,
        threads=1,
        deterministic=False,
        read=lambda place: random_weights(SHAPE, seed=int(place)),
    )


def split_decoder(shape=SHAPE, places=(FIRST, FIRST)):
    weights = random_weights(shape)
    portions = [Portion(shape, number, number + 1) for number in range(2)]
    parts, decoders = [], []
    for number, (portion, place) in enumerate(zip(portions, places, strict=True)):
        decoders.append(decoder_of(portion.shape, place, portion.weights(weights), graphs=False))
        segments = [PortionSegment(number, portion, decoders[-1])]
        enter = None if number else lambda value: value
        parts.append(CudaStage(f"stage {number}", segments, place, enter, mode=torch.no_grad))
    return StagedDecoder(shape, portions, decoders, Pipeline(parts, BackendContext().lane), MicroBatchCutter(2, 1, 4))


def two_rows(count=3):
    """Two prompts, then tokens of each alone: what comes twice in the same shape becomes a graph."""
    yield step_of((0, 0, TOKENS[:9]), (2, 0, TOKENS[20:25]), last_only=True)
    for number in range(count):
        yield step_of((0, 9 + number, [TOKENS[number]]), (2, 5 + number, [TOKENS[30 + number]]))


def exchange(decoder, shape):
    """Of weights that another thread has read and packed, twice."""
    for seed in (1, 2):
        (packed,) = in_threads(1, lambda number, seed=seed: decoder.pack(random_weights(shape, seed=seed)))
        decoder.swap(packed)
        packed = None


def adapt(decoder, shape):
    """A step with an adapter that another thread has packed, which is given back right behind it."""
    (packed,) = in_threads(1, lambda number: decoder.pack_adapter(random_adapter(shape, 4, 0)))
    decoder.load(1, packed)
    packed = None
    decoder.forward(replace(next(two_rows()), adapters=np.array([1, 0], np.int32)))
    decoder.unload(1)
    decoder.copy_pages([0], [1])


class Training:
    """A small network in training on `device`, dropout apart: passes and steps of the optimizer in turn."""

    def __init__(self, model="train_models:Normed", device=FIRST):
        spec = ModelSpec(model, inputs=OBSERVED, arguments={"actions": ACTIONS, "seats": SEATS}, input_dtype="uint8")
        self.passes, self.stepper = GradientPass(trainable(spec, 0).to(device), spec), Stepper(spec, 1, 0.01, 0.5)
        self.version = 0

    def passed(self):
        given = {"weights": self.stepper.weights, "version": self.version, "keep_on_device": True}
        return self.passes(batch_of(16, self.version, **given))

    def steps(self, count):
        """The loss and the norm of each."""
        found = []
        for _ in range(count):
            gradients = self.passed()
            found.append((gradients.loss, self.stepper.step(gradients, 1e-2)))
            self.version += 1
        return found
