"""The decoder in plain torch as a CUDA device would run it: every variant, way of batching and attention kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

sys.path += [str(Path(__file__).parents[1] / part) for part in ("text", "adapters")]

from counting import Asked, own_kernels, real_host_memory
from random_adapters import random_adapter
from random_models import LLAMA, MIXTURES, VARIANTS, random_weights
from replaced import KERNELS
from steps import seeing, step_of

from gpuinfer.text.decoder import torch_batch, torch_layers, triton_layers
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.transformer import PAGE, Masking, Rope

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]
CAUSAL = {name: replace(LLAMA, **changes) for name, changes in (VARIANTS | MIXTURES).items()}
MASKED = {
    f"masked, {name}": replace(CAUSAL[name], masking=Masking(0))
    for name in ("plain", "one key head for all", "a key head for each", "windows", "q and k norms", *MIXTURES)
}
WAYS = {
    "kernel by kernel": {"graphs": False},
    "in fixed shapes": {"graphs": True},
    "deterministic": {"graphs": True, "deterministic": True},
}


def causal_steps():
    """Prompts whole and in chunks beside rows that go on, then rows that go on alone. Nothing has values, so that a row
    may go on from what was never written.
    """
    yield step_of((0, 0, TOKENS[:20]), (3, 0, OTHER[:3]), (1, 0, OTHER[:34]))
    yield step_of((0, 20, TOKENS[20:30]), (3, 3, [6]))
    yield step_of((2, 0, TOKENS[:20]), (1, 140, OTHER[:5]), (0, 30, TOKENS[70:75]), last_only=True)
    for at in range(2):
        yield step_of((0, 35 + at, [5 + at]), (3, 4 + at, [8]), (1, 145 + at, [at]))


def canvas(slot, tokens, start=0, end=None):
    return slot, start, tokens, [end or len(tokens)] * len(tokens)


def masked_steps():
    """Canvases whole, and blocks of them before what is not decided yet."""
    yield seeing(canvas(0, TOKENS[:24]), canvas(3, OTHER[:70]), canvas(1, OTHER[:40]))
    yield seeing(canvas(0, OTHER[8:24], 8, 40), canvas(3, TOKENS[64:80], 64, 140))


def decoder(shape, device, kernel="memory-efficient", dtype=torch.bfloat16, **options):
    with unset_fake_temporarily():
        weights = random_weights(shape, torch.float32)
    one = TorchDecoder(shape, weights, device, dtype, **({"slots": 5, "pages": 40, "length": 160} | options))
    one._layers.attention = KERNELS[kernel]
    return one


@pytest.fixture(autouse=True)
def host():
    with real_host_memory():
        yield


SHAPES = CAUSAL | MASKED
KINDS = ("plain", "windows", "masked, plain")  # of causal order, a mask, and sight of what comes after
CASES = [(name, "memory-efficient") for name in SHAPES] + [
    (name, kernel) for name in KINDS for kernel in KERNELS if kernel != "memory-efficient"
]


@pytest.mark.sample(9)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_every_step_runs_on_the_device_and_waits_for_nothing(fake_cuda, name, way, kernel):
    shape = SHAPES[name]
    one = decoder(shape, fake_cuda, kernel, **WAYS[way])
    for step in masked_steps() if shape.masking else causal_steps():
        logits = one.forward(step)
        assert logits.device == fake_cuda
        assert logits.dtype == torch.float32
        assert logits.shape == (len(step.wanted), shape.vocabulary)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "way"), [(name, "in fixed shapes") for name in SHAPES] + [(name, way) for name in KINDS for way in WAYS]
)
def test_every_step_runs_in_kernels_of_our_own_and_waits_for_nothing(fake_cuda, name, way):
    shape = SHAPES[name]
    with own_kernels():
        one = decoder(shape, fake_cuda, kernels=True, **WAYS[way])
        for step in masked_steps() if shape.masking else causal_steps():
            logits = one.forward(step)
            assert (logits.device, logits.shape) == (fake_cuda, (len(step.wanted), shape.vocabulary))


@pytest.mark.sample
@pytest.mark.parametrize("kernels", [True, False], ids=["own kernels", "torch"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("way", ["in fixed shapes", "kernel by kernel", "deterministic"])
@pytest.mark.parametrize("name", KINDS)
def test_weights_of_few_bits_are_rounded_and_computed_with_on_the_device(
    fake_cuda, monkeypatch, name, way, bits, kernels
):
    """Neither rounding them nor a step with prompts, of one token a row, or with new weights waits."""
    shape = SHAPES[name]
    with own_kernels():
        one = decoder(shape, fake_cuda, bits=bits, kernels=kernels, **WAYS[way])
        stored = {tensor.dtype for tensor in one.weight_tensors() if not tensor.dtype.is_floating_point}
        assert stored == ({torch.int8} if bits == 8 else {torch.int8, torch.uint8})  # the head keeps 8
        for step in masked_steps() if shape.masking else causal_steps():
            logits = one.forward(step)
            assert (logits.device, logits.shape) == (fake_cuda, (len(step.wanted), shape.vocabulary))
        with unset_fake_temporarily():
            weights = random_weights(shape, torch.float32, seed=1)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        one.swap(one.pack(weights))
        assert one.hidden(step).shape == (len(step.tokens), shape.hidden)


DECODE = ((0, 35, [5]), (3, 4, [8]), (1, 145, [7]))  # segments of a step of one token each
PROMPTS = ((0, 35, [5]), (3, 0, TOKENS[:40]), (1, 145, OTHER[:3]))


def kernels_of_a_step(device, layers, segments=DECODE, **options):
    """What a step asks of the device, of which it wants each row's last logits."""
    asked = Asked()
    with own_kernels(asked):
        one = decoder(replace(LLAMA, layers=layers), device, **options)
        asked.kernels.clear()
        with asked:
            one.forward(step_of(*segments, last_only=True))
    return asked


