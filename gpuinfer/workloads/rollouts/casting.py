"""Who speaks for which role: the policy, an adapter, or another model beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.generation import MOST_TEMPERATURE
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
            {role: _opponent(role, said) for role, said in _pairs("--opponent", opponents, "role=MODEL").items()},
            {
                role: _temperature(role, said)
                for role, said in _pairs("--role-temperature", temperatures, "role=0.7").items()
            },
            {name: _folder(name, said) for name, said in _pairs("--adapter", adapters, "NAME=DIR").items()},
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
            "adapters": {name: _digest(folder) for name, folder in self.adapters.items()},
        }


def _pairs(flag: str, given: Sequence[str], form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UsageError(f"{flag} {word}: not of the form {form}. Write {flag} {form}.")
        if name in found:
            raise UsageError(f"{flag} names '{name}' twice. Leave one of them out.")
        found[name.strip()] = value.strip()
    return found


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


def _folder(name: str, said: str) -> Path:
    folder = Path(said)
    if not (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"--adapter {name}={said}: there is no adapter_config.json in it. Name a folder with a LoRA "
            "adapter as PEFT writes it."
        )
    return folder


def _digest(folder: Path) -> str:
    """Of all its files, by name."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.is_file():
            found.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()
