"""Training samples: each context of a trajectory of the policy is one sequence of tokens, with its advantage over the
other samples from the same start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.record import Group, Trajectory, Turn


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward less their mean, in standard deviations (Shao et al. 2024, GRPO, section 4.1.2); 0 where all got the
    same.
    """
    scale = max(map(abs, rewards), default=0.0) or 1.0  # so that nothing overflows; it cancels out
    scaled = [reward / scale for reward in rewards]
    mean = math.fsum(scaled) / max(1, len(scaled))
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in scaled) / max(1, len(scaled)))
    if deviation < 1e-12:
        return [0.0] * len(rewards)
    return [(one - mean) / deviation for one in scaled]


T = TypeVar("T")


class SamplePlace(Struct, frozen=True, array_like=True):
    """Where in its group a sample stands. `sizes`: of each turn, tokens before the answer and tokens of the answer."""

    game: int
    trajectory: int
    context: int
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sample:
    """`prompt` ends where the first answer begins, `response` follows; all other lists are as long as `response`."""

    group: Group
    place: SamplePlace
    turns: tuple[Turn, ...]
    last: bool  # of its trajectory's samples
    advantage: float

    @property
    def trajectory(self) -> Trajectory:
        return self.group.games[self.place.game].trajectories[self.place.trajectory]

    @property
    def repetition(self) -> int:
        """Which sample of its start."""
        return self.group.games[self.place.game].sample

    @property
    def start(self) -> str:
        """The name of the set that the sample is compared with: one agent, one start."""
        return f"{self.group.id}/{self.trajectory.agent}"

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.turns[0].prompt_tokens

    @property
    def response(self) -> tuple[int, ...]:
        tokens = list(self.turns[0].completion_tokens)
        for turn in self.turns[1:]:
            tokens += (*turn.prompt_tokens, *turn.completion_tokens)
        return tuple(tokens)

    @property
    def mask(self) -> tuple[int, ...]:
        return _along(self.turns, [[1] * len(turn.completion_tokens) for turn in self.turns], 0)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """0 where the mask is 0."""
        return _along(self.turns, [turn.logprobs for turn in self.turns], 0.0)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """1 where the mask is 0."""
        return _along(self.turns, [[turn.temperature] * len(turn.completion_tokens) for turn in self.turns], 1.0)

    @property
    def reference_logprobs(self) -> tuple[float, ...] | None:
        """0 where the mask is 0; None unless every turn has them."""
        known = [turn.reference_logprobs for turn in self.turns if turn.reference_logprobs is not None]
        return _along(self.turns, known, 0.0) if len(known) == len(self.turns) else None

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions of the weights that drew the sample, in order."""
        return tuple(dict.fromkeys(span.version for turn in self.turns for span in turn.spans))

    @property
    def messages(self) -> int:
        """The number of messages shown and written."""
        return sum(len(turn.messages) + 1 for turn in self.turns)

    @property
    def seconds(self) -> float:
        """That the model took."""
        return sum(turn.timing.seconds for turn in self.turns)


def samples(group: Group) -> list[Sample]:
    """The samples of a group, by game, trajectory and context. Raises `UsageError` for a record without
    log-probabilities.
    """
    rewards: dict[str, dict[tuple[int, int], float]] = {}  # of the policy's trajectories, by agent
    for place, each in enumerate(group.games):
        for at, trajectory in enumerate(each.trajectories):
            if trajectory.trainable:
                rewards.setdefault(trajectory.agent, {})[place, at] = trajectory.reward
    better: dict[tuple[int, int], float] = {}
    for of_agent in rewards.values():
        better |= zip(of_agent, advantages(list(of_agent.values())), strict=True)
    return [
        Sample(group, SamplePlace(game, at, context, sizes), turns, last, better[game, at])
        for game, played in enumerate(group.games)
        for at, trajectory in enumerate(played.trajectories)
        for context, turns, last in _contexts(trajectory)
        for sizes in [tuple((len(turn.prompt_tokens), len(turn.completion_tokens)) for turn in turns)]
    ]


def _contexts(trajectory: Trajectory) -> Iterator[tuple[int, tuple[Turn, ...], bool]]:
    """The contexts with an answer to train on: number, turns, whether the context is the last."""
    contexts = enumerate(trajectory.contexts()) if trajectory.trainable else ()
    found = [
        (number, turns)
        for number, (_, turns) in contexts
        if turns[0].prompt_tokens and any(turn.completion_tokens for turn in turns)
    ]
    for number, turns in found:
        if any(len(turn.logprobs) != len(turn.completion_tokens) for turn in turns):
            raise UsageError(
                f"{trajectory.id} has no log-probability for each of the tokens that were drawn, which trainers need. "
                "Export what `gpuinfer rollouts` has recorded."
            )
        yield number, turns, number == found[-1][0]


def _along(turns: Sequence[Turn], drawn: Sequence[Sequence[T]], shown: T) -> tuple[T, ...]:
    """One value for each token of the response: `drawn` for tokens that were drawn, else `shown`."""
    values = list(drawn[0]) if drawn else []
    for turn, own in zip(turns[1:], drawn[1:], strict=True):
        values += [shown] * len(turn.prompt_tokens)
        values += own
    return tuple(values)