@pytest.mark.parametrize(("segments", "launches"), [(DECODE, 10), (PROMPTS, 11)], ids=["decode", "prompts"])
def test_a_layer_is_few_launches_and_a_step_one_copy(fake_cuda, segments, launches):
    of_two, of_three = (kernels_of_a_step(fake_cuda, layers, segments, kernels=True) for layers in (2, 3))
    layer = of_three.kernels - of_two.kernels
    assert sum(layer.values()) <= launches, layer
    assert of_three.copies == 1
    theirs = [kernels_of_a_step(fake_cuda, layers, segments).kernels for layers in (2, 3)]
    assert sum((theirs[1] - theirs[0]).values()) > 30


def sharing_step(prompts, samples, prompt_pages, columns):
    """A token each of so many samples of each prompt, in the last page of a row."""
    rows = prompts * samples
    pages = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    pages[:, :prompt_pages] = np.repeat(pages[::samples, :prompt_pages], samples, axis=0)
    step = step_of(*((row, columns * PAGE - 1, [5]) for row in range(rows)))
    return replace(step, pages=np.ascontiguousarray(pages))


@pytest.mark.parametrize("rope", [32, 64], ids=["heads of 64 values", "heads of 128 values"])
def test_a_prompt_that_samples_share_is_read_once_or_twice(fake_cuda, rope):
    """64 answers of 256 positions to one prompt of 1,024, of a model whose heads share keys by fours."""
    shape = replace(LLAMA, layers=1, heads=8, head_dim=2 * rope, rope=Rope((1.0,) * rope), positions=2048)
    step = sharing_step(1, 64, 32, 40)
    with own_kernels():
        for options in ({}, {"share": False}, {"deterministic": True}):
            static = decoder(shape, fake_cuda, kernels=True, slots=256, pages=4096, length=2048, **options)._static
            plan = static.shared_by(step, 64)
            if options:
                assert plan is None
                continue
            needed = 1024 + 64 * 256
            assert needed <= plan.positions_read(np.full(64, 40 * PAGE)) <= 1.1 * needed


