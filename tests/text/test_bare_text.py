"""The bare decoder, measured: the steps that it is given, and rates that are rates. How fast it is, no test asks."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from random_models import LLAMA

from gpuinfer.errors import UsageError
from gpuinfer.text import text_roofline
from gpuinfer.text.transformer import PAGE


class Recorded:
    """A decoder that computes nothing, and refuses steps that none could compute."""

    device, computes_in = torch.device("cpu"), "float32"

    def __init__(self, slots=4, pages=16, length=128, shape=LLAMA):
        self.slots, self.pages, self.length, self.shape = slots, pages, length, shape
        self.steps = []

    def weight_tensors(self):
        return [torch.ones(1000, 3), torch.ones(7, dtype=torch.int16)]

    def forward(self, step):
        assert len(step.starts) <= self.slots
        assert (step.starts + step.lengths).max() <= self.length
        assert len(step.tokens) == step.lengths.sum()
        used = [
            step.pages[segment, column]
            for segment, end in enumerate(step.starts + step.lengths)
            for column in range(-(-int(end) // PAGE))
        ]
        assert len(set(used)) == len(used), "a page has two rows"
        assert 0 <= min(used) <= max(used) < self.pages
        self.steps.append(step)
        return torch.zeros(len(step.wanted), self.shape.vocabulary)


@pytest.mark.parametrize(
    ("decoder", "rows", "tokens"),
    [
        pytest.param(Recorded(), 3, 100, id="as the run had them"),
        pytest.param(Recorded(), 100, 10_000, id="more rows and tokens than there is room for"),
        pytest.param(Recorded(slots=1, pages=1, length=8), 1, 512, id="one page of eight positions"),
        pytest.param(Recorded(slots=64, pages=3), 64, 512, id="fewer pages than slots"),
    ],
)
def test_steps_of_answers_and_of_prompts_are_measured(decoder, rows, tokens):
    found = text_roofline.measure_roofline(decoder, rows, tokens, 0.2)
    assert 1 <= found.at_rows <= min(rows, decoder.slots, decoder.pages)
    assert 1 <= found.at_tokens <= tokens
    assert all(value > 0 for name, value in asdict(found).items() if name.endswith("per_s"))
    assert found.flops_per_s >= found.own_flops_per_s
    assert {len(step.tokens) for step in decoder.steps} == {found.at_rows, found.at_tokens}


def test_a_model_without_layers_is_not_measured():
    with pytest.raises(UsageError, match="computes nothing"):
        text_roofline.measure_roofline(Recorded(shape=replace(LLAMA, layers=0)), 1, 8, 0.1)


def test_a_look_leaves_out_what_its_threads_waited_for_a_core(monkeypatch):
    """Half of the time in which they wanted one somebody else had it: twice as fast alone."""
    clock = iter([(0.0, 0.0), (1.0, 1.0)])
    monkeypatch.setattr(text_roofline, "cpu_times", lambda: next(clock))
    monkeypatch.setattr(text_roofline.time, "perf_counter", iter(np.arange(0.0, 10.0, 0.5)).__next__)
    rate, served = text_roofline._look(lambda: None, torch.device("cpu"))
    assert served == 0.5
    assert rate == pytest.approx(1 / (1.0 * 0.5))
