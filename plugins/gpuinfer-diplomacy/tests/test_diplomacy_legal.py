"""Whatever the constraint admits is a legal set of orders to the engine, on positions of real games."""

from __future__ import annotations

import random

import pytest
from diplomacy_positions import a_text, positions
from gpuinfer_diplomacy.board import Board, Position
from gpuinfer_diplomacy.orders import BEGIN, MOST_SETS, constraint, items, read_answer


def each(count: int, seed: int):
    for board, position in positions(count, seed):
        for power in (power for power, orders in position.legal.items() if orders):
            yield board, position, power


def assert_legal(board: Board, position: Position, power: str, text: str) -> None:
    what = read_answer(text, position, power, BEGIN)
    assert (what.illegal, what.repeated, what.unfinished, what.none) == (0, 0, False, False), text
    assert board.accepts(power, what.orders), (position.phase, power, what.orders)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.thorough)])
def test_what_the_constraint_admits_is_legal(count):
    chance = random.Random(count)
    for board, position, power in each(count, seed=count):
        listed = constraint(position, power, BEGIN).listed
        assert_legal(board, position, power, f"I think.{a_text(listed, chance)}")


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.thorough)])
def test_each_item_alone_is_legal(count):
    for board, position, power in each(count, seed=7):
        for _, text in items(position, power):
            assert_legal(board, position, power, f"<orders>\n{text}\n</orders>")


def test_builds_and_disbands_that_are_ordered_happen():
    """None of them is void: as many as are due, each of its own place."""
    chance, seen = random.Random(0), set()
    for board, position in positions(150, seed=3):
        if position.kind != "A":
            continue
        texts = {
            power: a_text(constraint(position, power, BEGIN).listed, chance)
            for power, due in position.legal.items()
            if due
        }
        orders = {power: read_answer(text, position, power, BEGIN).orders for power, text in texts.items()}
        seen |= {(position.adjustments[power] > 0, len(given)) for power, given in orders.items()}
        state = board.state()
        assert board.play(orders).results == {}
        board.restore(state)
        assert board.position() == position
    assert {building for building, count in seen if count} == {True, False}


def test_sets_of_many_disbands_stay_few():
    """The engine says which units go besides those that are named."""
    units = [f"A U{number:02}" for number in range(17)]
    legal = {"ITALY": {unit: (f"{unit} D",) for unit in units}}
    nobody: dict[str, tuple[str, ...]] = {}
    position = Position("W1905A", {"ITALY": units}, nobody, nobody, legal, {"ITALY": -9})
    sets = [text for _, text in items(position, "ITALY")]
    assert 0 < len(sets) <= MOST_SETS
    assert len({text.count(",") for text in sets}) == 1
