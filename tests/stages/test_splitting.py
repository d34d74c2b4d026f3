"""Which layers make a stage."""

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.models.pipeline.stage_plan import cores_by_stage, least_largest

times = st.lists(st.floats(0, 100), min_size=1, max_size=8)


def every_split(layers, stages):
    for points in combinations(range(1, layers), stages - 1):
        yield list(pairwise([0, *points, layers]))


def largest(split, seconds):
    return max(math.fsum(of_stage[start:stop]) for of_stage, (start, stop) in zip(seconds, split, strict=True))


@given(times, st.integers(1, 4), st.data())
def test_no_other_split_has_a_smaller_largest_stage(layers, stages, data):
    if stages > len(layers):
        with pytest.raises(ValueError, match="layers make no"):
            least_largest([layers] * stages)
        return
    speeds = data.draw(st.lists(st.floats(0.5, 4), min_size=stages, max_size=stages))
    seconds = [[layer * speed for layer in layers] for speed in speeds]
    found = least_largest(seconds)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(layers)
    assert all(start < stop for start, stop in found)
    best = min(largest(split, seconds) for split in every_split(len(layers), stages))
    assert largest(found, seconds) == pytest.approx(best)


@given(times, st.integers(1, 3), st.data())
def test_no_stage_holds_more_than_it_has_room_for(layers, stages, data):
    if stages > len(layers):
        return
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(layers), max_size=len(layers)))
    room = data.draw(st.lists(st.integers(0, 30), min_size=stages, max_size=stages))
    fitting = [
        split
        for split in every_split(len(layers), stages)
        if all(sum(sizes[start:stop]) <= most for (start, stop), most in zip(split, room, strict=True))
    ]
    found = least_largest([layers] * stages, sizes, room)
    assert (found in fitting) == bool(fitting)
    assert (found is None) == (not fitting)


@pytest.mark.parametrize(
    ("cores", "seconds", "dealt"),
    [
        pytest.param(2, [1, 1], [1, 1], id="one each"),
        pytest.param(5, [1, 3], [2, 3], id="the one over to the slowest"),
        pytest.param(1, [1, 1, 1], [1, 1, 1], id="fewer than stages"),
    ],
)
def test_cores(cores, seconds, dealt):
    assert cores_by_stage(cores, seconds) == dealt
