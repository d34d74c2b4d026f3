"""What a draw asks of a CUDA device, for each set of options: one wait, one copy, launches whatever the rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counting import Asked, CountedDownloads, CountedDraws, real_host_memory

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling import Sampler, torch_path, triton_draws

VOCABULARY = 200
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
EDITS = {"min_tokens": 40, "stop_token_ids": (5, 6), "logit_bias": {3: 1.0}, **PENALTIES}
FILTERS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "top_k": 50}
OPTIONS = {  # name: options of the rows, most launches, most with kernels of our own
    "greedy": ([Sampling(temperature=0)], 16, 16),
    "temperature": ([Sampling(temperature=0.8)], 80, None),
    "seeds": ([Sampling(temperature=0.8, seed=5)], 80, None),
    "top-k": ([Sampling(top_k=50)], 165, None),
    "top-p": ([Sampling(top_p=0.9)], 185, 11),
    "min-p": ([Sampling(min_p=0.1)], 80, None),
    "all filters": ([Sampling(**FILTERS)], 270, 11),
    "bias": ([Sampling(temperature=0, logit_bias={3: 1.0, 9: -2.0})], 22, None),
    "penalties": ([Sampling(temperature=0, **PENALTIES)], 40, None),
    "min tokens": ([Sampling(temperature=0, min_tokens=5, stop_token_ids=(5, 6))], 28, None),
    "logprobs": ([Sampling(temperature=0, logprobs=5)], 95, 55),
    "processed log-probabilities": ([Sampling(processed_logprobs=True)], 95, None),
    "rows of all kinds": (
        [Sampling(temperature=0), Sampling(**FILTERS, **EDITS, logprobs=3), Sampling(logprobs=0)],
        390,
        110,
    ),
}
NOTHING_SENT = ("greedy", "logprobs")
MORE_WITH_CONSTRAINTS = 14


@pytest.fixture(autouse=True)
def host():
    with real_host_memory():
        yield


@pytest.fixture
def waits(fake_cuda, monkeypatch):
    counted = CountedDownloads()
    monkeypatch.setattr(torch_path, "Download", counted.of)
    return counted


def sampler_of(device, rows, name):
    options, *_ = OPTIONS[name]
    found = Sampler(rows, VOCABULARY, device, seed=1, end_tokens=[0, 1], threads=1)
    for slot in range(rows):
        found.admit(slot, options[slot % len(options)], np.arange(9, dtype=np.int32), "", slot)
    return found


def asked_by(found, rows, device, dtype=torch.float32, **given):
    """What one draw for that many rows asks of the device."""
    asked = Asked()
    logits = torch.empty((rows, VOCABULARY), dtype=dtype, device=device)
    with asked:
        drawn = found.draw(logits, np.arange(rows, dtype=np.int32), **given)
    assert len(drawn.tokens) == rows
    assert asked.reads == 0  # but for what `waits` stands in for
    return asked


def constraints(rows):
    """Masks; and rules, of the same rows, of all three kinds."""
    masks = np.full((rows, -(-VOCABULARY // 32)), -1, np.int32)
    kinds = np.arange(rows, dtype=np.int8) % 3
    counts = np.where(kinds > 0, 4, 0)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return masks, SimpleNamespace(kinds=kinds, starts=starts, ids=np.tile(np.arange(4, dtype=np.int32), rows))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("dtype", "constrained"),
    [
        pytest.param(torch.float32, False, id="free, of float32"),
        pytest.param(torch.bfloat16, True, id="masks and rules, of bfloat16"),
    ],
)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_draw_waits_once_and_sends_one_copy_whatever_the_rows(fake_cuda, waits, name, dtype, constrained):
    launched = []
    for rows in (3, 130):
        found = sampler_of(fake_cuda, rows, name)
        masks, rules = constraints(rows) if constrained else (None, None)
        waits.count = 0
        asked = asked_by(found, rows, fake_cuda, dtype, masks=masks, rules=rules)
        assert waits.count == 1
        assert asked.copies == (constrained or name not in NOTHING_SENT)
        launched.append(asked.kernels)
    assert launched[0] == launched[1]
    assert launched[0].total() <= OPTIONS[name][1] + MORE_WITH_CONSTRAINTS * constrained, launched[0]


@pytest.mark.parametrize("name", [name for name, (*_, own) in OPTIONS.items() if own is not None])
def test_kernels_of_our_own_draw_in_few_launches(fake_cuda, waits, name):
    found, draws = sampler_of(fake_cuda, 9, name), CountedDraws()
    found._path = torch_path.TorchPath(found._slots, VOCABULARY, draws)
    asked = asked_by(found, 9, fake_cuda)
    assert (waits.count, asked.copies) == (1, name not in NOTHING_SENT)
    assert (asked.kernels + draws.launched).total() <= OPTIONS[name][2], asked.kernels
    assert draws.launched["pick"] == (name not in NOTHING_SENT)


@pytest.mark.parametrize(
    ("name", "copies"), [("greedy", [0, 0]), ("bias", [1, 0]), ("top-p", [1, 1]), ("penalties", [1, 1])]
)
def test_nothing_is_sent_again_that_is_there(fake_cuda, waits, name, copies):
    found = sampler_of(fake_cuda, 4, name)
    assert [asked_by(found, 4, fake_cuda).copies for _ in copies] == copies


def test_copies_are_of_pinned_memory_and_waited_for_before_it_is_written_again(fake_cuda, waits, monkeypatch):
    log = []

    class Event:
        def record(self, stream):
            log.append("queued")

        def synchronize(self):
            log.append("copied")

    copy = torch.Tensor.copy_

    def noted(into, source, non_blocking=False):
        if into.device.type == "cuda" and source.device.type == "cpu":
            log.append("in the background" if non_blocking else "waits")
        return copy(into, source, non_blocking)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    found = sampler_of(fake_cuda, 3, "all filters")
    for _ in range(3):
        asked_by(found, 3, fake_cuda)
    queued = ["in the background", "queued"]
    assert log == [*queued, *queued, "copied", *queued]  # of two buffers the first


@pytest.mark.parametrize(("rows", "pieces"), [(256, 1), (257, 2), (1024, 4)])
def test_rows_go_through_in_pieces_where_memory_would_not_hold_them_all(fake_cuda, waits, monkeypatch, rows, pieces):
    monkeypatch.setitem(torch_path.WORK_BYTES, "cuda", 256 * VOCABULARY * torch_path.LOGIT_BYTES)
    found = sampler_of(fake_cuda, rows, "top-p")
    asked = asked_by(found, rows, fake_cuda)
    assert asked.kernels["searchsorted"] == pieces
    assert (waits.count, asked.copies) == (1, 1)


def test_kernels_that_do_not_work_are_not_used(fake_cuda, monkeypatch, caplog):
    """Here there is no Triton, or no device that it could draw on."""
    monkeypatch.setattr(triton_draws, "has_triton", lambda: True)
    found = sampler_of(fake_cuda, 2, "top-p")
    assert "do not work here" in caplog.text
    assert found._path._draw is torch_path.drawn
