"""A group played in this process: the built-in model, the engine and the player, without a command around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.generation import Sampling
from gpuinfer.rollouts.agent import ChatEncoder
from gpuinfer.rollouts.gameplay import GroupPlayer, PlayPlan
from gpuinfer.rollouts.guarded_environment import open_environment
from gpuinfer.runtime.session import Session
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.language import open_language

HERE = "rollout_tables"


def language_of(name: str) -> Any:
    checkpoint = open_checkpoint(ModelSpec(name, kind="text"))
    return open_language(checkpoint.language, checkpoint.shape)


@contextlib.asynccontextmanager
async def player(
    environment: str, options: Sequence[str] = (), *, model: str = "tiny", slots: int = 8, **plan: Any
) -> AsyncIterator[GroupPlayer]:
    spec = ModelSpec(model, arguments={"slots": slots, "context": 512}, kind="text")
    setup = Setup(model=spec, seed=plan.get("seed", 0))
    name = environment if ":" in environment or environment == "arithmetic" else f"{HERE}:{environment}"
    plan.setdefault("sampling", Sampling(max_tokens=6, logprobs=0, processed_logprobs=True))
    chat = ChatEncoder(language_of(model))
    try:
        async with Session(InProcess(setup), Dynamic(setup)) as session:
            yield GroupPlayer(session, open_environment(name, options), PlayPlan(**plan), chat)
    finally:
        chat.close()
