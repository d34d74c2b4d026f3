"""The trainers whose form is JSON: prime-rl's `TrainingSample`, SkyRL's `GeneratorOutput`, TRL's `rollout_func`, and
verl's `AgentLoopOutput`, each with the version that it was written for.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gpuinfer.rollouts.export.trainer_format import Block, ExportPiece, Format, Kept, by_start


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

    def pieces(self, line: GeneratorLine) -> Iterator[ExportPiece]:
        lists = (line.gpuinfer, line.prompt_token_ids, line.response_ids, line.loss_masks, line.rollout_logprobs)
        for one in zip(*lists, strict=True):
            yield ExportPiece(*one)


class Metrics(Struct, frozen=True):
    generate_sequences: float  # seconds


class Extra(Struct, frozen=True):
    group: str
    trajectory: str
    versions: tuple[str, ...]
    gpuinfer: Kept


class AgentLoopLine(Struct, frozen=True, kw_only=True):
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    response_logprobs: tuple[float, ...]
    reward_score: float
    num_turns: int  # messages of all sides
    metrics: Metrics
    extra_fields: Extra


class Verl(Format[AgentLoopLine]):
    """One line a sample."""

    name = "verl"
    line = AgentLoopLine

    def lines(self, block: Block) -> Iterator[AgentLoopLine]:
        for sample, kept in block:
            yield AgentLoopLine(
                prompt_ids=sample.prompt,
                response_ids=sample.response,
                response_mask=sample.mask,
                response_logprobs=sample.logprobs,
                reward_score=sample.trajectory.reward,
                num_turns=sample.messages,
                metrics=Metrics(sample.seconds),
                extra_fields=Extra(sample.start, sample.trajectory.id, sample.versions, kept),
            )

    def pieces(self, line: AgentLoopLine) -> Iterator[ExportPiece]:
        kept = line.extra_fields.gpuinfer
        yield ExportPiece(kept, line.prompt_ids, line.response_ids, line.response_mask, line.response_logprobs)


class TrainingLine(Struct, frozen=True, kw_only=True):
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    temperatures: tuple[float, ...]
    env_name: str
    ref_logprobs: tuple[float, ...] | None
    advantages: tuple[float, ...]
    reward: float
    trace_id: str
    branch_index: int
    gpuinfer: Kept


class PrimeRl(Format[TrainingLine]):
    """One line a sample."""

    name = "prime-rl"
    line = TrainingLine

    def lines(self, block: Block) -> Iterator[TrainingLine]:
        for sample, kept in block:
            shown, mask, reference = len(sample.prompt), sample.mask, sample.reference_logprobs
            yield TrainingLine(
                token_ids=sample.prompt + sample.response,
                mask=(False,) * shown + tuple(map(bool, mask)),
                logprobs=(0.0,) * shown + sample.logprobs,
                temperatures=(1.0,) * shown + sample.temperatures,
                env_name=sample.group.environment,
                ref_logprobs=None if reference is None else (0.0,) * shown + reference,
                advantages=(0.0,) * shown + tuple(sample.advantage * drawn for drawn in mask),
                reward=sample.trajectory.reward,
                trace_id=sample.trajectory.id,
                branch_index=sample.place.context,
                gpuinfer=kept,
            )

    def pieces(self, line: TrainingLine) -> Iterator[ExportPiece]:
        shown = line.gpuinfer.place.sizes[0][0] if line.gpuinfer.place.sizes else 0
        mask = tuple(map(int, line.mask[shown:]))
        yield ExportPiece(line.gpuinfer, line.token_ids[:shown], line.token_ids[shown:], mask, line.logprobs[shown:])


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
            samples = [sample for sample, _ in of_agent]
            yield RolloutLine(
                prompt_ids=tuple(one.prompt for one in samples),
                completion_ids=tuple(one.response for one in samples),
                logprobs=tuple(one.logprobs for one in samples),
                env_mask=tuple(one.mask for one in samples),
                reward=tuple(one.trajectory.reward for one in samples),
                group=tuple(one.start for one in samples),
                trajectory=tuple(one.trajectory.id for one in samples),
                gpuinfer=tuple(kept for _, kept in of_agent),
            )

    def pieces(self, line: RolloutLine) -> Iterator[ExportPiece]:
        lists = (line.gpuinfer, line.prompt_ids, line.completion_ids, line.env_mask, line.logprobs)
        for one in zip(*lists, strict=True):
            yield ExportPiece(*one)
