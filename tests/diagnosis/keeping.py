"""What the verdict looked at, kept: so that another verdict can be tried on the same runs later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.report import report
from gpuinfer.report.evidence import Evidence


@contextlib.contextmanager
def judged() -> Iterator[list[Evidence]]:
    """The evidence of every run that is reported meanwhile."""
    seen: list[Evidence] = []
    judge = report.judge

    def noting(run: Evidence) -> dict[str, Any]:
        seen.append(run)
        return judge(run)

    report.judge = noting
    try:
        yield seen
    finally:
        report.judge = judge


def to_plain(run: Evidence) -> dict[str, Any]:
    """For JSON."""
    return asdict(run)


def from_plain(kept: Mapping[str, Any]) -> Evidence:
    """Fields that an older or a newer verdict does not know are left out."""
    known = {field.name for field in fields(Evidence)}
    values = {name: value for name, value in kept.items() if name in known}
    values["batch_s"] = {int(rows): sums for rows, sums in kept["batch_s"].items()}
    values["roofline"] = Roofline(**kept["roofline"]) if kept["roofline"] else None
    return Evidence(**values)
