"""SkyRL: `GeneratorOutput` of skyrl.train.generators.base (0.4).

One line a group, its lists as long as it has samples. `trajectory_ids` are {instance_id, repetition_id}, to be made
`TrajectoryID(**one)`; `instance_id` names the start and the agent, over which advantages are computed. The contexts of
one trajectory follow one another, and `is_last_step` marks the last (`step_wise_trajectories`).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gpuinfer.rollouts.export.form import Format
from gpuinfer.rollouts.export.kept import Block, Kept, Piece


class TrajectoryId(Struct, frozen=True):
    instance_id: str
    repetition_id: int


class GeneratorLine(Struct, frozen=True, kw_only=True):
    prompt_token_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]
    loss_masks: tuple[tuple[int, ...], ...]
    stop_reasons: tuple[str, ...]
    rollout_metrics: dict[str, float]
    rollout_logprobs: tuple[tuple[float, ...], ...]
    trajectory_ids: tuple[TrajectoryId, ...]
    is_last_step: tuple[bool, ...]
    gpuinfer: tuple[Kept, ...]


class SkyRl(Format[GeneratorLine]):
    """One line a group."""

    name = "skyrl"
    line = GeneratorLine

    def lines(self, block: Block) -> Iterator[GeneratorLine]:
        samples = [sample for sample, _ in block]
        yield GeneratorLine(
            prompt_token_ids=tuple(one.prompt for one in samples),
            response_ids=tuple(one.response for one in samples),
            rewards=tuple(one.trajectory.reward for one in samples),
            loss_masks=tuple(one.mask for one in samples),
            stop_reasons=tuple(one.turns[-1].finish_reason for one in samples),
            rollout_metrics={},
            rollout_logprobs=tuple(one.logprobs for one in samples),
            trajectory_ids=tuple(TrajectoryId(one.start, one.repetition) for one in samples),
            is_last_step=tuple(one.last for one in samples),
            gpuinfer=tuple(kept for _, kept in block),
        )

    def pieces(self, line: GeneratorLine) -> Iterator[Piece]:
        lists = (line.gpuinfer, line.prompt_token_ids, line.response_ids, line.loss_masks, line.rollout_logprobs)
        for one in zip(*lists, strict=True):
            yield Piece(*one)
