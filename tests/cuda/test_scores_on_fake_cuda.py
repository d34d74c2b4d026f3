"""Scores of masks on a CUDA device: what the rows want is sent in one copy, and read back once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuinfer.generation import Sampling
from gpuinfer.text.diffusion import torch_scores
from gpuinfer.text.diffusion.scoring import Asked, Scorer, guided

VOCABULARY = 301
READ, SENT = "text/sampling/torch_path.py Download.values", "text/decoder/torch_batch.py Uploads.room"
OPTIONS = {
    "the likeliest": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": 5},
    "filtered": {"temperature": 0.8, "top_k": 9, "top_p": 0.7, "min_p": 0.1},
    "edited": {"temperature": 0.0, "logit_bias": {5: 30.0, 8: 1.5}, "min_tokens": 4, "stop_token_ids": (5, 6)},
}


def asked(sampling, first, count):
    return Asked(sampling, "k", 0, first, np.arange(count, dtype=np.int32), 0)


@pytest.mark.parametrize("needs", [(), ("margin", "entropy")], ids=str)
@pytest.mark.parametrize("options", [*([name] for name in OPTIONS), [*OPTIONS]], ids=" and ".join)
def test_rows_of_all_kinds_are_scored_with_one_copy_and_one_wait(cuda, options, needs):
    each = torch_scores.ROWS  # more than one piece, and logits that no row wants
    rows = [asked(Sampling(**OPTIONS[name]), number * each, each - 1) for number, name in enumerate(options)]
    scorer = Scorer(VOCABULARY, cuda.device, threads=1, seed=3, end_tokens=(7,), mask_token=300)
    logits = torch.zeros(len(options) * each + 1, VOCABULARY, device=cuda.device)
    for times in (1, 2):  # into two buffers in turn
        with cuda.waiting_only_in(READ):
            scored = scorer.score(logits, rows, needs)
        assert (cuda.waits, cuda.sent) == ({READ: times}, times)
        assert (len(scored.tokens), scored.bad) == (len(logits), {})
    with cuda.waiting_only_in(READ, SENT):  # until a copy is over before its memory is written again
        scorer.score(logits, rows, needs)
    assert (cuda.waits, cuda.sent) == ({READ: 3, SENT: 1}, 3)


def test_a_row_that_is_guided_waits_for_nothing(cuda):
    both = torch.zeros(2, 3, VOCABULARY, device=cuda.device)
    with cuda.waiting_only_in():
        guided(both[0], both[1], 1.5)