def test_prefixes_are_planned_once_for_steps_in_the_same_pages(fake_cuda, monkeypatch):
    monkeypatch.setattr(triton_layers, "LEAST_SAVED", 0)
    with own_kernels():
        static = decoder(LLAMA, fake_cuda, kernels=True, slots=8, pages=64, length=160)._static
    step = sharing_step(1, 4, 3, 5)
    plan = static.shared_by(step, 4)
    assert len(plan.items)
    step.starts[:] += 1
    assert static.shared_by(step, 4) is plan
    step.starts[1] = 70  # taken back to before the end of what is shared
    assert static.shared_by(step, 4).begins.tolist() == [2 * PAGE, 2 * PAGE, 2 * PAGE, 2 * PAGE]
    assert static.shared_by(replace(step, pages=step.pages.copy()), 4) is not plan


def test_steps_with_prompts_become_graphs_of_few_shapes(fake_cuda):
    """Whatever prompts there are beside whatever rows: the number of tokens alone decides, and few shapes are all."""
    with own_kernels():
        one = decoder(LLAMA, fake_cuda, kernels=True)
        forms = {
            one._static.form_of_prompts(step_of(*segments))
            for segments in (PROMPTS, PROMPTS[:2], ((2, 0, TOKENS[:127]),), ((0, 0, TOKENS[:60]), (1, 9, OTHER[:60])))
        }
        assert len(forms) == 1
        assert one._static.form_of_prompts(step_of((2, 0, TOKENS[:128]))) not in forms
        assert one._static.form_of_prompts(step_of((2, 0, TOKENS * 8))) is None  # longer than launches take
        large = decoder(LLAMA, fake_cuda, kernels=True, slots=256, pages=256, length=4096)
        static = large._static
        assert len(static.row_buckets) * len(static.reach_buckets) + len(static.prompt_tokens) <= 20
        assert large.most_prompt_tokens == 1023
        for options in ({"deterministic": True}, {"graphs": False}):
            assert decoder(LLAMA, fake_cuda, kernels=True, **options).most_prompt_tokens == 0


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_rows_with_adapters_and_hidden_states_run_on_the_device_too(fake_cuda, name, way):
    shape = SHAPES[name]
    one = decoder(shape, fake_cuda, **WAYS[way])
    with unset_fake_temporarily():
        adapters = {3: random_adapter(shape, 4, 0), 7: random_adapter(shape, 5, 1, ("q", "v", "down"))}
    for number, adapter in adapters.items():
        one.load(number, one.pack_adapter(adapter))
    for step in masked_steps() if shape.masking else causal_steps():
        numbers = np.array([0, 3, 7][: len(step.lengths)], np.int32)
        found = one.forward(replace(step, adapters=numbers))
        assert found.device == fake_cuda
        found = one.hidden(step)
        assert (found.device, found.dtype, found.shape) == (fake_cuda, torch.bfloat16, (len(step.tokens), shape.hidden))


def test_what_the_host_wrote_is_copied_before_it_is_written_over(fake_cuda, monkeypatch):
    log = []

    class Event:
        def record(self, stream):
            log.append("copy queued")

        def synchronize(self):
            log.append("copied")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    uploads = torch_batch.Uploads(fake_cuda)
    for _ in range(3):
        one, two = uploads.sent([np.arange(3), np.arange(5, dtype=np.int32)])
        assert (one.device, one.shape, two.shape) == (fake_cuda, (3,), (5,))
    assert log == ["copy queued", "copy queued", "copied", "copy queued"]  # of two buffers the first


def test_weights_that_are_exchanged_are_kept_until_they_are_copied(fake_cuda, monkeypatch):
    """Another thread packs them, on its own stream: freed there, they would be written over before this one reads."""
    one, kept = decoder(LLAMA, fake_cuda, graphs=False), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the decoder's")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append((id(tensor), stream)))
    with unset_fake_temporarily():
        weights = random_weights(LLAMA, torch.float32)
    packed = one.pack(weights)
    one.swap(packed)
    assert kept == [(id(tensor), "the decoder's") for tensor in torch_layers.tensors_of(packed)]
