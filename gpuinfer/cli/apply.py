"""Writes a variant's settings into gpuinfer.toml: from then on the bare command does what the winner did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuinfer.cli import output
from gpuinfer.cli.building import merge, option_flags, plain_flags
from gpuinfer.cli.flags import SHOWN_ONLY
from gpuinfer.config import registry, settings
from gpuinfer.errors import WorkError


def apply(target: str, flags: Mapping[str, Any]) -> tuple[Path, list[str]]:
    """Put what these flags say into the settings file; all else in it stays, comments too. The file, and what it says.

    Raises `WorkError` when it cannot be written.
    """
    import tomlkit

    merged = merge(target, flags)
    path = merged.file or settings.FILE
    document = tomlkit.parse(path.read_text("utf-8") if path.exists() else "")
    written = []
    for keys in _keys(target, flags, merged.common):
        value = _in_force(merged, keys)
        table: Any = document
        for key in keys[:-1]:
            table = table.setdefault(key, tomlkit.table())
        table[keys[-1]] = value
        written.append(f"{'.'.join(keys)} = {tomlkit.item(value).as_string()}")
    try:
        output.replace_file(path.resolve(), tomlkit.dumps(document))
    except OSError as error:
        raise WorkError(
            f"{path} could not be written: {error.strerror}. Give the flags on the command line."
        ) from error
    return path, written


def overruled(target: str, flags: Mapping[str, Any]) -> list[str]:
    """The environment variables that have the last word on what `apply` writes for these flags."""
    common, bare = merge(target, flags).common, settings.load(config=flags.get("config"))
    origins = (bare.origin(".".join(keys)) for keys in _keys(target, flags, common))
    return [origin for origin in origins if origin.startswith(settings.PREFIX)]


def _keys(target: str, flags: Mapping[str, Any], common: settings.Common) -> Iterator[list[str]]:
    """The settings that these flags are about."""
    for name in {**plain_flags(target, flags), **option_flags(flags, common)}:
        if name not in SHOWN_ONLY:
            yield name.split(".")


def _in_force(merged: settings.Settings, keys: list[str]) -> Any:
    """A setting's value as TOML can hold it."""
    if len(keys) == 1:
        values = merged.common
    else:
        kind, name = ("workloads", keys[0]) if len(keys) == 2 else (keys[0], keys[1])
        plugin = registry.load(kind, name)
        values = plugin.Options(**merged.options(kind, name, plugin))
    value = values.model_dump(mode="json", by_alias=True)[keys[-1]]
    return "none" if value is None else value  # TOML has no null; settings read the word
