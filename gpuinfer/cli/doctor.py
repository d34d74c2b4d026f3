"""The machine, the versions, the plugins: what would run here and what would not, and why."""

from __future__ import annotations

import typer

from gpuinfer.cli import examination
from gpuinfer.cli.problems import FAILED

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command("doctor")
def doctor() -> None:
    """The machine, the versions, the plugins: what would run here and what would not, and why.

    Exits 1 when something is broken.
    """
    from gpuinfer.screen.display import facts

    healthy = True
    for title, findings in examination.examine():
        facts(title, [(f"  {_mark(finding)} {finding.name}", finding.value, finding.remark) for finding in findings])
        healthy = healthy and all(finding.ok or not finding.serious for finding in findings)
    if not healthy:
        raise typer.Exit(FAILED)


def _mark(finding: examination.Finding) -> str:
    return "✓" if finding.ok else "✗" if finding.serious else "–"
