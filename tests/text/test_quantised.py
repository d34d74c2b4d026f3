"""Weights of 8 and 4 bits: products exact within groups, decoders the same in any company, what is refused."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapters.random_adapters import random_adapter
from decoders import DECODERS
from random_models import LLAMA, MIXTURES, VARIANTS, random_weights
from steps import step_of
from text.tiny import tiny_checkpoint
from text.tiny_diffusion import tiny_diffusion
from torch.nn import functional as F

from gpuinfer.models.kernel_cache import compiler
from gpuinfer.text.decoder import cpu_quantised, torch_layers
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder, cpu_available
from gpuinfer.text.decoder.cpu_math import SOURCES
from gpuinfer.text.decoder.cpu_quantised import (
    product_kinds,
    quantised_panel_bytes,
    quantised_product,
    row_kind,
    row_length,
)
from gpuinfer.text.decoder.cpu_rounding import quantised_panels, weight_of_quantised
from gpuinfer.text.decoder.rounding import GROUP, HALF, HEAD_BITS
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.transformer import Linear

kernels = pytest.mark.skipif(not cpu_available(torch.float32), reason="this processor has no FMA")
each_width = pytest.mark.parametrize("bits", [8, 4])
SIZES = [(1, 1), (16, 64), (37, 45), (200, 300), (130, 640), (33, 1000)]
DTYPES = {"bytes": np.int8, "floats": np.float32}
UNTOUCHED = 7.0


def drawn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@compiler(SOURCES, _nrt=False)
def all_rows(source, inner, out):
    for row in range(len(source)):
        cpu_quantised.quantise_row(source[row], inner, out[row])


def rows_of(values, kind):
    """Rows as a kind of product takes them."""
    out = np.zeros((len(values), row_length(values.shape[1], row_kind(kind))), DTYPES[row_kind(kind)])
    all_rows(values.numpy(), values.shape[1], out)
    return out


def rounded(values):
    """Rows as products take them, in torch."""
    inner = values.shape[-1]
    groups = F.pad(values.float(), (0, -inner % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scaled = groups * torch.where(largest > 0, 127 / largest, 0)
    return ((scaled.abs() + 0.5).floor() * scaled.sign() * (largest / 127)).flatten(-2)[..., :inner]


def product(kind, bits, rows, columns, inner, panels, start=0):
    found = np.full((len(rows), columns + 3), UNTOUCHED, np.float32)
    weight = panels.ctypes.data + start * quantised_panel_bytes(inner, bits)
    sizes = (len(rows), columns, inner)
    function = quantised_product(bits, kind).ctypes
    function(*sizes, rows.ctypes.data, rows.shape[1], weight, found.ctypes.data, columns + 3)
    assert (found[:, columns:] == UNTOUCHED).all()
    return found[:, :columns]


@each_width
@pytest.mark.parametrize(("columns", "inner"), SIZES)
def test_panels_hold_what_the_rounded_weight_is(columns, inner, bits):
    weight = drawn(columns, inner)
    again = weight_of_quantised(quantised_panels(weight, bits), columns, inner, bits)
    size = GROUP if bits == 8 else HALF
    grouped = F.pad(weight, (0, -inner % size)).unflatten(-1, (-1, size))
    if bits == 8:
        step = grouped.abs().amax(-1, keepdim=True) / 127
    else:
        step = (grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)) / 15
    off = F.pad((again - weight).abs(), (0, -inner % size)).unflatten(-1, (-1, size))
    assert (off <= step * (0.501 if bits == 8 else 0.6) + 1e-3 * (bits == 4)).all()


@kernels
@each_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rounding_gives_the_very_numbers_of_torch(dtype, bits):
    weights = [drawn(37, 145), drawn(3, 32).abs() + 3, drawn(200, 64) * 1e-20, torch.zeros(5, 70)]
    for weight in (one.to(dtype) for one in weights):
        expected = torch_layers.quantised_linear(weight, None, bits).dequantised(torch.float32)
        assert torch.equal(weight_of_quantised(quantised_panels(weight, bits), *weight.shape, bits), expected)


@kernels
@each_width
def test_a_weight_that_is_not_finite_gives_nan_in_its_group_alone(bits):
    weight = drawn(20, 130)
    weight[1, 7], weight[2, 129], weight[3, 64] = math.nan, math.inf, -math.inf
    again = weight_of_quantised(quantised_panels(weight, bits), 20, 130, bits)
    assert not again[1, 7].isfinite()
    assert not again[2, 129].isfinite()
    assert not again[3, 64].isfinite()
    assert again[0].isfinite().all()
    assert again[4:].isfinite().all()
    assert again[1:4, 32:64].isfinite().all() if bits == 4 else again[2:4, :64].isfinite().all()


@kernels
@each_width
@pytest.mark.parametrize(("columns", "inner"), SIZES)
def test_a_product_is_that_of_the_rounded_numbers_with_the_same_bits_in_any_company_and_kind(columns, inner, bits):
    values, weight = drawn(40, inner, seed=1), drawn(columns, inner)
    panels = quantised_panels(weight, bits)
    exact = rounded(values).double() @ weight_of_quantised(panels, columns, inner, bits).double().T
    whole = None
    for kind in product_kinds(bits):
        rows = rows_of(values, kind)
        found = product(kind, bits, rows, columns, inner, panels)
        np.testing.assert_allclose(found, exact.numpy(), rtol=0, atol=2e-6 * inner)
        whole = found if whole is None else whole
        assert np.array_equal(found, whole), "another kind of product has other bits"
        for count in (1, 2, 3, 5, 8, 13, 31, 32, 33):
            assert np.array_equal(product(kind, bits, rows[-count:], columns, inner, panels), whole[-count:])
        if columns > 16:
            assert np.array_equal(product(kind, bits, rows, columns - 16, inner, panels, 1), whole[:, 16:])


@kernels
@pytest.mark.parametrize("kind", product_kinds(8))
def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others_alone(kind):
    values, weight = drawn(4, 130, seed=1), drawn(20, 130)
    panels = quantised_panels(weight, 8)
    before = product(kind, 8, rows_of(values, kind), 20, 130, panels)
    values[1, 7], values[2, 129] = math.nan, math.inf
    values[3] = 0
    after = product(kind, 8, rows_of(values, kind), 20, 130, panels)
    assert np.array_equal(after[0], before[0])
    assert np.isnan(after[1:3]).all()
    assert (after[3] == 0).all()


WIDER = replace(LLAMA, hidden=80, intermediate=150)
SHAPES = {name: replace(WIDER, **changes) for name, changes in VARIANTS.items()}
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 40)]


def of_rounded(weights, bits):
    """The same weights, with what their matrices are rounded to."""

    def linear(given, bits=bits):
        out, inner = given.weight.shape
        again = weight_of_quantised(quantised_panels(given.weight, bits), out, inner, bits)
        return Linear(again.to(given.weight.dtype), given.bias)

    names = ("qkv", "out", "up", "down")
    layers = tuple(
        replace(layer, **{name: linear(getattr(layer, name)) for name in names if len(getattr(layer, name).weight)})
        for layer in weights.layers
    )
    head = linear(weights.head, HEAD_BITS)
    tied = weights.head.weight.data_ptr() == weights.embedding.data_ptr()
    return replace(weights, layers=layers, head=head, embedding=head.weight if tied else weights.embedding)


def quantised(shape, weights, bits, threads=1, slots=4, **options):
    given = {"slots": slots, "pages": 8 * slots, "length": 160, "threads": threads, "bits": bits, **options}
    return contextlib.closing(CpuDecoder(shape, weights, torch.float32, **given))


def in_torch(shape, weights, **options):
    given = {"slots": 4, "pages": 32, "length": 160, "graphs": False, **options}
    return contextlib.closing(TorchDecoder(shape, weights, torch.device("cpu"), torch.float32, **given))


@kernels
@each_width
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_decoder_computes_what_torch_does_with_rounded_rows_and_weights(shape, bits, monkeypatch):
    weights = random_weights(SHAPES[shape])
    step = step_of((0, 0, TOKENS[:20]), (2, 0, TOKENS[5:9]))
    with quantised(SHAPES[shape], weights, bits) as one:
        found = one.forward(step).clone()
        assert one.computes_in == "int8"
    monkeypatch.setattr(torch_layers, "projected", lambda x, one: F.linear(rounded(x), one.weight, one.bias))
    with in_torch(SHAPES[shape], of_rounded(weights, bits)) as other:
        # A value on the border between two whole numbers may fall to either side. Logits go to 20.
        assert (found - other.forward(step)).abs().median() < 1e-3
        assert (found - other.forward(step)).abs().max() < 0.2


@kernels
@each_width
@pytest.mark.parametrize("shape", [*MIXTURES, "plain", "tied"])
def test_quantised_rows_have_the_same_bits_in_any_company_and_chunks_and_are_close_to_float32(shape, bits):
    one_shape = replace(WIDER, **(VARIANTS | MIXTURES)[shape])
    weights = random_weights(one_shape)
    with quantised(one_shape, weights, bits, slots=1) as alone:
        expected = torch.cat([alone.forward(step_of((0, at, [token]))).clone() for at, token in enumerate(TOKENS)])
    with quantised(one_shape, weights, bits, threads=2) as several:
        first = several.forward(step_of((0, 0, TOKENS[::-1][:7]), (2, 0, TOKENS[:30]))).clone()
        rest = several.forward(step_of((2, 30, TOKENS[30:]), (1, 0, TOKENS[3:5]))).clone()
    assert torch.equal(first[7:], expected[:30])
    assert torch.equal(rest[:10], expected[30:])
    with contextlib.closing(DECODERS["kernels"](one_shape, weights, torch.float32, slots=4, length=160)) as plain:
        exact = plain.forward(step_of((0, 0, TOKENS))).clone()
    off = (expected - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    # Other experts may be chosen where two are about as good.
    assert off < (0.3 if bits == 4 or shape in MIXTURES else 0.08)


@kernels
def test_weights_that_come_later_are_rounded_too():
    first, later = random_weights(WIDER), random_weights(WIDER, seed=1)
    step = step_of((0, 0, TOKENS[:9]))
    with quantised(WIDER, later, 8) as opened, quantised(WIDER, first, 8) as updated:
        expected = opened.forward(step).clone()
        assert not torch.equal(updated.forward(step), expected)
        updated.swap(updated.pack(later))
        updated.empty()
        assert torch.equal(updated.forward(step), expected)


@kernels
def test_an_adapter_adds_to_its_rows_alone():
    weights = random_weights(WIDER)
    steps = [step_of((0, 0, TOKENS[:9])), step_of((0, 0, TOKENS[:9]), (1, 0, TOKENS[:9]))]
    with quantised(WIDER, weights, 8) as one:
        plain = one.forward(steps[0]).clone()
        one.empty()
        one.load(1, one.pack_adapter(random_adapter(WIDER)))
        both = one.forward(replace(steps[1], adapters=np.array([0, 1], np.int32))).clone()
    assert torch.equal(both[:9], plain)
    assert (both[9:] - plain).abs().max() > 0.01


@each_width
def test_torch_multiplies_with_the_rounded_weights(bits):
    weights, step = random_weights(WIDER), step_of((0, 0, TOKENS[:20]))
    with in_torch(WIDER, weights, bits=bits) as one, in_torch(WIDER, of_rounded(weights, bits)) as other:
        found, expected = one.forward(step).clone(), other.forward(step)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        one.swap(one.pack(random_weights(WIDER, seed=1)))
        one.empty()
        assert not torch.allclose(one.forward(step), found, atol=0.1)


GENERATE = ("generate", "--prompt", "Hi", "--output", "answers.jsonl", "--max-new-tokens", "2", "--quiet")
REFUSED = {
    "no such format": ((*GENERATE, "-B", "weights=int3"), "weights"),
    "a model that is cut": ((*GENERATE, "-B", "weights=int8", "-B", "parallel=pipeline"), "Leave one of them out"),
    "an option without a text": (("verify", "-B", "weights=int8"), "Add --perplexity FILE"),
    "no such text": (("verify", "--perplexity", "nowhere.txt"), "Give a text file that exists"),
    "no text": (("verify", "--perplexity", "bytes.txt"), "is not UTF-8"),
    "a text too short": (("verify", "--perplexity", "short.txt"), "Give a longer text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_cure(case, gpuinfer, empty_folder):
    words, cure = REFUSED[case]
    (empty_folder / "short.txt").write_text("a")
    (empty_folder / "bytes.txt").write_bytes(b"\xff\xfe\xfd")
    code, out, err = gpuinfer(words[0], "--model", str(tiny_checkpoint("llama")), *words[1:], "--device", "cpu")
    assert code == 2, out + err
    assert cure in " ".join(err.split())


def test_a_diffusion_model_has_no_perplexity(gpuinfer, tmp_path):
    (tmp_path / "text.txt").write_text("The sea was calm.")
    words = ("--perplexity", str(tmp_path / "text.txt"))
    code, _, err = gpuinfer("verify", "--model", str(tiny_diffusion("llada")), *words)
    assert code == 2
    assert "left to right" in " ".join(err.split())


def test_perplexity_is_that_of_transformers_and_its_change_is_told(gpuinfer, tmp_path):
    import transformers

    text, report, folder = tmp_path / "text.txt", tmp_path / "report.json", tiny_checkpoint("qwen2")
    text.write_text("The sea was calm and the wind had gone. " * 3)
    words = ("--model", str(folder), "--perplexity", str(text), "--json", str(report), "--device", "cpu", "--quiet")
    code, out, err = gpuinfer("verify", *words, "-B", "weights=int8", "-B", "context=16")
    assert code == 0, out + err
    found = json.loads(report.read_text())["perplexity"]
    before, after = found["measured"]
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text.read_text()).input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs, done = [], 1
    while done < len(tokens):  # windows of 16 tokens, 8 further each
        begin = max(0, (done - 8) // 8 * 8) if done > 1 else 0
        window = tokens[begin : begin + 16]
        with torch.no_grad():
            rows = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        logprobs += [rows[at - 1, window[at]].item() for at in range(done - begin, len(window))]
        done = begin + len(window)
    assert found["scored"] == len(logprobs) == len(tokens) - 1
    assert before["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), rel=1e-4)
    assert (before["weights"], after["weights"]) == ("float32", "int8")
    assert after["weights_bytes"] < before["weights_bytes"]
    assert after["perplexity"] != before["perplexity"]
    assert found["change_percent"] == pytest.approx(100 * (after["perplexity"] / before["perplexity"] - 1))
    assert "weights=int8" in out


def test_an_output_is_not_gone_on_with_by_other_weights(gpuinfer, empty_folder):
    words = ("generate", "--model", "tiny", "--prompt", "a", "--max-new-tokens", "1", "--no-roofline", "--output", "o")
    assert gpuinfer(*words)[0] == 0
    code, _, errors = gpuinfer(*words, "--resume", "-B", "weights=int8")
    assert code == 2
    said = 'made with other settings (computes_in: "float32" there, "float32 weights=int8" here)'
    assert said in " ".join(errors.split())
