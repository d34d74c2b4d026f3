"""What each part of fast generation brings, as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.lab.bench.comparison import interval_text
from gpuinfer.lab.presenter import Page, Table
from gpuinfer.units import number

COLUMNS = ("part", "with → without", "tokens/s without", "brings", "95 %")
BRIEF = ("part", "tokens/s without", "brings", "95 %")
MISSING = "–"


def ablation_page(title: str, document: Mapping[str, Any]) -> Page:
    """A row for each part; of those that are not at work here the reason."""
    found, rows, notes = document["ablation"], list[list[str]](), list[tuple[str, str]]()
    for one in found["parts"]:
        if one["brings"] is None:
            rows.append([one["part"], one["means"], MISSING, "not at work here", ""])
            notes.append((one["part"], one["why_not"] or "not measured"))
            continue
        ends = one["ci95"]
        tie = " tie" if ends and ends[0] <= 1 <= ends[1] else ""
        span = interval_text(ends).strip(" ()") or "unknown"
        rows.append([one["part"], one["means"], number(one["without"]), f"{one['brings']:.2f}×{tie}", span])
    runs = max((len(row["rates"]) for row in document["comparison"]), default=0)
    whole = "nothing" if found["whole"] is None else f"{number(found['whole'])} tokens/s"
    times = f"{runs} run{'s' if runs > 1 else ''}"
    about = (
        f"the whole makes {whole}: {found['num_sequences']} sequences of {found['new_tokens']} new tokens after "
        f"{found['prompt_tokens']}, {found['batch_size']} at once; median of {times} in turn"
    )
    brief = Table(BRIEF, [[one[0], *one[2:]] for one in rows])
    return Page(title, document["verdict"], document["command"], Table(COLUMNS, rows), about, brief=brief, notes=notes)
