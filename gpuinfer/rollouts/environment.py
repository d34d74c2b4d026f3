"""What an environment is: all that its author reads.

An environment is one game. It shows each agent what it may see, takes what the agents say, and scores them. It knows
neither models nor tokens. `gpuinfer.environments` is the entry-point group; `module:factory` names one too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer import api
from gpuinfer.generation import Constraint


@dataclass(frozen=True, slots=True)
class Observation:
    """What one agent is shown when it is to speak."""

    messages: Sequence[Mapping[str, Any]]  # a chat: {role, content}, those that are new to it since it last spoke
    anew: bool = False  # the agent's earlier messages are dropped: these are the whole chat
    constraint: Constraint | None = None  # what its answer must match
    max_tokens: int | None = None  # of its answer; None: as the run says


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the agents' answers."""

    rewards: Mapping[str, float] = field(default_factory=dict)  # of this step, by agent; those not named got none
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the game so far, such as illegal orders
    remark: str = ""  # what is amiss with the answers, and the cure, for the user; the first of a run is shown


class Environment(ABC):
    """One game. All calls come one after another; an await in one keeps no other game waiting.

    `Options` become `--env-option key=value`; one that is called `horizon` takes `--horizon`, in units of its own.
    Raises `pydantic.ValidationError` for an unknown or ill-typed option.
    """

    class Options(api.Options):
        """No options unless an environment declares some."""

    options: Any

    def __init__(self, **options: Any) -> None:
        self.options = self.Options(**options)

    agents: Sequence[str]  # all that may ever speak, such as the seven powers; fixed after `reset`
    roles: Mapping[str, str] = {}  # agent → role, such as "policy" or "opponent"; those not named are "policy"

    @abstractmethod
    async def reset(self, seed: int) -> None:
        """Begin. The same seed is the same start and the same chance, whatever was played before."""

    @abstractmethod
    async def observe(self) -> Mapping[str, Observation]:
        """Who is to speak now, and what each is shown; they speak at once, unseen by one another. Empty: nobody, and
        `step` goes on without answers.
        """

    @abstractmethod
    async def step(self, answers: Mapping[str, str]) -> Outcome:
        """Take each agent's answer, whatever it is: text that makes no sense costs reward, it is no error."""

    async def close(self) -> None:  # noqa: B027  most have nothing to let go of
        """Let go of everything. Called once."""
