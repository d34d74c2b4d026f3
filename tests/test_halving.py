"""A model that raises at one block answers the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.models.row_format import answers_by_halving


class Model:
    """Doubles numbers, and raises at those below zero."""

    forwards = 0

    def __call__(self, blocks):
        self.forwards += 1
        if bad := [block for block in blocks if block < 0]:
            raise ValueError(bad[0])
        return [2 * block for block in blocks]


@given(st.lists(st.integers(-3, 10), min_size=1, max_size=64))
def test_each_block_has_its_own_answer_or_its_own_error(blocks):
    answers = answers_by_halving(Model(), blocks)
    assert [answer.args[0] if isinstance(answer, ValueError) else answer // 2 for answer in answers] == blocks
    assert [isinstance(answer, ValueError) for answer in answers] == [block < 0 for block in blocks]


@pytest.mark.parametrize(
    ("blocks", "forwards"),
    [
        pytest.param([1] * 64, 1, id="nothing bad: one forward"),
        pytest.param([1] * 63 + [-1], 13, id="one bad of 64: two for each halving, and the first"),
        pytest.param([-1], 1, id="one that is alone is tried once"),
        pytest.param([-1] * 64, 127, id="all bad: less than two for each"),
    ],
)
def test_what_it_costs(blocks, forwards):
    model = Model()
    answers_by_halving(model, blocks)
    assert model.forwards == forwards


def test_a_stop_is_no_answer():
    def forward(blocks):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answers_by_halving(forward, [1, 2])
