"""Whole games against the contract of environments."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys

import pytest
from diplomacy_positions import played
from gpuinfer_diplomacy import Diplomacy
from gpuinfer_diplomacy.environment import scores
from gpuinfer_diplomacy.options import POWERS
from pydantic import ValidationError


def game(seed: int = 1, chance: int = 0, **options):
    return asyncio.run(played(Diplomacy(**options), seed, chance))


@pytest.fixture(scope="module")
def three_years():
    return game(horizon=3)


def titles(told) -> list[str]:
    return [next(iter(shown.values())).messages[-1]["content"].split("\n")[0] for shown, _ in told]


def test_orders_of_all_kinds_are_asked_for_until_the_winter_of_the_last_year_or_the_last_before_it(three_years):
    phases = titles(three_years)
    assert phases[0] == "Spring 1901, moves"
    assert phases[-1].split(",")[0] in ("Winter 1903", "Fall 1903")
    assert [outcome.done for _, outcome in three_years] == [False] * (len(phases) - 1) + [True]
    asked = {title.split(", ")[1] for title in [*phases, *titles(game(horizon=8))]}
    assert asked >= {"moves", "builds and disbands", "retreats"}


def test_only_powers_with_something_to_order_are_asked_and_all_are_shown_the_same_board_first(three_years):
    for shown, _ in three_years:
        assert shown
        assert all(observation.constraint.listed.items for observation in shown.values())
        assert len({each.messages[-1]["content"].partition("You are ")[0] for each in shown.values()}) == 1


def test_no_rewards_before_the_end_and_then_they_add_up_to_one(three_years):
    *before, last = [outcome.rewards for _, outcome in three_years]
    assert before == [{}] * len(before)
    assert sorted(last) == sorted(POWERS)
    assert sum(last.values()) == pytest.approx(1)


def test_yearly_rewards_add_up_to_what_the_game_has_changed():
    options = {"horizon": 4, "score": "squares"}
    by_year, at_end = game(rewards="year", **options), game(rewards="end", **options)
    assert sum(bool(outcome.rewards) for _, outcome in by_year) == 4
    start = scores({"RUSSIA": "1234", **{power: "123" for power in POWERS if power != "RUSSIA"}}, "squares")
    for power in POWERS:
        total = sum(outcome.rewards.get(power, 0) for _, outcome in by_year)
        assert start[power] + total == pytest.approx(at_end[-1][1].rewards[power])


def test_the_same_seed_is_the_same_game_whatever_was_played_before():
    async def twice():
        environment = Diplomacy(horizon=2, opening=3)
        return [await played(environment, seed) for seed in (5, 6, 5)]

    first, other, again = asyncio.run(twice())
    assert first == again
    assert first[0] != other[0]


def test_the_same_game_in_another_process():
    code = (
        "import asyncio; from diplomacy_positions import played; from gpuinfer_diplomacy import Diplomacy;"
        "print(asyncio.run(played(Diplomacy(horizon=1, opening=2), 9)))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=__file__.rpartition("/")[0]
        )
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == ""  # the engine's import is quiet


async def one_phase(answers: dict[str, str], **options):
    """What is shown, what comes of the answers, and what is shown then."""
    environment = Diplomacy(horizon=1, **options)
    await environment.reset(0)
    return await environment.observe(), await environment.step(answers), await environment.observe()


def test_answers_that_make_no_sense_are_counted_and_the_units_hold():
    said = {"FRANCE": "<orders>\nA PAR - MOS\nA PAR H\nA PAR H\n</orders>", "NOBODY": "x", "ITALY": "hm"}
    shown, outcome, then = asyncio.run(one_phase(said))
    assert sorted(shown) == sorted(POWERS)
    counted = {"orders": 1, "illegal_orders": 1, "repeated_orders": 1, "answers_without_orders": 6}
    assert {name: outcome.metrics[name] for name in counted} == counted
    assert "FRANCE owns BRE MAR PAR; has A MAR, A PAR, F BRE" in then["FRANCE"].messages[-1]["content"]


@pytest.mark.parametrize(
    ("begin", "answer", "remark"),
    [
        pytest.param("<orders>", "well, well", "Give answers more room .*--env-option begin=$", id="nobody orders"),
        pytest.param("<orders>", "<orders>\nA PAR H", "^$", id="somebody begins to"),
        pytest.param("", "well, well", "^$", id="there is nothing to say before"),
    ],
)
def test_when_nobody_says_where_orders_begin_the_run_is_told_what_to_do(begin, answer, remark):
    assert re.search(remark, asyncio.run(one_phase({"FRANCE": answer}, begin=begin))[1].remark)


def test_what_happened_is_shown():
    said = {power: f"<orders>\nA {place} - BUR\n</orders>" for power, place in (("FRANCE", "PAR"), ("GERMANY", "MUN"))}
    then = asyncio.run(one_phase(said))[2]["ITALY"].messages[-1]["content"]
    assert "Before: A PAR - BUR (bounce); A MUN - BUR (bounce)" in then


def test_with_a_memory_of_the_game_the_rules_are_said_once():
    told = [shown["FRANCE"] for shown, _ in game(horizon=2, memory="game") if "FRANCE" in shown]
    assert [observation.anew for observation in told] == [True] + [False] * (len(told) - 1)
    assert [len(observation.messages) for observation in told] == [2] + [1] * (len(told) - 1)


@pytest.mark.parametrize(
    ("options", "begin", "line"),
    [
        ({"detail": "moves"}, "<orders>", "A PAR - BRE BUR GAS PIC"),
        ({"detail": "orders"}, "<orders>", "A PAR - BRE, A PAR - BUR"),
        ({"detail": "brief"}, "<orders>", "You are FRANCE."),
        pytest.param({"begin": ""}, "", "\n<orders>", id="the question begins the orders"),
        pytest.param({"begin": "\n"}, "\n", "Write a line of thoughts, then the orders", id="a line of thoughts does"),
    ],
)
def test_what_a_power_is_shown_and_what_begins_its_orders(options, begin, line):
    observation = game(horizon=1, **options)[0][0]["FRANCE"]
    assert line in "".join(message["content"] for message in observation.messages)
    assert observation.constraint.listed.begin == begin


def test_who_is_the_policy_and_who_an_opponent():
    roles = Diplomacy(policy="france, Italy").roles
    assert {power for power, role in roles.items() if role == "policy"} == {"FRANCE", "ITALY"}
    assert set(roles.values()) == {"policy", "opponent"}


@pytest.mark.parametrize("options", [{"policy": "SPAIN"}, {"horizon": 0}, {"colour": "red"}, {"detail": "much"}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ValidationError):
        Diplomacy(**options)


@pytest.mark.parametrize(
    ("score", "expected"),
    [("share", {"a": 0.25, "b": 0.75, "c": 0}), ("squares", {"a": 0.1, "b": 0.9, "c": 0})],
)
def test_scores(score, expected):
    assert scores({"a": "x", "b": "xyz", "c": ""}, score) == pytest.approx(expected)
    assert scores({"a": "x", "b": "x" * 18, "c": ""}, score) == {"a": 0, "b": 1, "c": 0}


def test_importing_the_package_imports_no_engine_and_the_engines_log_is_left_to_the_program():
    code = "import sys, gpuinfer_diplomacy; sys.exit('diplomacy' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    game(horizon=1)
    assert logging.getLogger("diplomacy").handlers == []
