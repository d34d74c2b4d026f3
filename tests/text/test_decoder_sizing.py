"""How many slots and pages there are, and which decoder has them."""

from __future__ import annotations

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
PAGE_BYTES = page_bytes(LLAMA, torch.float32)
PLENTY = 1 << 40


def estimated(free, *, slots=None, pages=None, device=CPU, length=128, shape=LLAMA, **options):
    wanted = {"slots": slots, "pages": pages, "length": length, "step_tokens": 256, **options}
    return estimate(shape, torch.float32, device, free, **wanted)


@dataclass
class Opened:
    """As much of a checkpoint as a decoder asks for."""

    shape: object = LLAMA

    def weights(self, dtype, *, by_layer=False):
        return random_weights(self.shape, dtype)

    def estimate(self, slots, pages, length, dtype):
        return Estimate(weights_bytes=0, cache_bytes=0, peak_bytes=0)


def opened(dtype=torch.float32, shape=LLAMA, slots=3, pages=3 * COLUMNS, **changes):
    options = {"length": 64, "threads": 1, "deterministic": False, "compile": False, "graphs": True, **changes}
    return open_sized(Opened(shape), dtype, CPU, slots=slots, pages=pages, **options)


@pytest.mark.parametrize(
    ("device", "slots"),
    [pytest.param(CPU, 64, id="64 on the CPU"), pytest.param(CUDA, 1024, id="1024 on CUDA")],
)
def test_with_plenty_of_memory_there_are_as_many_slots_as_are_worth_while_and_pages_for_all(device, slots):
    found = estimated(PLENTY, device=device, length=100)
    assert (found.slots, found.pages) == (slots, slots * 4)


def test_the_verdict_knows_how_many_slots_a_device_has_by_itself():
    """It is reached without torch, so it has the numbers once more."""
    assert MOST_SLOTS == (open_decoder.CPU_SLOTS, open_decoder.CUDA_SLOTS)


@pytest.mark.parametrize(("device", "share"), [(CPU, 0.5), (CUDA, 0.9)])
def test_little_memory_bounds_the_pages_and_not_the_rows(device, share):
    step = estimated(PLENTY, slots=20).working_bytes
    found = estimated(int((step + 37.5 * PAGE_BYTES) / share), slots=20, device=device)
    assert (found.slots, found.pages) == (20, 37)
    assert found.estimated_bytes == step + 37 * PAGE_BYTES <= found.free_bytes * share


