"""What is made of answers, whatever they are."""

from __future__ import annotations

import pytest
from gpuinfer_diplomacy.asked import BEGIN
from gpuinfer_diplomacy.board import Board
from gpuinfer_diplomacy.said import Said, said


@pytest.fixture(scope="module")
def start():
    return Board().position()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("<orders>\nA PAR H\n</orders>", Said(("A PAR H",)), id="an order"),
        pytest.param("Well: <orders>\n</orders> A PAR H", Said(()), id="what stands outside is no order"),
        pytest.param(
            "<orders> a  par - bur; F BRE H, </orders>", Said(("A PAR - BUR", "F BRE H")), id="written loosely"
        ),
        pytest.param("<orders>\n* A PAR H\n- F BRE H.\n</orders>", Said(("A PAR H", "F BRE H")), id="with bullets"),
        pytest.param(
            "<orders>\nA PAR H\nA PAR - BUR\n</orders>", Said(("A PAR H",), repeated=1), id="the first counts"
        ),
        pytest.param("<orders>\nA PAR - MOS\nA MUN H\n</orders>", Said((), illegal=2), id="too far, and not its own"),
        pytest.param(
            "<orders>\nA PAR H\nA MAR S A P", Said(("A PAR H",), unfinished=True), id="cut off within an order"
        ),
        pytest.param("<orders>", Said((), unfinished=True), id="cut off at once"),
        pytest.param("A PAR H", Said((), none=True), id="no orders begun"),
        pytest.param("", Said((), none=True), id="nothing"),
    ],
)
def test_an_answer_is_read(start, text, expected):
    assert said(text, start, "FRANCE", BEGIN) == expected


def test_where_nothing_begins_them_an_answer_is_orders_from_the_start(start):
    assert said("\nA PAR H\n</orders>", start, "FRANCE", "") == Said(("A PAR H",))


def test_a_very_long_answer_is_not_read_to_its_end(start):
    assert said("<orders>" + "x\n" * 10**6, start, "FRANCE", BEGIN).illegal <= 1000
