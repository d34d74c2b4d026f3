"""What a step costs at least, counted by hand for shapes that are small enough for it."""

from dataclasses import replace

import numpy as np
import pytest

from gpuinfer.text.text_roofline import StepCost, StepExtent, step_extent
from gpuinfer.text.transformer import Experts, Shape, Step

SMALL = Shape(
    family="llama", vocabulary=10, hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=6, positions=64
)
QKV, OUT, MLP, HEAD = (2 + 2) * 2 * 4, 2 * 2 * 4, 3 * 6 * 4, 4 * 10


def a_step(starts, lengths, wanted=None, sees=None):
    tokens = sum(lengths)
    return Step(
        tokens=np.zeros(tokens, np.int32),
        pages=np.zeros((len(starts), 4), np.int32),
        starts=np.asarray(starts, np.int32),
        lengths=np.asarray(lengths, np.int32),
        wanted=np.arange(tokens if wanted is None else wanted, dtype=np.int32),
        sees=None if sees is None else np.asarray(sees, np.int32),
    )


@pytest.mark.parametrize(
    ("step", "extent"),
    [
        pytest.param(a_step([7], [1]), StepExtent(1, 1, 1, 8, 8), id="a token further"),
        pytest.param(a_step([0], [3], wanted=1), StepExtent(1, 3, 1, 1 + 2 + 3, 3), id="a prompt that begins"),
        pytest.param(a_step([2, 0], [2, 1]), StepExtent(2, 3, 3, 3 + 4 + 1, 4 + 1), id="two rows"),
        pytest.param(
            a_step([0], [2], sees=[5, 5]), StepExtent(1, 2, 2, 10, 5), id="a canvas that sees what lies behind"
        ),
        pytest.param(a_step([0, 4], [2, 1], sees=[2, 2, 9]), StepExtent(2, 3, 3, 13, 11), id="canvases of two rows"),
    ],
)
def test_the_extent_of_a_step(step, extent):
    assert step_extent(step) == extent


def test_pages_that_rows_share_are_read_once():
    step = replace(
        a_step([70, 66, 64, 9], [1, 1, 30, 1]), pages=np.array([[4, 5, 1], [4, 5, 2], [4, 6, 3], [7] * 3], np.int32)
    )
    assert step_extent(step).read == (71 + 67 + 94 + 10) - (2 + 1) * 32
    assert step_extent(step).attended == 71 + 67 + sum(range(65, 95)) + 10


def test_one_token_meets_every_weight_once():
    cost = StepCost(SMALL, 4).of(StepExtent(1, 1, 1, 8, 8))
    weights = 2 * (QKV + OUT + MLP) + HEAD
    attention = 2 * 4 * 2 * 2 * 8  # layers, operations for a value, heads, values of a head, positions
    assert cost.flops == 2 * weights + attention
    assert cost.attention == attention
    cached = 2 * 2 * 1 * 2  # layers, keys and values, heads of them, values of one
    assert cost.bytes == 4 * (weights + 9 * cached)  # eight positions read, one written


def test_rows_whose_logits_are_not_wanted_leave_the_last_layer_early():
    count = StepCost(SMALL, 4)
    all_wanted, last_wanted = count.of(StepExtent(1, 5, 5, 15, 5)), count.of(StepExtent(1, 5, 1, 15, 5))
    assert all_wanted.flops - last_wanted.flops == 2 * 4 * (OUT + MLP + HEAD)


def test_a_window_bounds_what_is_attended_and_read():
    windowed = StepCost(replace(SMALL, windows=(4, None)), 4).of(StepExtent(1, 1, 1, 100, 100))
    assert windowed.attention == 4 * 2 * 2 * (4 + 100)


def test_of_experts_those_that_are_chosen_cost():
    mixed = StepCost(replace(SMALL, intermediate=0, experts=Experts(count=8, chosen=2, intermediate=3)), 4)
    assert mixed._mlp(0) == (2 * 3 * 3 + 8) * 4
    few, many = (mixed.of(StepExtent(n, n, n, n, n)).bytes for n in (1, 1000))
    read = 2 * (8 - 2) * 3 * 3 * 4 * 4  # the other six, in each layer
    assert many - few == pytest.approx(read + 999 * 2 * 4 * 2 * 2 * 1 * 2)
