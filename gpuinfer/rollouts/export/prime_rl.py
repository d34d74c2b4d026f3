"""prime-rl: `TrainingSample` of prime_rl.transport.types, as it is since a sample is one flat sequence of tokens.

One line a sample, by the names of its fields, since their places differ from version to version:
`TrainingSample(**{name: value for name, value in line.items() if name in TrainingSample.__struct_fields__})`. All lists
are as long as `token_ids`. Advantages are relative to the group (Shao et al. 2024): the trainer computes none.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gpuinfer.rollouts.export.form import Format
from gpuinfer.rollouts.export.kept import Block, Kept, Piece
from gpuinfer.rollouts.export.samples import Sample


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
            yield _line(sample, kept)

    def pieces(self, line: TrainingLine) -> Iterator[Piece]:
        shown = line.gpuinfer.place.sizes[0][0] if line.gpuinfer.place.sizes else 0
        mask = tuple(map(int, line.mask[shown:]))
        yield Piece(line.gpuinfer, line.token_ids[:shown], line.token_ids[shown:], mask, line.logprobs[shown:])


def _line(sample: Sample, kept: Kept) -> TrainingLine:
    shown = len(sample.prompt)
    mask = sample.mask
    reference = sample.reference_logprobs
    return TrainingLine(
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
