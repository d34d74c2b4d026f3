"""Groups as if they had been played: small, and exact in what the training side reads of them."""

from __future__ import annotations

from gpuinfer.rollouts.record import Game, Group, Span, Trajectory, Turn


def turn(versions=("v0",), logprobs=(-1.0, -2.0), *, reference=None, policy=None, step=0):
    """One answer; its tokens are spread over these versions."""
    tokens = tuple(range(max(len(logprobs), len(versions))))
    return Turn(
        step=step,
        messages=({"role": "user", "content": "go"},),
        anew=False,
        prompt_tokens=(1, 2, 3),
        completion_tokens=tokens,
        text="x" * len(tokens),
        finish_reason="stop",
        logprobs=tuple(logprobs),
        reference_logprobs=reference,
        policy_logprobs=policy,
        spans=tuple(Span(start, name) for start, name in enumerate(versions)),
    )


def trajectory(*turns, id="0/0/a", trainable=True, model="policy"):
    return Trajectory(
        id=id, agent=id.rpartition("/")[2], role="policy", trainable=trainable, model=model, turns=turns, reward=1.0
    )


def game(*trajectories, sample=0):
    return Game(sample=sample, seed=1, ending="done", trajectories=trajectories, steps=1)


def group(number=0, versions=("v0",), *, games=1, opponent=(), started=0.0, seconds=0.0):
    """`versions` drew its trainable tokens, `opponent` those of another player."""
    played = []
    for sample in range(games):
        sides = [trajectory(turn(versions), id=f"{number}/{sample}/a")]
        if opponent:
            sides.append(trajectory(turn(opponent), id=f"{number}/{sample}/b", trainable=False, model="other"))
        played.append(game(*sides, sample=sample))
    return Group(
        id=str(number), number=number, environment="toy", games=tuple(played), started=started, seconds=seconds
    )
