"""A rollout run: `gpuinfer rollouts` in a process of its own, with the instant model, and what it leaves on disk; or a
group played in this process, by the engine and the player without a command around them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from forking import Forked, own_environment

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.generation import Sampling
from gpuinfer.rollouts.agent import ChatEncoder
from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.gameplay import GroupPlayer, PlayPlan
from gpuinfer.rollouts.guarded_environment import open_environment
from gpuinfer.rollouts.record import Group
from gpuinfer.runtime.session import Session
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.language import open_language

SECONDS = 120  # after which a process that does not end has failed
HERE = Path(__file__).parent
TABLES = "rollout_tables"
INSTANT = HERE.parent / "generate" / "instant.py"


def started(*words: object) -> Forked:
    line = ["gpuinfer", "rollouts", "--no-roofline", "--no-live", *words]
    return Forked(line, HERE, own_environment(COLUMNS="200"), prepared=INSTANT)


def ended(process: Forked) -> tuple[int, str, str]:
    """The exit code and what it said."""
    out, err = process.communicate(timeout=SECONDS)
    return int(process.returncode or 0), out.decode(), err.decode()


def rollouts(*words: object) -> tuple[int, str, str]:
    with started(*words) as process:
        return ended(process)


def until(condition: Callable[[], object], process: Forked) -> None:
    """Wait for something that a running process does."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, ended(process)
        assert time.monotonic() < end, "that did not come about"
        time.sleep(0.01)


def groups_in(folder: Path) -> list[Group]:
    """All that are there, by number; none where there is no folder yet."""
    return sorted(read(folder), key=lambda group: group.number) if (folder / "manifest.json").exists() else []


def timeless(group: Group) -> object:
    """The record, as plain values, without when it was and what was cached."""

    def without(value):
        if isinstance(value, dict):
            return {name: without(one) for name, one in value.items() if name not in OF_TIME}
        return [without(one) for one in value] if isinstance(value, list) else value

    return without(msgspec.json.decode(msgspec.json.encode(group)))


OF_TIME = ("timing", "cached_tokens", "started", "seconds")


def language_of(name: str) -> Any:
    checkpoint = open_checkpoint(ModelSpec(name, kind="text"))
    return open_language(checkpoint.language, checkpoint.shape)


@contextlib.asynccontextmanager
async def player(
    environment: str, options: Sequence[str] = (), *, model: str = "tiny", slots: int = 8, **plan: Any
) -> AsyncIterator[GroupPlayer]:
    spec = ModelSpec(model, arguments={"slots": slots, "context": 512}, kind="text")
    setup = Setup(model=spec, seed=plan.get("seed", 0))
    name = environment if ":" in environment or environment == "arithmetic" else f"{TABLES}:{environment}"
    plan.setdefault("sampling", Sampling(max_tokens=6, logprobs=0, processed_logprobs=True))
    chat = ChatEncoder(language_of(model))
    try:
        async with Session(InProcess(setup), Dynamic(setup)) as session:
            yield GroupPlayer(session, open_environment(name, options), PlayPlan(**plan), chat)
    finally:
        chat.close()
