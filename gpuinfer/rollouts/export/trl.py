"""TRL: what the `rollout_func` of a GRPOTrainer returns (1.16).

One line a group of one agent, its lists as long as there are samples: a `rollout_func` returns `json.loads(line)` as it
is, where `num_generations` is the run's samples in a group (and no agent forgets: each context is a sample). `env_mask`
keeps what the environment said out of the loss; `reward` and the others are handed to reward functions.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gpuinfer.rollouts.export.form import Format
from gpuinfer.rollouts.export.kept import Block, Kept, Piece, by_start


class RolloutLine(Struct, frozen=True, kw_only=True):
    prompt_ids: tuple[tuple[int, ...], ...]
    completion_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    env_mask: tuple[tuple[int, ...], ...]
    reward: tuple[float, ...]
    group: tuple[str, ...]
    trajectory: tuple[str, ...]
    gpuinfer: tuple[Kept, ...]


class Trl(Format[RolloutLine]):
    """One line a group of one agent."""

    name = "trl"
    line = RolloutLine

    def lines(self, block: Block) -> Iterator[RolloutLine]:
        for of_agent in by_start(block):
            yield _line(of_agent)

    def pieces(self, line: RolloutLine) -> Iterator[Piece]:
        lists = (line.gpuinfer, line.prompt_ids, line.completion_ids, line.env_mask, line.logprobs)
        for one in zip(*lists, strict=True):
            yield Piece(*one)


def _line(block: Block) -> RolloutLine:
    samples = [sample for sample, _ in block]
    return RolloutLine(
        prompt_ids=tuple(one.prompt for one in samples),
        completion_ids=tuple(one.response for one in samples),
        logprobs=tuple(one.logprobs for one in samples),
        env_mask=tuple(one.mask for one in samples),
        reward=tuple(one.trajectory.reward for one in samples),
        group=tuple(one.start for one in samples),
        trajectory=tuple(one.trajectory.id for one in samples),
        gpuinfer=tuple(kept for _, kept in block),
    )
