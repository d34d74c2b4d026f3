"""The decoder in plain torch: fixed shapes, the same bits in any company, slots that keep to themselves."""

from __future__ import annotations

import itertools
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LLAMA, VARIANTS, random_weights
from steps import COLUMNS, copy_row, scattered, step_of

from gpuinfer.errors import UsageError
from gpuinfer.text.decoder.torch_decoder import TorchDecoder

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOATS = [pytest.param(replace(LLAMA, **changes), torch.float32, id=name) for name, changes in VARIANTS.items()]
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]


def decoder(shape=LLAMA, dtype=torch.float32, slots=4, length=160, **options):
    options = {"pages": slots * COLUMNS, "length": length, **options}
    return TorchDecoder(shape, random_weights(shape, dtype), CPU, dtype, slots=slots, **options)


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
@given(
    cuts=st.lists(st.integers(1, 149), max_size=6, unique=True),
    slot=st.integers(0, 3),
    company=st.integers(0, 30),
    order=st.permutations(range(4 * COLUMNS)),
)
def test_any_chunks_any_pages_and_any_company_give_the_same_bits(bits, cuts, slot, company, order):
    several = decoder(deterministic=True)
    edges, found = [0, *sorted(cuts), len(TOKENS)], []
    for begin, end in itertools.pairwise(edges):
        others = [((slot + 1) % 4, 0, OTHER[:company])] if company else []
        step = scattered(step_of(*others, (slot, begin, TOKENS[begin:end])), order)
        found.append(several.forward(step)[company:].clone())
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
def test_rows_that_only_fill_up_write_to_no_page_of_another(slots):
    several = decoder(slots=7, graphs=True)
    several.forward(step_of(*((slot, 0, TOKENS[:9]) for slot in range(7))))
    count = several.pages
    before = several._cache.keys[:, :count].clone(), several._cache.values[:, :count].clone()
    several.forward(step_of(*((slot, 9, [3]) for slot in slots)))
    for held, was in zip((several._cache.keys, several._cache.values), before, strict=True):
        changed = (held[:, :count] != was).any(0).flatten(2).any(-1)  # [pages, positions]
        assert changed.nonzero().tolist() == [[slot * COLUMNS, 9] for slot in sorted(slots)]
        assert not held[:, several._cache.blank].any()


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)
def test_a_row_that_turns_into_nan_harms_neither_neighbours_nor_who_has_its_pages_next(options):
    weights, poison = random_weights(LLAMA), 60
    weights.embedding[poison] = torch.nan
    several = TorchDecoder(LLAMA, weights, CPU, torch.float32, slots=3, pages=3 * COLUMNS, length=160, **options)
    healthy = [token for token in TOKENS if token != poison]
    expected = several.forward(step_of((2, 0, healthy[:30]))).clone()
    found = several.forward(step_of((0, 0, [1, poison] * 30), (1, 0, healthy[:20])))
    assert found[1].isnan().all()
    torch.testing.assert_close(found[60:], expected[:20], atol=1e-5, rtol=0)
    several.forward(step_of((0, 60, [1]), (1, 20, healthy[20:21])))
    copy_row(several, 1, [0])
    found = several.forward(step_of((0, 20, healthy[20:21]), (1, 21, healthy[21:22])))
    torch.testing.assert_close(found, expected[20:22], atol=1e-5, rtol=0)
    several.forward(step_of((0, 0, [poison] * 30)))
    copy_row(several, 0, [2])
    for at in range(3):
        found = several.forward(step_of((2, at, healthy[at : at + 1]), (1, 0, [poison])))
        torch.testing.assert_close(found[:1], expected[at : at + 1], atol=1e-5, rtol=0)
    for at in range(3):
        found = several.forward(step_of((0, at, healthy[at : at + 1])))
        torch.testing.assert_close(found, expected[at : at + 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)
def test_entries_behind_what_a_step_brings_are_not_looked_at(options):
    weights, poison = random_weights(LLAMA), 60
    weights.embedding[poison] = torch.nan
    several = TorchDecoder(LLAMA, weights, CPU, torch.float32, slots=2, pages=16, length=160, **options)
    several.forward(step_of((1, 0, [poison] * 150)))
    step = step_of((0, 0, [1, 2, 3]))
    expected = several.forward(step).clone()
    pages = step.pages.copy()
    pages[0, 1:] = 8 + np.arange(7)
    assert torch.equal(several.forward(replace(step, pages=pages)), expected)
    assert torch.equal(several.forward(replace(step, pages=pages[:, :1].copy())), expected)


def test_the_cache_takes_memory_where_it_is_written():
    resident = Path("/proc/self/statm")
    if not resident.exists():
        pytest.skip("this system does not say what is resident")
    before = int(resident.read_text().split()[1])
    several = decoder(slots=64, pages=1 << 16)  # 512 MiB
    assert several.cache_bytes() > 500 << 20
    several.forward(step_of((0, 0, TOKENS)))
    assert (int(resident.read_text().split()[1]) - before) * mmap.PAGESIZE < 100 << 20
    several.close()


def test_whoever_samples_may_write_over_the_logits():
    several = decoder()
    logits = several.forward(step_of((0, 0, [1, 2])))
    logits += 1
    assert several.forward(step_of((1, 0, [1]))).mul_(2).isfinite().all()


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


def check_compiled(shape=LLAMA):
    steps = [
        step_of((0, 0, TOKENS[:40]), (1, 0, OTHER[:3])),
        step_of((0, 40, [5]), (1, 3, [6])),
        step_of((1, 4, [8])),
    ]
    compiled, plain = decoder(shape, compile=True), decoder(shape)
    for step in steps:
        torch.testing.assert_close(compiled.forward(step), plain.forward(step), atol=1e-5, rtol=0)
