"""Positions that legal play leads to, and texts that the constraint admits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from gpuinfer_diplomacy.board import Board, Position
from gpuinfer_diplomacy.environment import at_random

from gpuinfer.generation import Listed
from gpuinfer.rollouts.environment import Environment, Observation


def positions(count: int, seed: int = 0, years: int = 12) -> Iterator[tuple[Board, Position]]:
    """Of games of random legal orders, each `years` long. The board is at the position: play nothing on it."""
    chance = random.Random(seed)
    while count > 0:
        board = Board()
        while count > 0 and not board.over and (position := board.position()).year < 1901 + years:
            yield board, position
            count -= 1
            board.play(at_random(position, chance))


def a_text(listed: Listed, chance: random.Random, most: int = 40) -> str:
    """One of those that `Listed` describes: read from its docstring, not from an implementation."""
    by_unit: dict[str, list[str]] = {}
    for unit, text in listed.items:
        by_unit.setdefault(unit, []).append(text)
    units = chance.sample(sorted(by_unit), chance.randint(0, min(most, len(by_unit))))
    lines = (f"{listed.separator}{chance.choice(by_unit[unit])}" for unit in units)
    return f"{listed.begin}{''.join(lines)}{listed.separator}{listed.end}"


def answers(shown: Mapping[str, Observation], chance: random.Random) -> dict[str, str]:
    return {agent: a_text(observation.constraint.listed, chance) for agent, observation in shown.items()}


async def played(
    environment: Environment, seed: int, chance: int = 0
) -> list[tuple[Mapping[str, Observation], object]]:
    """A whole game: what was shown and what came of it, phase by phase."""
    dice, told = random.Random(chance), []
    await environment.reset(seed)
    while True:
        shown = await environment.observe()
        outcome = await environment.step(answers(shown, dice))
        told.append((shown, outcome))
        if outcome.done:
            return told
