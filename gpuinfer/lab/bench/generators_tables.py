"""Generators over batch sizes: their part of the document, and how it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer.lab.bench.bench_plots import draw_batch_sizes
from gpuinfer.lab.bench.comparison import interval_text
from gpuinfer.lab.bench.generators import SEQUENTIAL, Contest, GeneratorCell, Generators
from gpuinfer.lab.bench.measurement import ratio
from gpuinfer.lab.bench.series import SeriesOutcome
from gpuinfer.lab.peers.peer_process import PROGRAMS, python_of
from gpuinfer.lab.presenter import Page, Table, plot
from gpuinfer.units import number

Document = Mapping[str, Any]
OURS = "batched"
MISSING = "–"


def generators_document(document: dict[str, Any], work: Contest, generators: Generators) -> dict[str, Any]:
    """The document of the cells, with what they are together."""
    known = [name for name in work.names if name in generators.versions]
    document["grid"] = {
        "new_tokens": work.new_tokens,
        "batch_sizes": list(work.batch_sizes),
        "num_sequences": work.sequences,
        "generators": [
            {"name": name, "version": generators.versions.get(name), "python": python_of(name, work.pythons)}
            for name in work.names
        ],
        "ratios": list(_ratios(known, work.batch_sizes, generators.outcome)),
    }
    document["verdict"], document["why"] = generators_verdict(document), ""
    return document


def _ratios(names: Sequence[str], batch_sizes: Sequence[int], outcome: SeriesOutcome) -> Iterator[dict[str, Any]]:
    """Of ours, or of the first where that is not among them, to each of the others at the same batch size."""
    first = OURS if OURS in names else next(iter(names), "")
    for name in names:
        for batch_size in batch_sizes if name != first else ():
            ours, theirs = (
                _rates(GeneratorCell(first, batch_size), outcome),
                _rates(GeneratorCell(name, batch_size), outcome),
            )
            both = sorted(ours.keys() & theirs.keys())
            if both:
                found = ratio([ours[one] for one in both], [theirs[one] for one in both])
                yield {
                    "of": first,
                    "to": name,
                    "batch_size": batch_size,
                    "median": None if math.isnan(found.median) else found.median,
                    "ci95": found.ends,
                }


def _rates(cell: GeneratorCell, outcome: SeriesOutcome) -> dict[int, float]:
    return {one.repeat: one.rate for one in outcome.runs if one.variant == cell.name}


def generators_verdict(document: Document) -> str:
    """Our speed as multiples of each other generator's, at the largest batch size that was measured."""
    ratios = [one for one in document["grid"]["ratios"] if one["median"]]
    if not ratios:
        return "Nothing was measured that can be compared."
    largest = max(one["batch_size"] for one in ratios)
    at_largest = [one for one in ratios if one["batch_size"] == largest]
    each = ", ".join(f"{one['median']:.2f}× {one['to']}{interval_text(one['ci95'])}" for one in at_largest)
    return f"At batch size {largest} {at_largest[0]['of']} makes {each}."


def generators_page(title: str, document: Document) -> Page:
    """A row for each generator, and one for each that ours is compared with; a column for each batch size."""
    grid = document["grid"]
    columns = ("tokens/s at batch size", *map(str, grid["batch_sizes"]))
    runs = max((len(row["rates"]) for row in document["comparison"]), default=0)
    found = [(PROGRAMS[one["name"]].package, one["version"]) for one in grid["generators"]]
    sequences = f"{grid['num_sequences']} prompts a run, " if grid.get("num_sequences") else ""
    versions = {package: version for package, version in found if version}
    return Page(
        title,
        document["verdict"],
        document["command"],
        Table(columns, list(_rows(document))),
        f"median of {runs} run{'s' if runs > 1 else ''} in turn, {grid['new_tokens']} new tokens a prompt, "
        f"{sequences}"
        "the likeliest each time, past the end token",
        brief=Table(columns, list(_rows(document, intervals=False))),
        notes=[("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))],
        plots={
            "batch_sizes": plot("Tokens per second by batch size", 8, lambda axes: draw_batch_sizes(axes, document))
        },
    )


def _rows(document: Document, intervals: bool = True) -> Iterator[list[str]]:
    """What is sequential has one speed."""
    grid = document["grid"]
    found = {(row["settings"]["generator"], row["settings"]["batch_size"]): row for row in document["comparison"]}
    for one in grid["generators"]:
        alone = one["name"] == SEQUENTIAL
        cells = [found.get((one["name"], "1" if alone else str(size))) for size in grid["batch_sizes"]]
        yield [one["name"], *(_speed(cell, intervals) for cell in cells)]
    ratios = {(one["of"], one["to"], one["batch_size"]): one for one in grid["ratios"]}
    for of, to in dict.fromkeys((of, to) for of, to, _ in ratios):
        yield [f"{of} ÷ {to}", *(_ratio(ratios.get((of, to, size)), intervals) for size in grid["batch_sizes"])]


def _speed(row: Mapping[str, Any] | None, intervals: bool) -> str:
    if row is None:
        return MISSING
    ends = f" ({number(row['ci95'][0])} to {number(row['ci95'][1])})" if row["ci95"] and intervals else ""
    return f"{number(row['median'])}{ends}"


def _ratio(found: Mapping[str, Any] | None, intervals: bool) -> str:
    if found is None or found["median"] is None:
        return MISSING
    tie = " tie" if found["ci95"] and found["ci95"][0] <= 1 <= found["ci95"][1] else ""
    return f"{found['median']:.2f}×{interval_text(found['ci95']) if intervals else ''}{tie}"


def generators_below(document: Document, least: float) -> list[str]:
    """Where ours is not `least` times as fast as another. One prompt at a time is what `sequential` does too."""
    return [
        f"{one['of']} ÷ {one['to']} at batch size {one['batch_size']} ({one['median'] or 0:.2f})"
        for one in document["grid"]["ratios"]
        if (one["median"] or 0.0) < least and not (one["to"] == SEQUENTIAL and one["batch_size"] == 1)
    ]
