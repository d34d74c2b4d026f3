"""How many slots and pages there are, and which decoder has them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from random_models import LLAMA, random_weights
from steps import COLUMNS, step_of

from gpuinfer.errors import UsageError
from gpuinfer.report.causes_text import MOST_SLOTS
from gpuinfer.text.checkpoint.memory_estimate import CPU_COPIED, CUDA_COPIED, Estimate, page_bytes, working
from gpuinfer.text.decoder import open_decoder, open_sized
from gpuinfer.text.decoder.open_decoder import NullDecoder, estimate, largest_step_bytes, largest_steps, open_and_try
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.transformer import Masking

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PLENTY = 1 << 40
MASKED = replace(LLAMA, masking=Masking(0))
NULL = replace(LLAMA, family="null", vocabulary=257, end_tokens=(256,))


def estimated(free, *, slots=None, pages=None, device=CPU, length=128, shape=LLAMA, **options):
    wanted = {"slots": slots, "pages": pages, "length": length, "step_tokens": 256, **options}
    return estimate(shape, torch.float32, device, free, **wanted)


@dataclass
class Opened:
    """As much of a checkpoint as a decoder asks for."""

    shape: object = LLAMA

    def weights(self, dtype, *, by_layer=False):
        return random_weights(self.shape, dtype)

    def weight_bytes(self, *_):
        return 0

    def estimate(self, slots, pages, length, dtype):
        return Estimate(weights_bytes=0, cache_bytes=0, peak_bytes=0)


def opened(dtype=torch.float32, shape=LLAMA, slots=3, pages=3 * COLUMNS):
    options = {"length": 64, "threads": 1, "deterministic": False, "compile": False, "graphs": True}
    return open_sized(Opened(shape), dtype, CPU, slots=slots, pages=pages, **options)


def decoder(shape=LLAMA, kind=TorchDecoder, slots=3, pages=3 * COLUMNS):
    return kind(shape, random_weights(shape), CPU, torch.float32, slots=slots, pages=pages, length=64)


@pytest.mark.parametrize(("device", "slots", "share"), [(CPU, 64, 0.5), (CUDA, 1024, 0.9)], ids=["CPU", "CUDA"])
def test_memory_bounds_the_pages_and_not_the_rows(device, slots, share):
    plenty = estimated(PLENTY, device=device, length=100)
    assert (plenty.slots, plenty.pages) == (slots, slots * 4)
    assert slots in MOST_SLOTS  # the verdict is reached without torch, so it has the numbers once more
    step = estimated(PLENTY, slots=20).working_bytes
    little = estimated(int((step + 37.5 * page_bytes(LLAMA, torch.float32)) / share), slots=20, device=device)
    assert (little.slots, little.pages) == (20, 37)
    assert little.estimated_bytes == step + little.cache_bytes <= little.free_bytes * share
    alone, together = (estimated(100 << 20, length=4096, sharing=count) for count in (1, 2))
    assert together.pages < 0.55 * alone.pages


def test_slots_that_would_take_the_pages_place_are_fewer():
    wide = replace(LLAMA, vocabulary=1 << 20)
    found = estimated(4 << 30, shape=wide, length=4096)
    assert 1 < found.slots < 64
    assert found.working_bytes < found.free_bytes / 4
    assert estimated(4 << 30, slots=64, shape=wide, length=4096).slots == 64, "who asks for them gets them"


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        (None, "4 pages of 32 tokens need .* only 0 MiB are free.* takes 4 pages.*shorter --context"),
        (1 << 20, "1,048,576 pages .* need 16,384 MiB .*fewer -B pages"),
    ],
    ids=["not even a row", "more than fit"],
)
def test_what_does_not_fit_is_refused_with_the_numbers(pages, said):
    with pytest.raises(UsageError, match=said):
        estimated(1000, slots=8, pages=pages)


def test_a_step_has_room_for_copies_of_keys_and_logits_and_no_more():
    few, many = (working(LLAMA, 2048, slots, 4096, torch.float32).total for slots in (100, 200))
    assert many - few == 100 * LLAMA.vocabulary * 4 * 6
    cpu, cuda = (
        working(LLAMA, 2048, 2000, 4096, torch.float32, copied=most).total for most in (CPU_COPIED, CUDA_COPIED)
    )
    assert cuda - cpu == 2 * 4 * (CUDA_COPIED - CPU_COPIED)
    large, logits = replace(MASKED, vocabulary=126_464), 4096 * 126_464 * 4  # a diffusion model's, of many positions
    assert logits < working(large, 512, 4, 4096, torch.float32).total < 2 * logits
    assert working(large, 512, 4, 64, torch.float32).total < logits // 3


def test_the_largest_steps_fill_every_slot_to_its_end():
    for step in largest_steps(LLAMA, 5, 7, 64, 40):
        assert (step.pages.shape, step.pages.max(), len(step.wanted)) == ((5, 2), 6, 5)
        assert (step.starts + step.lengths == 64).all()
        assert len(step.tokens) == step.lengths.sum()
    for most, tokens in ((40, [5, 40]), (3, [5])):
        assert [len(step.tokens) for step in largest_steps(LLAMA, 5, 10, 64, most)] == tokens


@pytest.mark.parametrize(("step_tokens", "canvases"), [(40, 1), (64, 1), (200, 3), (10_000, 5)])
def test_the_largest_step_of_a_diffusion_model_is_of_whole_canvases(step_tokens, canvases):
    (step,) = largest_steps(MASKED, 5, 10, 64, step_tokens)
    assert step.lengths.tolist() == [64] * canvases
    assert (step.sees == 64).all()
    assert len(step.wanted) == len(step.tokens) == 64 * canvases
    wide = replace(MASKED, vocabulary=2**21)
    assert len(largest_steps(wide, 5, 10, 48, step_tokens)[0].wanted) == min(64, 48 * max(1, step_tokens // 48))


@pytest.mark.parametrize("shape", [LLAMA, MASKED], ids=["causal", "masked"])
def test_trying_the_largest_step_leaves_nothing_behind(shape):
    tried, fresh, step = decoder(shape), decoder(shape), step_of((1, 0, [1, 2, 3]))
    assert largest_step_bytes(tried, 128) == tried.held_bytes() > tried.cache_bytes()
    assert not tried._cache.keys.any()
    assert torch.equal(tried.forward(step), fresh.forward(step))


class Small(TorchDecoder):
    """There is memory for ten pages."""

    def forward(self, step):
        if self.pages > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more.")
        return super().forward(step)


def test_when_memory_runs_out_there_are_fewer_pages_and_a_word(monkeypatch, caplog):
    one, found = open_and_try(decoder(kind=Small, slots=1, pages=1), estimated(PLENTY, slots=10, length=64), 32)
    assert (one.pages, found.pages, one.slots, found.slots) == (9, 9, 9, 9)  # pages: 20, 16, 12, 9
    assert found.measured_bytes == one.held_bytes()
    assert len(caplog.records) == 3
    assert "no room for 20 pages and steps of 10 rows (CUDA out of memory" in caplog.messages[0]
    assert "going on with 16 and 10. Set -B pages=16 to start there" in caplog.messages[0]
    monkeypatch.setattr(open_decoder, "largest_step_bytes", lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        open_and_try(one, found, step_tokens=32)


@pytest.mark.parametrize(
    ("kernels", "dtype", "name"),
    [
        (True, torch.float32, "CpuDecoder"),
        (True, torch.bfloat16, "CpuDecoder"),
        (True, torch.float16, "TorchDecoder"),
        (False, torch.float32, "TorchDecoder"),
    ],
)
def test_which_decoder_the_cpu_has(monkeypatch, kernels, dtype, name):
    if kernels and not open_decoder.kernels_for(torch.float32):
        pytest.skip("this processor has no FMA")
    if not kernels:
        monkeypatch.setattr(open_decoder, "kernels_for", lambda dtype: False)
    one, found = opened(dtype)
    with contextlib.closing(one):
        assert type(one).__name__ == name
        assert (one.slots, one.pages, one.length) == (found.slots, found.pages, 64) == (3, 3 * COLUMNS, 64)
        assert one.forward(step_of((2, 0, [1, 2, 3]))).shape == (3, LLAMA.vocabulary)


@pytest.mark.parametrize(("ends", "token"), [((256,), ord("a")), ((ord("a"), 0), 1)], ids=["a letter", "no end token"])
def test_the_null_model_computes_nothing_and_always_says_one_token_that_ends_nothing(ends, token):
    one, _ = opened(shape=replace(NULL, end_tokens=ends), slots=None, pages=None)
    with contextlib.closing(one):
        assert isinstance(one, NullDecoder)
        assert (one.slots, one.pages, one.cache_bytes()) == (1024, 2048, 0)
        one.copy_pages([0], [1])
        for _ in range(2):
            logits = one.forward(step_of((0, 0, [1, 2]), (1, 0, [3])))
            assert logits.dtype == torch.float32
            assert np.flatnonzero(logits.sum(0)).tolist() == [token]
            assert logits[:, token].tolist() == [1, 1, 1]
