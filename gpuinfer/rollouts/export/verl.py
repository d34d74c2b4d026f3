"""verl: what an agent loop returns, `AgentLoopOutput` of verl.experimental.agent_loop (0.9).

One line a sample: `AgentLoopOutput.model_validate_json(line)`. A trajectory that forgot what was said before is several
samples of one reward. `extra_fields.group` names the start and the agent: what GRPO compares.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gpuinfer.rollouts.export.form import Format
from gpuinfer.rollouts.export.kept import Block, Kept, Piece


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

    def pieces(self, line: AgentLoopLine) -> Iterator[Piece]:
        kept = line.extra_fields.gpuinfer
        yield Piece(kept, line.prompt_ids, line.response_ids, line.response_mask, line.response_logprobs)
