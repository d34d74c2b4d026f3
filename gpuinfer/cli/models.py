"""List the models of text on this machine: their size, family, and what would serve them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from gpuinfer import api
from gpuinfer.config import settings
from gpuinfer.config.options import check

NAME = "models"
SCHEMA = "gpuinfer.models/1"
SERVED = {"native": "native decoder", "transformers": "transformers decoder", "vllm": "vLLM", "none": "not served"}
TITLES = {"cache": "Hugging Face cache", "package": "installed packages", "folder": "folders", "file": "GGUF files"}

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


class ModelsOptions(api.Options):
    """The settings of `gpuinfer models`."""

    folders: list[str] = Field([], description="folders and GGUF files that are always listed")


@app.command(NAME)
def models(
    folders: Annotated[list[str] | None, typer.Argument(help="folders that hold models, and GGUF files")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write it as JSON.")] = False,
    file: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file.")] = None,
) -> None:
    """List the models of text on this machine: those of the Hugging Face cache, of installed packages, and in folders.

    Each with what --model takes, its size, its family, and what would serve it. The folders of the setting
    models.folders are listed too. No weights are read.
    """
    from gpuinfer.text.hub_cache import hub_folder
    from gpuinfer.text.model_listing import listed_models

    merged = settings.load(config=file)
    own = ModelsOptions(**check(ModelsOptions, merged.table(NAME), NAME))
    found = listed_models(list(dict.fromkeys([*own.folders, *(folders or [])])))
    if as_json:
        document = {"schema": SCHEMA, "cache": str(hub_folder()), "models": [asdict(one) for one in found]}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo(
            f"No model in {hub_folder()}, in installed packages, or in folders that are given. "
            "`--download` of other commands fetches one: gpuinfer chat --model OWNER/NAME --download"
        )
    from gpuinfer.cli.screen.display import facts

    for source, title in TITLES.items():
        if rows := [_row(one) for one in found if one.source == source]:
            facts(f"{title} {hub_folder()}" if source == "cache" else title, rows)


def _row(one: Any) -> tuple[str, str, str]:
    """Name; size and kind; what serves it."""
    from gpuinfer.units import memory, number

    count = f"{number(one.parameters).replace(' ', '')} parameters" if one.parameters else ""
    what = [memory(one.size), one.family or "", count, (one.dtype or "").lower()]
    served = SERVED[one.server] + (f": {one.reason}" if one.reason else "")
    return f"  {one.name}", ", ".join(filter(None, what)), served
