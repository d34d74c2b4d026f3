"""The record of rollouts: exact to the token, and whole without the model's tokenizer.

Versions of the policy are numbers where they are compared, and names where weights are distinguished.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

Ending = Literal["done", "horizon", "turns", "error"]


class Span(Struct, frozen=True, array_like=True):
    """The weights that computed a completion from token `start` to the next span."""

    start: int
    version: str


class Timing(Struct, frozen=True, kw_only=True):
    """Of one completion, in seconds."""

    asked: float = 0.0  # since the run began
    queued: float = 0.0  # until it was admitted to a slot
    first_token: float = 0.0  # from the admission
    seconds: float = 0.0  # from the admission to the last token


class Turn(Struct, frozen=True, kw_only=True):
    """What one agent was shown at one moment, and its answer."""

    step: int  # of its environment, from 0
    messages: tuple[Mapping[str, Any], ...]  # that were new to it
    anew: bool  # the context starts here: `prompt_tokens` are all of it
    prompt_tokens: tuple[int, ...]  # what was added before the answer, after the trajectory's tokens so far
    completion_tokens: tuple[int, ...]
    text: str
    finish_reason: str  # stop or length
    logprobs: tuple[float, ...] = ()  # of each completion token, under the distribution that it was drawn from
    reference_logprobs: tuple[float, ...] | None = None  # of the same tokens, before temperature and filters
    policy_logprobs: tuple[float, ...] | None = None  # likewise, of the policy: what the reference's are compared with
    spans: tuple[Span, ...] = ()  # which weights; the first starts at 0
    nodes: tuple[int, ...] | None = None  # of a listed constraint: at which node each token was drawn, -1 outside
    cached_tokens: int = 0
    temperature: float = 1.0
    reward: float = 0.0  # of the step that this answer was part of
    timing: Timing = Timing()


class Trajectory(Struct, frozen=True, kw_only=True):
    """One agent's part in one game."""

    id: str  # group/sample/agent
    agent: str
    role: str
    trainable: bool  # whether the policy spoke, and not an opponent
    model: str  # who spoke: a model's or an adapter's name
    turns: tuple[Turn, ...]
    reward: float  # the sum of all steps, those without a turn of its own too

    def contexts(self) -> Iterator[tuple[tuple[int, ...], tuple[Turn, ...]]]:
        """Its runs of turns without `anew` between them: for each all its tokens as the model saw them last, and its
        turns.
        """
        tokens: list[int] = []
        turns: list[Turn] = []
        for turn in self.turns:
            if turn.anew and turns:
                yield tuple(tokens), tuple(turns)
                tokens, turns = [], []
            tokens += (*turn.prompt_tokens, *turn.completion_tokens)
            turns.append(turn)
        if turns:
            yield tuple(tokens), tuple(turns)


class Game(Struct, frozen=True, kw_only=True):
    """One sample of a group."""

    sample: int
    seed: int
    ending: Ending
    trajectories: tuple[Trajectory, ...]
    steps: int
    metrics: Mapping[str, float] = {}
    error: str = ""  # why it ended in an error; such a game is replaced, and counts for nothing
    attempt: int = 0  # games before it in its place that ended in an error
    seconds: float = 0.0


class Group(Struct, frozen=True, kw_only=True):
    """Games from one start: what advantages are computed over (Shao et al. 2024, GRPO)."""

    id: str
    number: int  # from 0; the start is drawn from the run's seed and it
    environment: str
    games: tuple[Game, ...]
    failed: tuple[Game, ...] = ()  # that were replaced
    started: float = 0.0  # seconds since the run began
    seconds: float = 0.0
    reference_s: float = 0.0  # that it waited for its reference's log-probabilities, after that

    def turns(self) -> Iterator[Turn]:
        """Of all games that count."""
        for game in self.games:
            for trajectory in game.trajectories:
                yield from trajectory.turns

    @property
    def versions(self) -> tuple[str, ...]:
        """Of the weights that drew trainable tokens, in the order in which they first appear."""
        found = dict.fromkeys(
            span.version
            for game in self.games
            for trajectory in game.trajectories
            if trajectory.trainable
            for turn in trajectory.turns
            for span in turn.spans
        )
        return tuple(found)


_NAMED = re.compile(r"(?:.*@)?v?([0-9]{1,18})")


def version_name(number: int) -> str:
    """The name of a version for backends: v7; of an adapter they make policy@v7."""
    return f"v{number}"


def version_number(name: str) -> int:
    """The number in the name of a version: of v7, policy@v7 and 7 it is 7; 0 without a number, as at the start."""
    found = _NAMED.fullmatch(name)
    return int(found[1]) if found else 0


def oldest_version(group: Group, otherwise: int = 0) -> int:
    """The oldest version that drew any trainable token; `otherwise` of a group without one."""
    return min((version_number(name) for name in group.versions), default=otherwise)


def version_lags(groups: Iterable[Group], version: int) -> list[int]:
    """How many versions each group lies behind, counted from its oldest trainable token."""
    return [version - oldest_version(group, version) for group in groups]
