"""Games that are played again by what was said in a record, while the model draws freely, and just as much.

So a run without constraints has the positions, the prompts and the lengths of answers of one with them, and what
differs is what the constraint takes. Free text would be no orders: all games would stand still in one position, whose
prompt would be in the cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuinfer.api import Infer, ModelSpec, Progress, Workload
from gpuinfer.errors import WorkError
from gpuinfer.generation import Generation, Prompt
from gpuinfer.rollouts.passing import Passing
from gpuinfer.rollouts.record import Group


@dataclass(frozen=True, slots=True)
class Said:
    """An answer of a record."""

    text: str
    length: int  # in tokens


def said(groups: Iterable[Group]) -> dict[str, Said]:
    """All that was answered, by the prompt's key: group/sample/agent/number of the turn."""
    return {
        f"{trajectory.id}/{number}": Said(turn.text, len(turn.completion_tokens))
        for group in groups
        for game in group.games
        for trajectory in game.trajectories
        for number, turn in enumerate(trajectory.turns)
    }


class Led(Workload):
    """Rollouts `own` of the same seed and settings as the record, led by what was said there."""

    def __init__(self, own: Workload, answers: Mapping[str, Said]) -> None:
        super().__init__(own.setup)
        self._own, self._answers = own, answers

    def model(self) -> ModelSpec | None:
        return self._own.model()

    @property
    def deterministic(self) -> bool:
        return self._own.deterministic

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        async for progress in self._own.run(Leading(infer, self._answers)):
            yield progress


class Leading(Passing):
    """Draws as many tokens as the record has, and says what it says."""

    def __init__(self, own: Infer, answers: Mapping[str, Said]) -> None:
        super().__init__(own)
        self._answers = answers

    async def __call__(self, payload: Any, **ways: Any) -> Any:
        answer = self._answer(payload)
        free = msgspec.structs.replace(
            payload.sampling, constraint=None, max_tokens=answer.length, min_tokens=0, ignore_eos=True
        )
        found: Generation = await self._own(msgspec.structs.replace(payload, sampling=free), **ways)
        spoken = tuple(msgspec.structs.replace(one, text=answer.text) for one in found.completions)
        return msgspec.structs.replace(found, completions=spoken)

    def _answer(self, prompt: Prompt) -> Said:
        try:
            return self._answers[prompt.key]
        except KeyError:
            raise WorkError(
                f"the record has no answer to {prompt.key}: the games have gone another way than when they were "
                "recorded. Compare with an environment that keeps to its seed."
            ) from None