def test_models_that_find_the_same_memory_free_share_it():
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
        pytest.param(
            None, "4 pages of 32 tokens need .* only 0 MiB are free.* takes 4 pages.*shorter --context", id="row"
        ),
        pytest.param(1 << 20, "1,048,576 pages .* need 16,384 MiB .*fewer -B pages", id="more than fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(pages, said):
    with pytest.raises(UsageError, match=said):
        estimated(1000, slots=8, pages=pages)


def test_torch_copies_keys_of_so_many_positions_at_once_and_no_more():
    few, many = (working(LLAMA, 2048, slots, 4096, torch.float32).total for slots in (100, 200))
    logits = 100 * LLAMA.vocabulary * 4 * 6
    assert many - few == logits
    cuda = working(LLAMA, 2048, 2000, 4096, torch.float32, copied=CUDA_COPIED).total
    assert cuda - working(LLAMA, 2048, 2000, 4096, torch.float32).total == 2 * 4 * (CUDA_COPIED - CPU_COPIED)


def test_the_largest_steps_fill_every_slot_to_its_end():
    for step in largest_steps(LLAMA, 5, 7, 64, 40):
        assert step.pages.shape == (5, 2)
        assert step.pages.max() == 6
        assert (step.starts + step.lengths == 64).all()
        assert len(step.tokens) == step.lengths.sum()
        assert len(step.wanted) == 5
    assert [len(step.tokens) for step in largest_steps(LLAMA, 5, 10, 64, 40)] == [5, 40]
    assert [len(step.tokens) for step in largest_steps(LLAMA, 5, 10, 64, 3)] == [5]


MASKED = replace(LLAMA, masking=Masking(0))


@pytest.mark.parametrize(("step_tokens", "canvases"), [(40, 1), (64, 1), (200, 3), (10_000, 5)])
def test_the_largest_step_of_a_diffusion_model_is_of_whole_canvases(step_tokens, canvases):
    (step,) = largest_steps(MASKED, 5, 10, 64, step_tokens)
    assert step.lengths.tolist() == [64] * canvases
    assert (step.sees == 64).all()
    assert len(step.wanted) == len(step.tokens) == 64 * canvases
    wide = replace(MASKED, vocabulary=2**21)
    assert len(largest_steps(wide, 5, 10, 48, step_tokens)[0].wanted) == min(64, 48 * max(1, step_tokens // 48))


def test_a_step_of_a_diffusion_model_has_room_for_the_logits_of_many_positions():
    large = replace(MASKED, vocabulary=126_464)
    logits = 4096 * 126_464 * 4
    assert logits < working(large, 512, 4, 4096, torch.float32).total < 2 * logits
    assert working(large, 512, 4, 64, torch.float32).total < logits // 3
    decoder = TorchDecoder(MASKED, random_weights(MASKED), CPU, torch.float32, slots=3, pages=3 * COLUMNS, length=64)
    assert largest_step_bytes(decoder, 128) == decoder.held_bytes()
    assert not decoder._cache.keys.any()


def test_trying_the_largest_step_leaves_nothing_behind():
    tried, fresh = (
        TorchDecoder(LLAMA, random_weights(LLAMA), CPU, torch.float32, slots=3, pages=3 * COLUMNS, length=64)
        for _ in range(2)
    )
    assert largest_step_bytes(tried, 32) == tried.held_bytes() > tried.cache_bytes()
    assert not tried._cache.keys.any()
    step = step_of((1, 0, [1, 2, 3]))
    assert torch.equal(tried.forward(step), fresh.forward(step))


class Small(TorchDecoder):
    """There is memory for so many pages."""

    room = 10

    def forward(self, step):
        if self.pages > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more.")
        return super().forward(step)


def small(slots=10):
    decoder = Small(LLAMA, random_weights(LLAMA), CPU, torch.float32, slots=1, pages=1, length=64)
    return decoder, estimated(PLENTY, slots=slots, length=64)


def test_when_memory_runs_out_there_are_fewer_pages_and_a_word(caplog):
    decoder, found = open_and_try(*small(), step_tokens=32)
    assert decoder.pages == found.pages == 9  # 20, 16, 12, 9
    assert decoder.slots == found.slots == 9
    assert found.measured_bytes == decoder.held_bytes()
    assert len(caplog.records) == 3
    assert "no room for 20 pages and steps of 10 rows (CUDA out of memory" in caplog.messages[0]
    assert "going on with 16 and 10. Set -B pages=16 to start there" in caplog.messages[0]


def test_another_failure_is_not_mistaken_for_a_lack_of_memory(monkeypatch):
    decoder, found = small(3)
    monkeypatch.setattr(open_decoder, "largest_step_bytes", lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        open_and_try(decoder, found, step_tokens=32)


@pytest.mark.parametrize(
    ("kernels", "options", "name"),
    [
        pytest.param(True, {}, "CpuDecoder", id="our kernels where they run"),
        pytest.param(True, {"dtype": torch.bfloat16}, "CpuDecoder", id="in bfloat16 too"),
        pytest.param(False, {}, "TorchDecoder", id="else torch"),
        pytest.param(True, {"dtype": torch.float16}, "TorchDecoder", id="torch for float16"),
    ],
)
def test_which_decoder_the_cpu_has(monkeypatch, kernels, options, name):
    if kernels and not open_decoder.kernels_for(torch.float32):
        pytest.skip("this torch has no MKL")
    if not kernels:
        monkeypatch.setattr(open_decoder, "kernels_for", lambda dtype: False)
    decoder, found = opened(**options)
    assert type(decoder).__name__ == name
    assert decoder.slots == found.slots == 3
    assert decoder.pages == found.pages == 3 * COLUMNS
    assert decoder.length == 64
    assert decoder.forward(step_of((2, 0, [1, 2, 3]))).shape == (3, LLAMA.vocabulary)
    decoder.close()


NULL = replace(LLAMA, family="null", vocabulary=257, end_tokens=(256,))


def test_the_null_model_has_a_decoder_that_computes_nothing():
    decoder, _ = open_sized(
        Opened(NULL),
        torch.float32,
        CPU,
        slots=None,
        pages=None,
        length=64,
        threads=1,
        deterministic=False,
        compile=False,
        graphs=True,
    )
    assert isinstance(decoder, NullDecoder)
    assert decoder.cache_bytes() == 0
    assert (decoder.slots, decoder.pages) == (1024, 2048)
    decoder.copy_pages([0], [1])
    decoder.close()


@pytest.mark.parametrize(
    ("ends", "token"),
    [pytest.param((256,), ord("a"), id="a letter"), pytest.param((ord("a"), 0), 1, id="no end token")],
)
def test_the_null_decoder_always_says_one_token_that_ends_nothing(ends, token):
    decoder = NullDecoder(replace(NULL, end_tokens=ends), slots=2, pages=2, length=8)
    for _ in range(2):
        logits = decoder.forward(step_of((0, 0, [1, 2]), (1, 0, [3])))
        assert logits.dtype == torch.float32
        assert np.flatnonzero(logits.sum(0)).tolist() == [token]
        assert logits[:, token].tolist() == [1, 1, 1]
    decoder.close()
