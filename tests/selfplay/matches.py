"""Whole searches in this process, without engine and model: arenas, and players who meet in one game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuinfer.testing.reference_search import Model, load, search_of
from gpuinfer.workloads.selfplay.arena import Arena
from gpuinfer.workloads.selfplay.game import Game

FIELDS = ("observation", "legal", "policy", "value", "player", "game", "move")


def arena_of(game: Game, slots: int, **changed: Any) -> Arena:
    return Arena(game, load(game.rules), search_of(**changed), slots)


def played(arena: Arena, ids: Sequence[int], model: Model | None = None, rounds: int = 1) -> dict[str, np.ndarray]:
    """What all these games leave behind, in the order of their numbers. `model` answers a block of features."""
    parts, answers = [], ()
    arena.add_games(ids)
    for _ in range(1_000_000):
        rows = arena.play(*answers, rounds=rounds)
        if (part := arena.collect()) is not None:
            parts.append(part)
        if not rows and not arena.busy and not arena.queued:
            return in_order(parts)
        answers = model(arena.features[:rows].copy()) if model is not None and rows else ()
    raise AssertionError(f"games {ids[:3]}… do not end")


def in_order(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows, games = np.lexsort((whole["move"], whole["game"])), np.argsort(whole["finished"])
    return {name: array[rows if name in FIELDS else games] for name, array in whole.items()}


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
