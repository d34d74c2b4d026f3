"""Sets of intervals against sets of numbers."""

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.cluster.ledger import IntervalSet, RangeSet
from gpuinfer.division import WorkRange, intervals_of

edges = st.integers(0, 40)
intervals = st.tuples(edges, edges).map(sorted)
changes = st.lists(st.tuples(st.sampled_from(["add", "remove"]), intervals), max_size=20)


@pytest.mark.property
@settings(max_examples=examples(2_000), deadline=None)
@given(changes, intervals)
def test_a_set_of_intervals_is_a_set_of_units(steps, asked):
    ours, naive = IntervalSet(), set()
    for change, (start, stop) in steps:
        units = set(range(start, stop))
        if change == "add":
            assert ours.add(start, stop) == len(units - naive)
            naive |= units
        else:
            assert ours.remove(start, stop) == len(units & naive)
            naive -= units
        assert ours.units == len(naive)
        assert list(ours) == intervals_of(naive)
    units = set(range(*asked))
    assert ours.within(*asked) == intervals_of(units & naive)
    assert ours.gaps(*asked) == intervals_of(units - naive)
    assert ours.overlap(*asked) == len(units & naive)


def item(unit):
    return str(unit).encode()


def work(start, stop):
    return WorkRange(start, stop, tuple(map(item, range(start, stop))), "v1")


range_changes = st.lists(
    st.one_of(
        st.tuples(st.just("add"), intervals),
        st.tuples(st.just("cut"), intervals),
        st.tuples(st.just("take"), st.tuples(st.integers(0, 12), st.sampled_from([1, 4]))),
    ),
    max_size=20,
)


@pytest.mark.property
@settings(max_examples=examples(2_000), deadline=None)
@given(range_changes, intervals)
def test_ranges_keep_each_unit_with_its_item(steps, asked):
    ours, naive = RangeSet(), set()
    for change, (one, two) in steps:
        if change == "add" and one < two:
            if naive & set(range(one, two)):
                with pytest.raises(ValueError, match="in this set already"):
                    ours.add(work(one, two))
            else:
                ours.add(work(one, two))
                naive |= set(range(one, two))
            found, gone = [], set()
        elif change == "take":
            found, gone = ours.take(one, two), None
            assert sum(map(len, found)) <= one
        else:
            found, gone = ours.cut(one, two), naive & set(range(one, two))
        taken = [unit for part in found for unit in range(part.start, part.stop)]
        if gone is None:
            assert taken == sorted(naive)[: len(taken)]
            assert len(taken) > 0 or not naive or one == 0
        elif change != "add":
            assert taken == sorted(gone)
        for part in [*found, *ours]:
            assert part == work(part.start, part.stop)
        naive -= set(taken)
        assert [unit for part in ours for unit in range(part.start, part.stop)] == sorted(naive)
        assert ours.units == len(naive)
    assert ours.overlap(*asked) == len(naive & set(range(*asked)))


def test_the_first_units_are_cut_at_a_multiple_of_the_block():
    ranges = RangeSet()
    ranges.add(WorkRange(3, 30))
    assert ranges.take(10, block=4) == [WorkRange(3, 12)]
    assert ranges.take(2, block=4) == [WorkRange(12, 14)]  # there is no multiple in so few


def test_a_hundred_thousand_gaps_take_a_few_megabytes():
    kept = IntervalSet()
    for start in range(0, 1_000_000, 10):
        kept.add(start, start + 5)
    assert len(kept) == 100_000
    assert kept._edges.itemsize * 2 * len(kept) < 2_000_000
    assert kept.overlap(500_000, 500_100) == 50
