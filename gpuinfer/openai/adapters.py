"""Adapters as flags of commands: which folders, by which names, and what tells their weights from others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from gpuinfer import api
from gpuinfer.errors import UsageError
from gpuinfer.openai.options import REPEATABLE


class AdapterOptions(api.Options):
    """Adapters over the model that a command names."""

    adapter: list[str] = Field(
        [],
        max_length=64,
        description="a LoRA adapter over the model, as NAME=DIR; repeatable",
        json_schema_extra=REPEATABLE,
    )


def adapters_of(given: Sequence[str]) -> dict[str, Path]:
    """Folders by name, in their order. Raises `UsageError` for what is not of the form, or no adapter's folder."""
    return {name: _folder(name, said) for name, said in pairs_of("--adapter", given, "NAME=DIR").items()}


def pairs_of(flag: str, given: Sequence[str], form: str) -> dict[str, str]:
    """What a flag says each time, split at its first `=`. Raises `UsageError`, which shows the form."""
    found: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UsageError(f"{flag} {word}: not of the form {form}. Write {flag} {form}.")
        if name.strip() in found:
            raise UsageError(f"{flag} names '{name.strip()}' twice. Leave one of them out.")
        found[name.strip()] = value.strip()
    return found


def digests_of(adapters: Mapping[str, Path]) -> dict[str, str]:
    """What tells each from another of its name. Reads their files."""
    return {name: _digest(folder) for name, folder in adapters.items()}


def _folder(name: str, said: str) -> Path:
    folder = Path(said)
    if not (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"--adapter {name}={said}: there is no adapter_config.json in it. Name a folder with a LoRA "
            "adapter as PEFT writes it."
        )
    return folder.resolve()  # other processes may be elsewhere


def _digest(folder: Path) -> str:
    """Of all its files, by name."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.is_file():
            found.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()
