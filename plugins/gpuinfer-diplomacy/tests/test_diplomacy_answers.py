"""What is made of answers, whatever they are."""

from __future__ import annotations

import pytest
from gpuinfer_diplomacy.board import Board
from gpuinfer_diplomacy.orders import BEGIN, ReadAnswer, read_answer


@pytest.mark.parametrize(
    ("text", "begin", "expected"),
    [
        pytest.param("<orders>\nA PAR H\n</orders>", BEGIN, ReadAnswer(("A PAR H",)), id="an order"),
        pytest.param("Well: <orders>\n</orders> A PAR H", BEGIN, ReadAnswer(()), id="what stands outside is no order"),
        pytest.param(
            "<orders> a  par - bur; F BRE H, </orders>",
            BEGIN,
            ReadAnswer(("A PAR - BUR", "F BRE H")),
            id="written loosely",
        ),
        pytest.param(
            "<orders>\n* A PAR H\n- F BRE H.\n</orders>", BEGIN, ReadAnswer(("A PAR H", "F BRE H")), id="with bullets"
        ),
        pytest.param(
            "<orders>\nA PAR H\nA PAR - BUR\n</orders>",
            BEGIN,
            ReadAnswer(("A PAR H",), repeated=1),
            id="the first counts",
        ),
        pytest.param(
            "<orders>\nA PAR - MOS\nA MUN H\n</orders>", BEGIN, ReadAnswer((), illegal=2), id="too far, and not its own"
        ),
        pytest.param(
            "<orders>\nA PAR H\nA MAR S A P",
            BEGIN,
            ReadAnswer(("A PAR H",), unfinished=True),
            id="cut off within an order",
        ),
        pytest.param("<orders>", BEGIN, ReadAnswer((), unfinished=True), id="cut off at once"),
        pytest.param("A PAR H", BEGIN, ReadAnswer((), none=True), id="no orders begun"),
        pytest.param("", BEGIN, ReadAnswer((), none=True), id="nothing"),
        pytest.param(
            "\nA PAR H\n</orders>", "", ReadAnswer(("A PAR H",)), id="where nothing begins them, from the start"
        ),
    ],
)
def test_an_answer_is_read(text, begin, expected):
    assert read_answer(text, Board().position(), "FRANCE", begin) == expected


def test_a_very_long_answer_is_not_read_to_its_end():
    assert read_answer("<orders>" + "x\n" * 10**6, Board().position(), "FRANCE", BEGIN).illegal <= 1000
