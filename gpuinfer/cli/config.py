"""The merged settings, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from gpuinfer.config import registry
from gpuinfer.config.options import fields_of, missing_options
from gpuinfer.errors import PluginError
from gpuinfer.host import error_text

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command("config")
def config(
    as_json: Annotated[bool, typer.Option("--json", help="Write it as JSON.")] = False,
    file: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file.")] = None,
) -> None:
    """The merged settings, and where each came from: flag > environment > gpuinfer.toml > default."""
    from gpuinfer.config import settings

    merged = settings.load(config=file)
    rows = list(_rows(merged))
    if as_json:
        plain = {key: {"value": value, "origin": origin} for key, value, origin in rows}
        typer.echo(json.dumps(plain, indent=2, default=error_text.safe_str))
        return
    from gpuinfer.cli.screen.display import facts

    shown = [(key, json.dumps(value, default=error_text.safe_str), origin) for key, value, origin in rows]
    facts(f"settings ({merged.file or 'no gpuinfer.toml here'})", shown)


def _rows(merged: Any) -> Iterator[tuple[str, Any, str]]:
    """Key, value in force, origin: the common ones, then those of each plugin that has a say."""
    for key, value in merged.common.model_dump(mode="json", by_alias=True).items():
        yield key, value, merged.origin(key)
    used = [("backends", merged.common.backend), ("strategies", merged.common.strategy)]
    for kind, name in [*used, *(("workloads", name) for name in registry.names("workloads"))]:
        yield from _plugin_rows(merged, kind, name)


def _plugin_rows(merged: Any, kind: str, name: str) -> Iterator[tuple[str, Any, str]]:
    from gpuinfer.config.settings import table_name

    table = table_name(kind, name)
    try:
        plugin = registry.load(kind, name)
    except PluginError as error:
        yield from ((f"{table}.{key}", one.value, one.origin) for key, one in merged.table(table).items())
        yield table, None, f"cannot be loaded: {error}"
        return
    if not (isinstance(getattr(plugin, "Options", None), type) and issubclass(plugin.Options, BaseModel)):
        yield table, None, "its Options is no pydantic model: see gpuinfer plugins check"
        return
    given = merged.options(kind, name, plugin, complete=False)
    wanting = missing_options(plugin.Options, given)
    values = (
        _defaults(plugin.Options) | given if wanting else plugin.Options(**given).model_dump(mode="json", by_alias=True)
    )
    for key, value in values.items():
        yield f"{table}.{key}", value, merged.origin(f"{table}.{key}")
    for key in wanting:
        yield f"{table}.{key}", None, "required, not set"


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Of the options that have one."""
    fields = {key: field for key, field in fields_of(model).items() if not field.is_required()}
    return {key: field.get_default(call_default_factory=True, validated_data={}) for key, field in fields.items()}
