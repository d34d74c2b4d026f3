"""What rollouts cost in tokens: of one game, by its steps and by its agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpuinfer.rollouts.record import Game, Trajectory, Turn

Asked = tuple[tuple[int, ...], Turn]
"""The whole prompt of a turn, and the turn."""


@dataclass
class Tokens:
    """Of some calls together."""

    calls: int = 0
    prompt: int = 0  # all that the model was given, what it had been given before included
    cached: int = 0  # of these, what had been computed for another prompt
    completion: int = 0

    def add(self, prompt: int, turn: Turn) -> None:
        self.calls += 1
        self.prompt += prompt
        self.cached += turn.cached_tokens
        self.completion += len(turn.completion_tokens)


def asked(trajectory: Trajectory) -> Iterable[Asked]:
    """Every turn with its whole prompt, in order."""
    for _, turns in trajectory.contexts():
        tokens: tuple[int, ...] = ()
        for turn in turns:
            tokens += turn.prompt_tokens
            yield tokens, turn
            tokens += turn.completion_tokens


def by_step(game: Game) -> dict[str, Tokens]:
    return _counted(game, lambda trajectory, turn: f"step {turn.step + 1}")


def by_agent(game: Game) -> dict[str, Tokens]:
    return _counted(game, lambda trajectory, turn: trajectory.agent)


def of_game(game: Game) -> Tokens:
    return _counted(game, lambda trajectory, turn: "").get("", Tokens())


def _counted(game: Game, key: Callable[[Trajectory, Turn], str]) -> dict[str, Tokens]:
    """In the order of the steps."""
    turns = [(trajectory, prompt, turn) for trajectory in game.trajectories for prompt, turn in asked(trajectory)]
    found: dict[str, Tokens] = {}
    for trajectory, prompt, turn in sorted(turns, key=lambda one: one[2].step):
        found.setdefault(key(trajectory, turn), Tokens()).add(len(prompt), turn)
    return found
