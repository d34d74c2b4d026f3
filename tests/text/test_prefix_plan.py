"""Which keys and values of a decode step are read once for several rows: each row's positions once, in their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuinfer.text.decoder.attention_plan import BEGIN, COUNT, END, FIRST, LEAST_SLOTS, ROW, SLOT, WORTH, PrefixPlanner
from gpuinfer.text.transformer import PAGE


def table(paths, columns):
    """Pages [rows, columns] of rows that are paths of names: rows that begin alike have the same pages there. What is
    behind a path's end is some page of any row.
    """
    numbers, random = {}, np.random.default_rng(len(paths))
    found = random.integers(0, len(paths) * columns, (len(paths), columns)).astype(np.int32)
    for row, path in enumerate(paths):
        for column in range(len(path)):
            found[row, column] = numbers.setdefault(path[: column + 1], len(numbers))
    return found


def tree(random, rows, columns):
    """Paths that leave one another at few or at many columns."""
    paths = [tuple(random.integers(0, random.integers(1, 4), columns).tolist())]
    while len(paths) < rows:
        path = paths[random.integers(len(paths))]
        kept = int(random.integers(0, columns + 1)) if random.random() < 0.8 else 0
        paths.append((*path[:kept], *(-len(paths) for _ in range(columns - kept))))
    random.shuffle(paths)
    return paths


def covered(plan, pages, whole, tile, items, slots):
    """Check that each row's items follow one another in its own pages, up to where it goes on by itself."""
    rows = len(whole)
    assert plan.items.shape[1] <= items
    assert sorted(plan.members.tolist()) == list(range(rows))
    reached, used = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for item in sorted(plan.items.T.tolist(), key=lambda item: item[BEGIN]):
        members = plan.members[item[FIRST] : item[FIRST] + item[COUNT]]
        assert 1 <= len(members) == item[COUNT] <= tile
        assert item[ROW] in np.flatnonzero(
            (pages[:, : item[END] // PAGE] == pages[members[0], : item[END] // PAGE]).all(1)
        )
        assert item[BEGIN] < item[END]
        assert item[BEGIN] % PAGE == item[END] % PAGE == 0
        for row in members:
            assert reached[row] == item[BEGIN]
            assert used[row] == item[SLOT]
            assert item[END] <= whole[row] * PAGE
            columns = slice(item[BEGIN] // PAGE, item[END] // PAGE)
            assert (pages[row, columns] == pages[item[ROW], columns]).all()
            reached[row], used[row] = item[END], used[row] + 1
    assert reached.tolist() == plan.begins.tolist()
    assert used.tolist() == plan.slots.tolist()
    assert used.max(initial=0) <= slots


@pytest.mark.parametrize("part", range(6))
def test_each_position_of_a_row_is_read_once_in_its_own_pages(part):
    for seed in range(part, 300, 6):
        check_any_plan(seed)


def check_any_plan(seed):
    random = np.random.default_rng(seed)
    rows, columns = int(random.integers(1, 40)), int(random.integers(2, 24))
    pages = table(tree(random, rows, columns), columns)
    whole = random.integers(0, columns, rows) if seed % 2 else np.full(rows, columns - 1)
    tile, items = int(random.choice([2, 3, 8, 64])), int(random.choice([1, 2, 7, 100]))
    planner = PrefixPlanner(tile, int(random.choice([64, 128, 512])), worth=int(random.choice([1, WORTH])))
    plan = planner.plan(pages, whole, items, LEAST_SLOTS)
    covered(plan, pages, whole, tile, items, LEAST_SLOTS)
    apart = replace(planner, few=50).plan(pages, whole, items, LEAST_SLOTS, apart=True)
    covered(apart, pages, whole, tile, items, LEAST_SLOTS)
    assert (apart.begins >= plan.begins).all()
    sees = whole * PAGE + 1
    assert plan.positions_read(sees) <= sees.sum()
    if not plan.begins.any():
        assert plan.positions_read(sees) == sees.sum()


def grouped(counts, shared, columns, system=0):
    """Paths of groups of so many rows that share `shared` pages, the first `system` of them with all others."""
    return [
        (
            *("all" for _ in range(system)),
            *(group for _ in range(shared - system)),
            *(f"{group} {row}",) * (columns - shared),
        )
        for group, count in enumerate(counts)
        for row in range(count)
    ]


def planned(paths, columns, tile=32, items=128, slots=8, split=512):
    pages, whole = table(paths, columns), np.full(len(paths), columns - 1)
    plan = PrefixPlanner(tile, split).plan(pages, whole, items, slots)
    covered(plan, pages, whole, tile, items, slots)
    return plan


def test_what_samples_of_prompts_and_of_a_system_prompt_have_in_common_is_read_as_often_as_they_need_tiles():
    plan = planned(grouped([64, 40, 1], 32, 40), 40)
    assert plan.positions_read(np.full(105, 40 * PAGE)) == (2 + 2) * 1024 + 104 * 256 + 1280
    assert plan.begins.tolist() == [1024] * 104 + [0]
    assert plan.items[END].max() == 1024
    assert set((plan.items[END] - plan.items[BEGIN]).tolist()) == {512}
    plan = planned(grouped([6, 5, 3], 20, 24, system=9), 24)
    assert plan.positions_read(np.full(14, 24 * PAGE)) == (9 + 3 * 11 + 14 * 4) * PAGE


@pytest.mark.parametrize(("counts", "shared", "worth"), [([2, 2], 3, False), ([2, 2], 4, True), ([5], 1, True)])
def test_a_prefix_so_short_that_partial_results_take_longer_is_not_shared(counts, shared, worth):
    assert planned(grouped(counts, shared, 8), 8).begins.any() == worth
    pages, whole = table(grouped([3, 2], 4, 8), 8), np.full(5, 7)
    for least, begin in ((12 * PAGE, 4 * PAGE), (12 * PAGE + 1, 0)):
        plan = PrefixPlanner(32, 512, least=least).plan(pages, whole, 128, 8)
        assert plan.begins.tolist() == [begin] * 5


def test_where_items_do_not_suffice_portions_are_longer_and_the_most_is_saved():
    counts = [2, 9, 3, 4]
    assert set((planned(grouped(counts, 32, 40), 40, items=8).items[END]).tolist()) == {512, 1024}
    plan = planned(grouped(counts, 32, 40), 40, items=4)
    assert plan.items[END].tolist() == [1024] * 4
    fewer = planned(grouped(counts, 32, 40), 40, items=2)
    assert np.flatnonzero(fewer.begins).tolist() == [*range(2, 11), *range(14, 18)]


def test_of_few_rows_long_ones_are_read_in_portions_beside_one_another():
    pages, whole = table(grouped([1, 3, 1], 24, 70), 70), np.array([60, 69, 64, 20, 20])
    planner = PrefixPlanner(32, 512, few=6)
    plan = planner.plan(pages, whole, 64, 9, apart=True)
    covered(plan, pages, whole, 32, 64, 9)
    assert plan.begins.tolist() == [3 * 512, 4 * 512, 4 * 512, 20 * PAGE, 0]
    assert plan.items[COUNT].max() == 3
    fewer = planner.plan(pages, whole, 4, 9, apart=True)
    covered(fewer, pages, whole, 32, 4, 9)
    assert fewer.items.shape[1] == 4
    assert planner.plan(pages[:1], whole[:1], 64, 9, apart=True).items.shape[1] == 3
    assert planner.plan(pages[:0], whole[:0], 64, 9, apart=True).items.shape[1] == 0
    assert not replace(planner, few=5).plan(pages, whole, 64, 9, apart=True).begins[0]
