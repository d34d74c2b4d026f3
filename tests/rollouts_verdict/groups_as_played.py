"""Groups as if they had been played, for what comes after play."""

from __future__ import annotations

from collections.abc import Sequence

from gpuinfer.rollouts.record import Game, Group, Span, Trajectory, Turn


def turn(prompt: Sequence[int], completion: Sequence[int], *, step: int = 0, anew: bool = False) -> Turn:
    return Turn(
        step=step,
        messages=({"role": "user", "content": "now?"},),
        anew=anew,
        prompt_tokens=tuple(prompt),
        completion_tokens=tuple(completion),
        text="so",
        finish_reason="stop",
        logprobs=(-1.0,) * len(completion),
        policy_logprobs=(-1.5,) * len(completion),
        spans=(Span(0, ""),),
    )


def trajectory(agent: str, turns: Sequence[Turn], *, trainable: bool = True) -> Trajectory:
    return Trajectory(
        id=f"g0/0/{agent}",
        agent=agent,
        role="policy" if trainable else "opponent",
        trainable=trainable,
        model="tiny",
        turns=tuple(turns),
        reward=0.0,
    )


def group(*games: Sequence[Trajectory], seconds: float = 1.0) -> Group:
    played = tuple(
        Game(sample=sample, seed=1, ending="done", trajectories=tuple(given), steps=1)
        for sample, given in enumerate(games)
    )
    return Group(id="g0", number=0, environment="made up", games=played, seconds=seconds)
