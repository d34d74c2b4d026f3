"""Who speaks for which role: the policy, an adapter, or another model beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.generation import MOST_TEMPERATURE
from gpuinfer.openai.adapters import adapters_of, digests_of, pairs_of
from gpuinfer.workloads.rollouts.speaking import POLICY

ADAPTER = "adapter:"
START = "v0"  # the version of adapters that are there from the start


@dataclass(frozen=True)
class Opponent:
    """Who plays a role that does not learn. Exactly one is set."""

    model: str | None = None
    adapter: str | None = None

    @property
    def name(self) -> str:
        return self.model or str(self.adapter)


@dataclass(frozen=True)
class Cast:
    """What the flags say of who plays."""

    opponents: Mapping[str, Opponent]  # by role
    temperatures: Mapping[str, float]  # likewise
    adapters: Mapping[str, Path]  # by name

    @classmethod
    def of(cls, opponents: Sequence[str], temperatures: Sequence[str], adapters: Sequence[str]) -> Cast:
        """Raises `UsageError` for what is not of the flags' form, or names what is not there."""
        found = cls(
            {role: _opponent(role, said) for role, said in pairs_of("--opponent", opponents, "role=MODEL").items()},
            {
                role: _temperature(role, said)
                for role, said in pairs_of("--role-temperature", temperatures, "role=0.7").items()
            },
            adapters_of(adapters),
        )
        for role, one in found.opponents.items():
            if one.adapter is not None and one.adapter not in found.adapters:
                raise UsageError(
                    f"--opponent {role}={ADAPTER}{one.adapter}: no such adapter. Add --adapter {one.adapter}=DIR."
                )
        return found

    @property
    def policy(self) -> str | None:
        """The adapter of those who learn; None: the model itself."""
        return POLICY if POLICY in self.adapters else None

    def deciding(self) -> dict[str, Any]:
        """What a record depends on, as plain values. Reads the adapters' files."""
        return {
            "opponents": {role: one.name for role, one in self.opponents.items()},
            "temperatures": dict(self.temperatures),
            "adapters": digests_of(self.adapters),
        }


def _opponent(role: str, said: str) -> Opponent:
    if said.startswith(ADAPTER):
        return Opponent(adapter=said.removeprefix(ADAPTER))
    return Opponent(model=said)


def _temperature(role: str, said: str) -> float:
    try:
        number = float(said)
    except ValueError:
        number = -1.0
    if not 0 <= number <= MOST_TEMPERATURE:
        raise UsageError(
            f"--role-temperature {role}={said}: no temperature. Give a number from 0 to {MOST_TEMPERATURE:g}."
        )
    return number
