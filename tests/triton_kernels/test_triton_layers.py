"""The layers of a decoder in kernels of our own answer as torch's do, and the same bits in any company."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from masked_attention import mixed_by_pages
from random_adapters import random_adapter
from random_models import LLAMA, MIXTURES, VARIANTS, random_weights
from steps import seeing, step_of

from gpuinfer.text.decoder import torch_static, triton_layers
from gpuinfer.text.decoder.torch_cache import PageCache
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.decoder.torch_layers import PlainLayers, StepBatch, Tiles
from gpuinfer.text.decoder.triton_layers import TritonLayers
from gpuinfer.text.transformer import PAGE, Masking

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.usefixtures("interpreted")]

CPU = torch.device("cpu")
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]
CAUSAL = {name: replace(LLAMA, **changes) for name, changes in (VARIANTS | MIXTURES).items()}
WAYS = {
    "kernel by kernel": {"graphs": False},
    "in fixed shapes": {"graphs": True},
    "deterministic": {"graphs": True, "deterministic": True},
}


@pytest.fixture(autouse=True)
def small_forms(monkeypatch):
    """What fills a step up is computed too, and slowly here."""
    monkeypatch.setattr(torch_static, "PROMPT_TOKENS", (12, 24, 48))
    monkeypatch.setattr(torch_static, "LEAST_ITEMS", 4)


def decoder(shape, dtype=torch.float32, kernels=True, **options):
    weights = random_weights(shape, dtype)
    one = TorchDecoder(shape, weights, CPU, dtype, slots=4, pages=32, length=160, kernels=kernels, **options)
    assert isinstance(one._layers, TritonLayers if kernels else PlainLayers)
    return one


def both(shape, steps, dtype=torch.float32, adapters=(), **options):
    """The largest difference between what our kernels and torch's answer, and the largest answer."""
    ours, theirs = (decoder(shape, dtype, kernels, **options) for kernels in (True, False))
    for one in (ours, theirs):
        for number, adapter in enumerate(adapters, 1):
            one.load(number, one.pack_adapter(adapter))
    worst = largest = 0.0
    for step in steps:
        found, wanted = (one.forward(step).clone() for one in (ours, theirs))
        worst = max(worst, (found - wanted).abs().max().item())
        largest = max(largest, wanted.abs().max().item())
    return worst, largest


def causal_steps():
    yield step_of((0, 0, TOKENS[:7]), (3, 0, OTHER[:3]))
    yield step_of((0, 7, TOKENS[7:10]), (3, 3, [6]), last_only=True)
    yield step_of((0, 10, [5]), (3, 4, [8]))


def masked_steps():
    yield seeing((0, 0, TOKENS[:6], [6] * 6), (3, 0, OTHER[:3], [3] * 3))
    yield seeing((0, 2, OTHER[:2], [6] * 2), (3, 1, OTHER[4:6], [3] * 2))


@pytest.mark.parametrize("name", CAUSAL)
def test_every_kind_of_model_and_way_of_batching_is_answered_as_by_torch(name):
    for way in WAYS if name in ("plain", "windows") else ["in fixed shapes"]:
        worst, largest = both(CAUSAL[name], causal_steps(), **WAYS[way])
        assert worst < 1e-4 * largest, way
        if name in ("plain", "windows"):
            worst, largest = both(replace(CAUSAL[name], masking=Masking(0)), masked_steps(), **WAYS[way])
            assert worst < 1e-4 * largest, way


def test_adapters_are_added_as_by_torch():
    shape = CAUSAL["plain"]
    steps = [replace(step, adapters=np.array([2, 0], np.int32)) for step in causal_steps()]
    adapters = [random_adapter(shape, 4, 0), random_adapter(shape, 5, 1, ("q", "v", "down"))]
    worst, largest = both(shape, steps, adapters=adapters)
    assert worst < 1e-4 * largest


def test_deterministic_answers_are_the_same_bits_in_any_company():
    one = decoder(CAUSAL["plain"], deterministic=True)
    together = one.forward(step_of((0, 0, TOKENS[:9]), (1, 0, OTHER[:5]))).clone()
    alone = one.forward(step_of((2, 0, TOKENS[:9]))).clone()
    assert torch.equal(together[:9], alone)
    first = one.forward(step_of((3, 0, TOKENS[:4]))).clone()
    rest = one.forward(step_of((3, 4, TOKENS[4:9]))).clone()
    assert torch.equal(torch.cat((first, rest)), alone)


