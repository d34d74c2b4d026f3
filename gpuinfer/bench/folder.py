"""The files of a comparison: JSON for programs, Markdown and a page for people, plots for both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.bench import pages, plots
from gpuinfer.errors import WorkError


def write(folder: Path, document: Mapping[str, Any]) -> None:
    """Put `bench.json`, `bench.md`, `bench.html` and a PNG for each plot into the folder.

    Raises `WorkError` when one of them cannot be written.
    """
    figures = plots.plots(document)
    svg = {name: plots.image(figure, "svg") for name, figure in figures.items()}
    png = {name: plots.image(figure, "png") for name, figure in figures.items()}
    texts = {
        "bench.json": json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "bench.md": pages.markdown(document, png),
        "bench.html": pages.page(document, svg),
    }
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, picture in png.items():
            (folder / f"{name}.png").write_bytes(picture)
    except OSError as error:
        raise WorkError(
            f"the report could not be written to {folder}: {error.strerror}. Make room there, or give another --report."
        ) from error
