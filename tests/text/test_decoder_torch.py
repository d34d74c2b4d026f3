"""The decoder in plain torch: fixed shapes, the same bits in any company, slots that keep to themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LLAMA, MIXTURES, VARIANTS, random_weights
from steps import step_of

from gpuinfer.errors import UsageError
from gpuinfer.text.decoder.torch_decoder import TorchDecoder

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOATS = [pytest.param(replace(LLAMA, **changes), torch.float32, id=name) for name, changes in VARIANTS.items()]
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]


def decoder(shape=LLAMA, dtype=torch.float32, slots=4, length=160, **options):
    return TorchDecoder(shape, random_weights(shape, dtype), CPU, dtype, slots=slots, length=length, **options)


def alone(shape, dtype=torch.float32, tokens=TOKENS, **options):
    """The logits of one prompt that has a decoder to itself, token by token."""
    one = decoder(shape, dtype, slots=1, **options)
    return torch.cat([one.forward(step_of((0, at, [token]))).clone() for at, token in enumerate(tokens)])


@pytest.mark.parametrize(
    ("shape", "dtype"), [*FLOATS, *(pytest.param(LLAMA, dtype, id=str(dtype)) for dtype in DTYPES[1:])]
)
def test_a_prompt_in_chunks_beside_others_has_the_bits_it_has_token_by_token(shape, dtype):
    several = decoder(shape, dtype, deterministic=True)
    first = several.forward(step_of((0, 0, OTHER[:7]), (2, 0, TOKENS[:40]))).clone()
    second = several.forward(step_of((2, 40, TOKENS[40:43]), (1, 0, OTHER[:20]), (0, 7, OTHER[7:8]))).clone()
    third = several.forward(step_of((2, 43, TOKENS[43:]))).clone()
    found = torch.cat([first[7:], second[:3], third])
    assert torch.equal(found, alone(shape, dtype, deterministic=True))


@pytest.fixture(scope="module")
def bits():
    return alone(LLAMA, deterministic=True)


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 149), max_size=6, unique=True), slot=st.integers(0, 3), company=st.integers(0, 30))
def test_any_chunks_any_slot_and_any_company_give_the_same_bits(bits, cuts, slot, company):
    several = decoder(deterministic=True)
    edges, found = [0, *sorted(cuts), len(TOKENS)], []
    for begin, end in itertools.pairwise(edges):
        others = [((slot + 1) % 4, 0, OTHER[:company])] if company else []
        found.append(several.forward(step_of(*others, (slot, begin, TOKENS[begin:end])))[company:].clone())
    assert torch.equal(torch.cat(found), bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_number_formats_stay_near_float32(dtype):
    exact = decoder().forward(step_of((0, 0, TOKENS)))
    found = decoder(dtype=dtype).forward(step_of((0, 0, TOKENS)))
    assert found.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.15, torch.float16: 0.03}[dtype]
    torch.testing.assert_close(found, exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("slots", [[0], [3], [0, 1, 2], [6, 2, 4], [5, 6], [6, 5, 4, 3, 2, 1, 0]], ids=str)
def test_fixed_shapes_give_what_shapes_that_fit_give(slots):
    prompts = [TOKENS[i : i + 20 + 9 * i] for i in range(len(slots))]
    fill = step_of(*((slot, 0, prompt) for slot, prompt in zip(slots, prompts, strict=True)))
    more = step_of(*((slot, len(prompt), [7 + slot]) for slot, prompt in zip(slots, prompts, strict=True)))
    fixed, fitting = decoder(slots=7, graphs=True), decoder(slots=7, graphs=False)
    for step in (fill, more):
        torch.testing.assert_close(fixed.forward(step), fitting.forward(step), atol=1e-5, rtol=0)


@pytest.mark.parametrize("slots", [[0, 2, 4], [6], [5, 6]], ids=str)
def test_rows_that_only_fill_up_write_to_no_slot(slots):
    several = decoder(slots=7, graphs=True)
    several.forward(step_of(*((slot, 0, TOKENS[:9]) for slot in range(7))))
    before = several._cache.keys[:, :7].clone(), several._cache.values[:, :7].clone()
    several.forward(step_of(*((slot, 9, [3]) for slot in slots)))
    for held, was in zip((several._cache.keys, several._cache.values), before, strict=True):
        changed = (held[:, :7] != was).any(0).flatten(2).any(-1)  # [slots, positions]
        assert changed.nonzero().tolist() == [[slot, 9] for slot in sorted(slots)]


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)
def test_a_row_that_turns_into_nan_harms_neither_neighbours_nor_who_has_its_slot_next(options):
    weights, poison = random_weights(LLAMA), 60
    weights.embedding[poison] = torch.nan
    several = TorchDecoder(LLAMA, weights, CPU, torch.float32, slots=3, length=160, **options)
    healthy = [token for token in TOKENS if token != poison]
    expected = several.forward(step_of((2, 0, healthy[:30]))).clone()
    found = several.forward(step_of((0, 0, [1, poison] * 30), (1, 0, healthy[:20])))
    assert found[1].isnan().all()
    torch.testing.assert_close(found[60:], expected[:20], atol=1e-5, rtol=0)
    several.forward(step_of((0, 60, [1]), (1, 20, healthy[20:21])))
    several.copy(1, [0], 20)
    found = several.forward(step_of((0, 20, healthy[20:21]), (1, 21, healthy[21:22])))
    torch.testing.assert_close(found, expected[20:22], atol=1e-5, rtol=0)
    several.forward(step_of((0, 0, [poison] * 30)))
    for at in range(3):
        found = several.forward(step_of((0, at, healthy[at : at + 1])))
        torch.testing.assert_close(found, expected[at : at + 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)
def test_the_logits_of_wanted_tokens_alone(options):
    several = decoder(**options)
    step = step_of((3, 0, TOKENS[:30]), (1, 0, TOKENS[:1]), (0, 0, TOKENS[:5]))
    whole = several.forward(step).clone()
    wanted = np.array([3, 29, 30, 35], np.int32)
    torch.testing.assert_close(several.forward(replace(step, wanted=wanted)), whole[wanted], atol=1e-5, rtol=0)
    nothing = np.empty(0, np.int32)
    assert several.forward(replace(step, wanted=nothing)).shape == (0, LLAMA.vocabulary)
    single = step_of((3, 30, [5]), (0, 5, [6]))
    assert several.forward(replace(single, wanted=nothing)).shape == (0, LLAMA.vocabulary)
    last = several.forward(single).clone()[1:]
    torch.testing.assert_close(several.forward(replace(single, wanted=np.array([1], np.int32))), last)


def test_whoever_samples_may_write_over_the_logits():
    several = decoder()
    logits = several.forward(step_of((0, 0, [1, 2])))
    logits += 1
    assert several.forward(step_of((1, 0, [1]))).mul_(2).isfinite().all()


def test_a_step_that_is_taken_again_gives_the_same():
    several = decoder()
    several.forward(step_of((0, 0, TOKENS[:30])))
    step = step_of((0, 30, TOKENS[30:40]), (1, 0, OTHER[:5]))
    assert torch.equal(several.forward(step).clone(), several.forward(step))


@pytest.mark.parametrize("end", [159, 160])
def test_the_last_positions_of_a_slot(end):
    several, longer = decoder(), decoder(length=200)
    tokens = [*TOKENS, *OTHER][:end]
    torch.testing.assert_close(
        several.forward(step_of((3, 0, tokens))), longer.forward(step_of((0, 0, tokens))), atol=1e-5, rtol=0
    )
    several.copy(3, [0], end)
    again = several.forward(step_of((3, end - 1, tokens[-1:]), (0, end - 1, tokens[-1:])))
    torch.testing.assert_close(again[0], again[1], atol=1e-5, rtol=0)


def test_another_number_of_slots_starts_empty():
    several = decoder(slots=2)
    expected = several.forward(step_of((1, 0, TOKENS))).clone()
    bytes_before = several.cache_bytes()
    several.resize(5)
    assert several.slots == 5
    assert several.cache_bytes() == bytes_before * 6 // 3  # with the spare slot
    assert torch.equal(several.forward(step_of((4, 0, TOKENS))), expected)


def test_close_lets_go_of_cache_and_weights_and_is_harmless_twice():
    several = decoder()
    several.close()
    several.close()
    assert not hasattr(several, "_cache")


def test_a_compiler_that_fails_is_told_with_its_words(monkeypatch):
    def compile(function):
        def fail(*arguments):
            raise RuntimeError("no C++ compiler found\nand a long story")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(
        UsageError, match=r"RuntimeError: no C\+\+ compiler found\. It needs.*leave out -B compile=true"
    ):
        decoder(compile=True)


def test_what_is_compiled_gives_what_is_not(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: torch._dynamo.optimize("eager")(function))
    check_compiled()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_what_torch_compiles_in_earnest_gives_what_is_not_compiled():
    check_compiled()


def test_experts_are_left_out_of_what_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: torch._dynamo.optimize("eager")(function))
    check_compiled(replace(LLAMA, **MIXTURES["experts in groups, by sigmoid"]))


def check_compiled(shape=LLAMA):
    steps = [
        step_of((0, 0, TOKENS[:40]), (1, 0, OTHER[:3])),
        step_of((0, 40, [5]), (1, 3, [6])),
        step_of((1, 4, [8])),
    ]
    compiled, plain = decoder(shape, compile=True), decoder(shape)
    for step in steps:
        torch.testing.assert_close(compiled.forward(step), plain.forward(step), atol=1e-5, rtol=0)