def attention(shape, reaches, most, splits, window=None, length=256):
    """Attention of rows that see `reaches` positions of rows of their own, by our kernels; and as float64 has it."""
    generator = torch.Generator().manual_seed(0)
    layers = TritonLayers(replace(shape, layers=1, windows=(window,)), None, None, None, length)
    layers.split = splits
    count = len(reaches)
    cache = PageCache(replace(shape, layers=1), count * (length // PAGE), length, CPU, torch.float32)
    for held in (cache.keys, cache.values):
        held.copy_(torch.randn(held.shape, generator=generator))
    order = torch.randperm(cache.pages, generator=generator).view(count, -1)
    queries = torch.randn((count * most, shape.heads, shape.head_dim), generator=generator)
    sees = torch.tensor([[reach - most + 1 + at for at in range(most)] for reach in reaches]).flatten()
    numbers = torch.arange(count)
    rows = None if most == 1 else (numbers * most, torch.full_like(numbers, most), numbers)
    batch = StepBatch(numbers, sees - 1, numbers, tiles=(Tiles(order, rows, most, max(reaches)),), sees=sees)
    found = layers.attend(queries, batch, cache, 0)
    pages = order.repeat_interleave(most, 0)
    return found, mixed_by_pages(shape, cache, queries, pages, sees.tolist(), window)


HEADS = {
    "two share": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "three share, of an odd size": {"heads": 9, "kv_heads": 3, "head_dim": 20},
    "each its own": {"heads": 2, "kv_heads": 2, "head_dim": 32},
    "twenty share": {"heads": 20, "kv_heads": 1, "head_dim": 16},
}


@pytest.mark.parametrize("window", [None, 40, 130])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_over_scattered_pages_is_right_and_the_same_bits_in_portions_done_apart(monkeypatch, heads, window):
    shape, reaches = replace(LLAMA, **HEADS[heads]), [3, 64, 65, 129, 200]
    for most in (1, 2):
        found, wanted = attention(shape, reaches, most, 256, window)
        assert (found - wanted).abs().max() < 1e-5
    answers = []
    for few in (0, 1 << 20):
        monkeypatch.setattr(triton_layers, "FEW_PROGRAMS", few)
        answers.append(attention(shape, reaches, 1, 64, window)[0])
    assert torch.equal(*answers)
    assert (answers[0] - attention(shape, reaches, 1, 64, window)[1]).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [32, 1])
def test_steps_with_prompts_are_padded_to_few_forms_and_answered_as_without(rows, monkeypatch):
    """Rows that decode, chunks of one, of a few and of many tokens, wanted or not, and as many rows as there may be."""
    shape = CAUSAL["windows"]
    monkeypatch.setattr(triton_layers, "RUN_QUERIES", rows * shape.heads // shape.kv_heads)
    assert triton_layers.tile_rows(shape) == rows
    padded, plain = (decoder(shape, graphs=graphs) for graphs in (True, False))
    forms = []
    prompts = padded._static.prompts
    padded._static.prompts = lambda step, form: forms.append(form.tokens) or prompts(step, form)
    for step in (
        step_of((0, 0, TOKENS[:11])),
        step_of((0, 11, [5]), (1, 0, OTHER[:2]), (3, 0, OTHER[:20]), last_only=True),
        step_of((0, 12, [6]), (1, 2, [7]), (3, 20, OTHER[20:50]), (2, 0, TOKENS[:1])),
        step_of((0, 13, [6]), (1, 3, OTHER[3:37]), (2, 1, TOKENS[1:13]), (3, 50, [1])),  # as many tokens as a form has
    ):
        found, wanted = padded.forward(step).clone(), plain.forward(step)
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert forms == [12, 24, 48]


@pytest.mark.parametrize("length", [1, 2, 64])
def test_kernels_are_used_in_a_later_stage_too_whose_embedding_has_a_single_row(length):
    """And where stages are timed, with rows of one position."""
    weights = random_weights(LLAMA)
    later = replace(weights, embedding=torch.zeros_like(weights.embedding[:1]))
    one = TorchDecoder(LLAMA, later, CPU, torch.float32, slots=2, pages=8, length=length, kernels=True, graphs=False)
    assert isinstance(one._layers, TritonLayers)


def test_layers_are_launched_on_the_device_of_their_rows_whichever_is_current(made_current, monkeypatch):
    launch, launched = TritonLayers._launch, []

    def noted(layers, kernel, grid, *given, **sizes):
        launched.append(len(made_current))
        launch(layers, kernel, grid, *given, **sizes)

    monkeypatch.setattr(TritonLayers, "_launch", noted)
    decoder(CAUSAL["plain"]).forward(step_of((0, 0, TOKENS[:3])))
    assert set(launched) == {1}


@pytest.mark.parametrize("kernel", ["sum_norm", "attend_shared"])
def test_kernels_that_answer_wrongly_are_not_used(monkeypatch, caplog, kernel):
    norm, launch = TritonLayers.sum_norm, TritonLayers._launch

    def without_shared(layers, kernel, *given, **sizes):
        if kernel is not layers._kernels.attend_shared:
            launch(layers, kernel, *given, **sizes)

    if kernel == "sum_norm":
        monkeypatch.setattr(TritonLayers, "sum_norm", lambda *given: tuple(2 * one for one in norm(*given)))
    else:
        monkeypatch.setattr(TritonLayers, "_launch", without_shared)
    options = {"slots": 2, "pages": 8, "length": 64, "kernels": True, "graphs": False}
    one = TorchDecoder(LLAMA, random_weights(LLAMA), CPU, torch.float32, **options)
    assert isinstance(one._layers, PlainLayers)
    assert "do not work here" in caplog.text
