"""What is made of answers, whatever they are."""

from __future__ import annotations

import pytest
from gpuinfer_diplomacy.board import Board
from gpuinfer_diplomacy.orders import BEGIN, ReadAnswer, read_answer


@pytest.fixture(scope="module")
def start():
    return Board().position()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("<orders>\nA PAR H\n</orders>", ReadAnswer(("A PAR H",)), id="an order"),
        pytest.param("Well: <orders>\n</orders> A PAR H", ReadAnswer(()), id="what stands outside is no order"),
        pytest.param(
            "<orders> a  par - bur; F BRE H, </orders>", ReadAnswer(("A PAR - BUR", "F BRE H")), id="written loosely"
        ),
        pytest.param(
            "<orders>\n* A PAR H\n- F BRE H.\n</orders>", ReadAnswer(("A PAR H", "F BRE H")), id="with bullets"
        ),
        pytest.param(
            "<orders>\nA PAR H\nA PAR - BUR\n</orders>", ReadAnswer(("A PAR H",), repeated=1), id="the first counts"
        ),
        pytest.param(
            "<orders>\nA PAR - MOS\nA MUN H\n</orders>", ReadAnswer((), illegal=2), id="too far, and not its own"
        ),
        pytest.param(
            "<orders>\nA PAR H\nA MAR S A P", ReadAnswer(("A PAR H",), unfinished=True), id="cut off within an order"
        ),
        pytest.param("<orders>", ReadAnswer((), unfinished=True), id="cut off at once"),
        pytest.param("A PAR H", ReadAnswer((), none=True), id="no orders begun"),
        pytest.param("", ReadAnswer((), none=True), id="nothing"),
    ],
)
def test_an_answer_is_read(start, text, expected):
    assert read_answer(text, start, "FRANCE", BEGIN) == expected


def test_where_nothing_begins_them_an_answer_is_orders_from_the_start(start):
    assert read_answer("\nA PAR H\n</orders>", start, "FRANCE", "") == ReadAnswer(("A PAR H",))


def test_a_very_long_answer_is_not_read_to_its_end(start):
    assert read_answer("<orders>" + "x\n" * 10**6, start, "FRANCE", BEGIN).illegal <= 1000
