"""The decoder in plain torch: how a step is divided, fixed shapes, number formats, pages that keep to themselves."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LLAMA, random_weights
from steps import COLUMNS, seeing, step_of, table_of

from gpuinfer.errors import UsageError
from gpuinfer.models.forward_cuda import bucket_for
from gpuinfer.text.decoder.attention_plan import ends_of, positions_of, sees_of, segments_of
from gpuinfer.text.decoder.torch_batch import back, parts_of, reach_buckets, row_buckets, rows_of, tiles
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.transformer import Masking, Step

CPU = torch.device("cpu")
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]
ROOM = 512
WAYS = pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)


def decoder(shape=LLAMA, dtype=torch.float32, slots=4, weights=None, **options):
    options = {"pages": slots * COLUMNS, "length": 160, **options}
    return TorchDecoder(shape, weights or random_weights(shape, dtype), CPU, dtype, slots=slots, **options)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15), (torch.float16, 0.03)])
def test_other_number_formats_stay_near_float32_and_whoever_samples_may_write_over_the_logits(dtype, near):
    step, some = step_of((0, 0, TOKENS)), decoder(dtype=dtype)
    wanted, found = decoder().forward(step), some.forward(step)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=near, rtol=0)
    found += 1
    assert some.forward(step).mul_(2).isfinite().all()


@pytest.mark.parametrize("slots", [[0], [3], [0, 1, 2], [6, 2, 4], [5, 6], [6, 5, 4, 3, 2, 1, 0]], ids=str)
def test_fixed_shapes_give_what_shapes_that_fit_give_and_fill_up_no_page_of_another(slots):
    prompts = [TOKENS[i : i + 20 + 9 * i] for i in range(len(slots))]
    fixed, fitting = decoder(slots=7, graphs=True), decoder(slots=7, graphs=False)
    for one in (fixed, fitting):
        one.forward(step_of(*((slot, 0, OTHER[:9]) for slot in range(7))))
    held, count = (fixed._cache.keys, fixed._cache.values), fixed.pages
    more = step_of(*((slot, len(prompt), [7 + slot]) for slot, prompt in zip(slots, prompts, strict=True)))
    for step in (step_of(*((slot, 0, prompt) for slot, prompt in zip(slots, prompts, strict=True))), more):
        before = [one[:, :count].clone() for one in held]
        torch.testing.assert_close(fixed.forward(step), fitting.forward(step), atol=1e-5, rtol=0)
    wanted = sorted(
        [slot * COLUMNS + len(prompt) // 32, len(prompt) % 32] for slot, prompt in zip(slots, prompts, strict=True)
    )
    for one, was in zip(held, before, strict=True):
        changed = (one[:, :count] != was).any(0).flatten(2).any(-1)  # [pages, positions]
        assert changed.nonzero().tolist() == wanted
        assert not one[:, fixed._cache.blank].any()


@WAYS
def test_entries_behind_what_a_step_brings_are_not_looked_at(options):
    weights, poison = random_weights(LLAMA), 60
    weights.embedding[poison] = torch.nan
    several = decoder(weights=weights, slots=2, **options)
    several.forward(step_of((1, 0, [poison] * 150)))
    step = step_of((0, 0, [1, 2, 3]))
    expected, pages = several.forward(step).clone(), step.pages.copy()
    pages[0, 1:] = 8 + np.arange(7)
    for table in (pages, pages[:, :1].copy()):
        assert torch.equal(several.forward(replace(step, pages=table)), expected)


def test_the_cache_takes_memory_where_it_is_written():
    resident = Path("/proc/self/statm")
    if not resident.exists():
        pytest.skip("this system does not say what is resident")
    before = int(resident.read_text().split()[1])
    with contextlib.closing(decoder(slots=64, pages=1 << 16)) as several:  # 512 MiB
        assert several.cache_bytes() > 500 << 20
        several.forward(step_of((0, 0, TOKENS)))
        assert (int(resident.read_text().split()[1]) - before) * mmap.PAGESIZE < 100 << 20


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way", ["traced", pytest.param("compiled", marks=[pytest.mark.soak, pytest.mark.filterwarnings("ignore")])]
)
def test_what_torch_compiles_gives_what_is_not_compiled(monkeypatch, way):
    if way == "traced":
        monkeypatch.setattr(torch, "compile", lambda function, mode: torch._dynamo.optimize("eager")(function))
    compiled, plain = decoder(compile=True), decoder()
    first = step_of((0, 0, TOKENS[:40]), (1, 0, OTHER[:3]))
    for step in (first, step_of((0, 40, [5]), (1, 3, [6])), step_of((1, 4, [8]))):
        torch.testing.assert_close(compiled.forward(step), plain.forward(step), atol=1e-5, rtol=0)


def test_a_compiler_that_fails_is_named_with_its_words(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no C++ compiler found\nand a long story")

    monkeypatch.setattr(torch, "compile", lambda function, mode: fail)
    said = r"RuntimeError: no C\+\+ compiler found\. It needs.*leave out -B compile"
    with pytest.raises(UsageError, match=said):
        decoder(compile=True)


@pytest.mark.parametrize(
    ("lengths", "width"),
    [((32, 32, 32), 32), ((4, 4, 4, 4, 3), 4), ((20, 17), 32), ((64,) * 3, 64), ((65,) * 3, None), ((64, 1, 1), None)],
    ids=str,
)
def test_short_runs_of_about_the_same_length_are_padded_to_a_fixed_shape(lengths, width):
    one = decoder(replace(LLAMA, masking=Masking(0)), slots=5, graphs=True)
    step = seeing(*((slot, 0, TOKENS[:length], [length] * length) for slot, length in enumerate(lengths)))
    found = one._static.form_of_runs(step)
    assert (found and found.width) == width


@pytest.mark.thorough
@pytest.mark.parametrize("sharing", [1, 2, 4])
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_runs_in_fixed_shapes_are_those_in_shapes_that_fit(sharing, data):
    """What a diffusion model with a cache computes: blocks of canvases, of any lengths, in any slots."""
    shape = replace(LLAMA, kv_heads=4 // sharing, masking=Masking(0))
    fixed, fitting = (decoder(shape, slots=5, graphs=graphs) for graphs in (True, False))
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=5, max_size=5))
    for some in (fixed, fitting):
        some.forward(seeing(*((slot, 0, TOKENS[:length], [length] * length) for slot, length in enumerate(lengths))))
    for _ in range(3):
        runs = []
        for slot in data.draw(st.lists(st.integers(0, 4), min_size=1, unique=True)):
            start = data.draw(st.integers(0, lengths[slot] - 1))
            size = data.draw(st.sampled_from([1, 4, 30, 64, 65]))
            tokens = OTHER[start : min(start + size, lengths[slot])]
            runs.append((slot, start, tokens, [lengths[slot]] * len(tokens)))
        step = seeing(*runs)
        torch.testing.assert_close(fixed.forward(step), fitting.forward(step), atol=1e-5, rtol=0)


@st.composite
def steps(draw, seeing=False):
    """Steps that say what is seen, or do not; each segment's tokens see alike, or as they please."""
    runs = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=12))
    starts, lengths = (np.array(part, np.int32) for part in zip(*runs, strict=True))
    tokens = np.arange(int(lengths.sum()), dtype=np.int32)
    step = Step(tokens, table_of(range(len(runs)), 16), starts, lengths, tokens[:0])
    if not seeing or draw(st.booleans()):
        return step
    sees, seen = [], st.integers(1, ROOM)
    for length in lengths.tolist():
        alike = draw(st.booleans())
        sees += [draw(seen)] * length if alike else draw(st.lists(seen, min_size=length, max_size=length))
    return replace(step, sees=np.array(sees, np.int32))


