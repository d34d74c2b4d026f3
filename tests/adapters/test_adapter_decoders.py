"""Rows with adapters, against a decoder whose weights have the adapter merged into them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_adapters import merged, random_adapter
from text.decoders import DECODERS, each_decoder
from text.random_models import LLAMA, VARIANTS, random_weights
from text.steps import COLUMNS, seeing, step_of

from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.transformer import Vectors

NEAR = 1e-4
KERNELS = [name for name in DECODERS if name.startswith("kernels")]
SHAPES = [pytest.param(replace(LLAMA, **changes), id=name) for name, changes in VARIANTS.items()]


def with_adapters(step, numbers):
    return replace(step, adapters=np.array(numbers, np.int32))


def oracle(shape, weights, adapter=None):
    weights = weights if adapter is None else merged(weights, adapter)
    return TorchDecoder(
        shape, weights, torch.device("cpu"), torch.float32, slots=8, pages=8 * COLUMNS, length=64, graphs=False
    )


def loaded(decoder, adapters):
    for number, adapter in adapters.items():
        decoder.load(number, decoder.pack_adapter(adapter))
    return decoder


@pytest.mark.sample(6)
@pytest.mark.parametrize("shape", SHAPES)
@each_decoder
def test_a_row_with_an_adapter_is_that_of_the_merged_model(make, shape):
    """Prompts of several slots in one step, with two adapters and none; then a token of each."""
    weights = random_weights(shape)
    adapters = {3: random_adapter(shape, 4, 0), 7: random_adapter(shape, 5, 1, ("q", "v", "down"))}
    decoder = loaded(make(shape, weights, torch.float32, slots=8, length=64), adapters)
    numbers = [3, 0, 7, 3]
    runs = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
    first = with_adapters(step_of(*((slot, 0, run) for slot, run in enumerate(runs))), numbers)
    then = with_adapters(step_of(*((slot, len(run), [20 + slot]) for slot, run in enumerate(runs))), numbers)
    found = [decoder.forward(step).clone() for step in (first, then)]
    begin = 0
    for slot, run in enumerate(runs):
        alone = oracle(shape, weights, adapters.get(numbers[slot]))
        wanted = alone.forward(step_of((slot, 0, run)))
        torch.testing.assert_close(found[0][begin : begin + len(run)], wanted, atol=NEAR, rtol=NEAR)
        wanted = alone.forward(step_of((slot, len(run), [20 + slot])))
        torch.testing.assert_close(found[1][slot : slot + 1], wanted, atol=NEAR, rtol=NEAR)
        begin += len(run)
    decoder.close()


@pytest.mark.parametrize("name", [name for name in DECODERS if "kernels" in name or "deterministic" in name])
def test_company_does_not_show_in_any_bit(name):
    """Random steps of eight slots: each row alone, without adapters loaded where it has none, gives the same bits."""
    dice, shape = random.Random(5), LLAMA
    weights = random_weights(shape)
    adapters = {number: random_adapter(shape, rank, number) for number, rank in enumerate((1, 4, 19), 1)}
    make = DECODERS[name]
    decoder = loaded(make(shape, weights, torch.float32, slots=8, length=64), adapters)
    plain = make(shape, weights, torch.float32, slots=8, length=64)
    numbers = [0, 1, 2, 3, 0, 2, 1, 3]
    ends, history = [0] * 8, {}
    for _ in range(6):
        slots = dice.sample(range(8), dice.randint(2, 8))
        runs = [(slot, ends[slot], [dice.randrange(61) for _ in range(dice.choice((1, 1, 2, 5)))]) for slot in slots]
        step = with_adapters(step_of(*runs, last_only=True), [numbers[slot] for slot in slots])
        logits = decoder.forward(step)
        for place, (slot, start, run) in enumerate(runs):
            ends[slot] = start + len(run)
            history.setdefault(slot, []).append(((slot, start, run), logits[place].clone()))
    for slot, steps in history.items():
        own = plain if numbers[slot] == 0 else loaded(make(shape, weights, torch.float32, slots=8, length=64), adapters)
        for run, logits in steps:
            step = step_of(run, last_only=True)
            alone = own.forward(step if numbers[slot] == 0 else with_adapters(step, [numbers[slot]]))
            assert torch.equal(alone[0], logits)


@each_decoder
def test_a_canvas_with_an_adapter_is_that_of_the_merged_model(make):
    """Each token sees all of its row, and some have embeddings of their own."""
    weights, adapter = random_weights(LLAMA), random_adapter(LLAMA, 4, 0)
    own = np.random.default_rng(0).normal(size=(4, LLAMA.hidden)).astype(np.float32)
    rows = [[1, 2, 3, 4, 5], [6, 7, 8], list(range(9, 29))]
    seen = [(slot, 0, run, [len(run)] * len(run)) for slot, run in enumerate(rows)]
    step = replace(seeing(*seen), vectors=Vectors(np.array([1, 6, 9, 27], np.int32), own))
    decoder = loaded(make(LLAMA, weights, torch.float32, slots=3, length=64), {1: adapter})
    found = decoder.forward(with_adapters(step, [1, 0, 1]))
    with_it, without = (oracle(LLAMA, weights, given).forward(step) for given in (adapter, None))
    wanted = torch.cat([with_it[:5], without[5:8], with_it[8:]])
    torch.testing.assert_close(found, wanted, atol=NEAR, rtol=NEAR)
    decoder.close()


def test_adapters_come_and_go_and_their_places_are_used_again():
    shape, weights = LLAMA, random_weights(LLAMA)
    decoder = DECODERS["kernels" if KERNELS else "torch"](shape, weights, torch.float32, slots=4, length=64)
    dice, live = random.Random(1), {}
    for number in range(1, 40):
        live[number] = random_adapter(shape, dice.choice((1, 2, 3, 8)), number, dice.choice((("q",), ("o", "down"))))
        decoder.load(number, decoder.pack_adapter(live[number]))
        while len(live) > 11:
            decoder.unload(gone := dice.choice(list(live)))
            del live[gone]
        chosen = dice.choice(list(live))
        found = decoder.forward(with_adapters(step_of((0, 0, [1, 2, 3]), (1, 0, [4])), [chosen, 0]))
        wanted = oracle(shape, weights, live[chosen]).forward(step_of((0, 0, [1, 2, 3])))
        torch.testing.assert_close(found[:3], wanted, atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("name", KERNELS)
def test_in_bfloat16_a_row_is_near_that_of_the_merged_model(name):
    shape, weights = LLAMA, random_weights(LLAMA, torch.bfloat16)
    adapter = random_adapter(shape)
    decoder = DECODERS[name](shape, weights, torch.bfloat16, slots=4, length=64, deterministic=True)
    loaded(decoder, {1: adapter})
    found = decoder.forward(with_adapters(step_of((0, 0, [1, 2, 3])), [1]))
    wide = random_weights(shape, torch.bfloat16)
    wanted = oracle(shape, wide, adapter).forward(step_of((0, 0, [1, 2, 3])))
    torch.testing.assert_close(found, wanted, atol=0.15, rtol=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options", [{"graphs": True}, {"graphs": False}, {"deterministic": True}], ids=lambda given: str(given)
)
def test_on_a_gpu_a_row_with_an_adapter_is_that_of_the_merged_model(options):
    """Steps of one token a row come again and again, so that those without adapters are captured as graphs between."""
    shape, weights, adapter = LLAMA, random_weights(LLAMA), random_adapter(LLAMA)
    cuda = torch.device("cuda", 0)
    decoder = TorchDecoder(shape, weights, cuda, torch.float32, slots=4, pages=4 * COLUMNS, length=64, **options)
    loaded(decoder, {1: adapter})
    merged_one, plain_one = oracle(shape, weights, adapter), oracle(shape, weights)
    for number in range(6):
        step = step_of((0, number, [5 + number]), (1, number, [9 + number]))
        wanted = torch.cat(
            [
                merged_one.forward(step_of((0, number, [5 + number]))),
                plain_one.forward(step_of((1, number, [9 + number]))),
            ]
        )
        found = decoder.forward(with_adapters(step, [1, 0])).cpu()
        torch.testing.assert_close(found, wanted, atol=NEAR, rtol=NEAR)
        decoder.forward(step_of((2, number, [3]), (3, number, [4])))
