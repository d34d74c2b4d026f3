"""A game by its name, and whether it can be played here: what cannot is refused with the reason."""

from __future__ import annotations

import difflib
import importlib
import math
import random
import time
from typing import Any

import pyspiel
from open_spiel.python.observation import INFO_STATE_OBS_TYPE, make_observation

from gpuinfer.errors import UsageError

WIDEST = 127  # seats that records can name
GUESSED, GUESSED_S = 20, 1.0  # positions at which a guess at what is hidden is tried, and how long at most


def load(name: str) -> pyspiel.Game:
    """Raises `UsageError` for a game that is not there, or parameters that it has not."""
    short = name.partition("(")[0].strip()
    if short.startswith("python_"):
        importlib.import_module("open_spiel.python.games")  # which registers them
    if short not in pyspiel.registered_names():
        near = difflib.get_close_matches(short, pyspiel.registered_names(), 3)
        hint = (
            f"Did you mean {' or '.join(map(repr, near))}?" if near else "Some are connect_four, go, chess, backgammon."
        )
        raise UsageError(f"OpenSpiel has no game '{short}'. {hint} All of them: pyspiel.registered_names().")
    try:
        return pyspiel.load_game(name)
    except (pyspiel.SpielError, RuntimeError) as error:
        raise UsageError(
            f"OpenSpiel does not load '{name}': {error}. Write parameters as {_example(short)}."
        ) from error


def _example(short: str) -> str:
    """The game's name with the parameters that it has by default."""
    told = {game.short_name: game.parameter_specification for game in pyspiel.registered_games()}[short]
    return f"{short}({','.join(f'{name}={_shown(value)}' for name, value in told.items())})"


def _shown(value: Any) -> str:
    return "…" if value is None else str(value)


def refuse(game: pyspiel.Game, name: str) -> None:
    """Raises `UsageError` for a game that a search move by move cannot play, or not honestly."""
    if reason := _reason(game):
        raise UsageError(f"OpenSpiel's '{name}' cannot be played: {reason}")


def _reason(game: pyspiel.Game) -> str | None:
    kind, types = game.get_type(), pyspiel.GameType
    if kind.dynamics == types.Dynamics.SIMULTANEOUS:
        return "its players move at once, and the search is for one mover at a time. Choose another."
    if kind.dynamics == types.Dynamics.MEAN_FIELD:
        return "it is a mean field game, and has no players that a search could move for. Choose another."
    if kind.chance_mode == types.ChanceMode.SAMPLED_STOCHASTIC:
        return (
            "its chance is drawn inside the game, so that the search knows no probabilities, and a seed does not give "
            "the same game again. Choose one with explicit chance."
        )
    if not (kind.provides_observation_tensor or kind.provides_information_state_tensor):
        return "it gives no tensor of what a player sees, and a network needs features. Choose another."
    if not 1 <= game.num_players() <= WIDEST:
        return f"it has {game.num_players()} players, and 1 to {WIDEST} can be kept. Choose fewer."
    if kind.information == types.Information.PERFECT_INFORMATION:
        return None
    return _fault_of_guesses(game)


def _fault_of_guesses(game: pyspiel.Game) -> str | None:
    """Why its hidden part cannot be guessed as its players may guess it: the search looks at whole positions."""
    draw = random.Random(0)
    state = game.new_initial_state()
    end = time.monotonic() + GUESSED_S
    for _ in range(GUESSED):
        while state.is_terminal() or state.is_chance_node():
            state = game.new_initial_state() if state.is_terminal() else state.child(_drawn(state, draw))
        mover = state.current_player()
        try:
            guess = state.resample_from_infostate(mover, draw.random)
        except (pyspiel.SpielError, RuntimeError):
            return (
                "part of it is hidden from its players, and OpenSpiel cannot deal that part anew as the player to move "
                "may guess it (resample_from_infostate). A search that saw it would cheat. Choose another game."
            )
        if _seen(guess, mover) != _seen(state, mover) or guess.current_player() != mover:
            return (
                "what OpenSpiel guesses of its hidden part (resample_from_infostate) is not what the player to move "
                "knows. Choose another game."
            )
        state = state.child(draw.choice(state.legal_actions()))
        if time.monotonic() > end:
            break
    return None


def _drawn(state: pyspiel.State, draw: random.Random) -> int:
    actions, chances = zip(*state.chance_outcomes(), strict=True)
    return int(draw.choices(actions, chances)[0])


def _seen(state: pyspiel.State, player: int) -> str:
    if state.get_game().get_type().provides_information_state_string:
        return str(state.information_state_string(player))
    return str(state.observation_string(player))


def observation(game: pyspiel.Game, hidden: bool) -> Any:
    """What writes a player's tensor: with a hidden part all that the player knows, where OpenSpiel tells that."""
    kind = game.get_type()
    everything = kind.provides_information_state_tensor and (hidden or not kind.provides_observation_tensor)
    return make_observation(game, INFO_STATE_OBS_TYPE) if everything else make_observation(game)


def is_won_or_lost(game: pyspiel.Game) -> bool:
    """Whether one of two players wins what the other loses, and there is no more to win than 1, as far as that is
    said: of a game with values in between self-play finds out.
    """
    zero_sum = game.get_type().utility == pyspiel.GameType.Utility.ZERO_SUM
    return game.num_players() == 2 and zero_sum and highest(game) == 1.0 and game.max_utility() == 1.0


def highest(game: pyspiel.Game) -> float:
    """The most that a player can win or lose; 1 where there is no end to it."""
    most = max(abs(game.min_utility()), abs(game.max_utility()))
    return most if 0.0 < most < math.inf else 1.0