@given(steps(seeing=True))
def test_each_segment_is_in_one_group_that_holds_it_and_a_row_finds_its_own_among_what_they_give(step):
    parts = list(parts_of(step, ROOM))
    ends, segments = ends_of(step), segments_of(step)
    for part in parts:
        assert (step.lengths[part.segments] <= part.width).all()
        assert (ends[part.segments] <= part.reach).all()
        assert part.reach <= ROOM
        if part.order == "causal":
            assert part.width > 1
            assert (step.starts[part.segments] == 0).all()
        elif part.order == "whole":
            assert (sees_of(step)[np.isin(segments, part.segments)] == part.reach).all()
    assert sorted(segment for part in parts for segment in part.segments.tolist()) == list(range(len(step.lengths)))
    rows = [rows_of(step, part) for part in parts]
    given_back = np.concatenate([asking.ravel() for asking in rows])
    assert (given_back[back(step, parts, rows)] == np.arange(len(step.tokens))).all()


@given(st.integers(1, 1024), st.data())
def test_a_decode_step_is_padded_to_a_little_more(most, data):
    rows, buckets = data.draw(st.integers(1, most)), row_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    padded = bucket_for(rows, buckets)
    assert padded <= max(2 * rows - 1, 1)
    assert rows < 16 or padded <= 1.5 * rows + 1


@given(steps(), st.integers(1, 20))
def test_tiles_hold_each_token_once_after_those_before_it(step, size):
    positions, segments = positions_of(step), segments_of(step)
    reaches, done = reach_buckets(ROOM), step.starts.copy()
    for members, reach in tiles(positions + 1, size, reaches):
        assert len(members) <= size
        for token in members:
            assert positions[token] == done[segments[token]]
            assert reach == bucket_for(int(positions[token]) + 1, reaches)
            done[segments[token]] += 1
    assert (done == step.starts + step.lengths).all()
