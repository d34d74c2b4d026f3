"""Self-play with 4, 16 and 32 workers: what it costs on this machine, and what 16 cores and a GPU would give.

    python benchmarks/selfplay_workers.py                        # simulate, and write the section into the page
    python benchmarks/selfplay_workers.py --machine --seconds 8  # measure this machine first, about 15 minutes

What was measured here is kept in selfplay_workers.json: games a minute over those of 2 workers without a server, run by
run, mean batches, and the most memory of all processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import written_section
from parameter_tables import ROOT
from selfplay_machines import EVALUATIONS, GPU, USUAL, simulated

from gpuinfer.units import number, whole

PAGE, SECTION = ROOT / "docs" / "selfplay.md", "many workers"
KEPT = Path(__file__).with_suffix(".json")
WORKERS = (2, 4, 16, 32)
BACKENDS = ("inprocess", "central")
MODEL = "blobnet"


def measure(seconds: float, repeats: int) -> dict[str, Any]:
    """By backend and workers: ratio to the first, rows a batch, memory in MiB; and the machine."""
    command = [sys.executable, "-m", "gpuinfer", "bench", "selfplay", "--model", MODEL, "--compare", ",".join(BACKENDS)]
    command += ["--workers", ",".join(map(str, WORKERS)), "--oversubscribe", "--games-in-flight", "1024", "--quiet"]
    command += ["--seconds", f"{seconds:g}", "--repeats", str(repeats), "--no-roofline"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "bench.json"
        subprocess.run([*command, "--json", str(place)], check=True, stdout=subprocess.DEVNULL)
        document = json.loads(place.read_text())
    found: dict[str, Any] = {"environment": document["environment"], "seconds": seconds, "repeats": repeats, "rows": {}}
    for row in document["comparison"]:
        memory = [run["memory"]["rss_peak_mb"] for run in document["runs"] if _is_of(run, row["settings"])]
        found["rows"]["{backend} {workers}".format(**row["settings"])] = {
            "ratio": row["ratio_to_first"],
            "low_high": row["ratio_ci95"],
            "batch": row["rows_per_batch"],
            "memory_mb": max(memory),
            "held_back": row["bottleneck"]["class"],
        }
    return found


def _is_of(run: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    same_workers = str(run["settings"]["selfplay"]["workers"]) == str(settings["workers"])
    return same_workers and run["backend"] == settings["backend"]


def lines(kept: Mapping[str, Any]) -> Iterator[str]:
    """The section, in Markdown."""
    if kept:
        cores = kept["environment"]["cpu_count"]
        yield ""
        yield (
            f"Measured on {cores} cores ({kept['environment']['device_name'] or 'a CPU'}), `{MODEL}`, 1,024 games in\n"
            f"flight, runs of {kept['seconds']:g} s, {kept['repeats']} of each in turns; games a minute over those of\n"
            f"{WORKERS[0]} workers without a server:"
        )
        rows = []
        for workers in WORKERS:
            row = [str(workers)]
            for backend in BACKENDS:
                one = kept["rows"][f"{backend} {workers}"]
                batch = whole(one["batch"]) if one["batch"] else "–"
                row += [f"{one['ratio']:.2f}", batch, f"{one['memory_mb'] / 1024:.1f} GB"]
            rows.append(row)
        heads = [f"{backend}{of}" for backend in BACKENDS for of in ("", ": rows a batch", ": memory")]
        yield ""
        yield from written_section.table(["workers", *heads], rows)
    yield ""
    yield (
        "Simulated for 16 cores and an H100 ([its service times](strategies.md#which-parameter-does-what)), 40,000\n"
        "games in flight. Without a server a batch is one worker's request. The run that was measured there, 16\n"
        "workers with a server, had 498,000 games/min:"
    )
    rows = []
    for workers in WORKERS:
        play = replace(USUAL[GPU.name], workers=workers)
        own = play.games * 3 // (workers * play.blocks)  # rows of a request
        with_server, without = simulated(GPU, play), simulated(GPU, replace(play, max_rows=min(own, GPU.most_rows)))
        row = [str(workers)]
        for one in (without, with_server):
            games = one.served_rows_per_s / EVALUATIONS * 60
            row += [number(games), whole(one.mean_batch_rows), f"{one.utilisation:.0%}"]
        rows.append(row)
    heads = [
        f"{where}{of}"
        for where in ("no server", "`central`")
        for of in (": games/min", ": rows a batch", ": model busy")
    ]
    yield ""
    yield from written_section.table(["workers", *heads], rows)
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="store_true", help="measure this machine, too")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if arguments.machine:
        KEPT.write_text(json.dumps(measure(arguments.seconds, arguments.repeats), indent=1) + "\n")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    written_section.write(arguments.page, SECTION, lines(kept))


if __name__ == "__main__":
    main()
