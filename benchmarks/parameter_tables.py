"""What each parameter of self-play with a server does, too little and too much: simulated on two machines, and measured
here.

    python benchmarks/parameter_tables.py                          # simulate, and write the tables into the page
    python benchmarks/parameter_tables.py --machine --seconds 6    # measure this machine first, 20 to 30 minutes
    python benchmarks/parameter_tables.py --machine --only workers

The simulated columns are the same each time. What was measured here is kept in parameter_tables.json, as ratios to the
best value of each table, and stands in the tables until it is measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import written_section
from selfplay_machines import CPU, GPU, USUAL, Machine, simulated

from gpuinfer.units import number, short, whole

ROOT = Path(__file__).parent.parent
PAGE, SECTION = ROOT / "docs" / "strategies.md", "parameter tables"
KEPT = Path(__file__).with_suffix(".json")
MODEL = "blobnet"
WIDTH = 120  # of a line of the page


@dataclass(frozen=True)
class Parameter:
    """`field` of `Play`, its values, and the flag of `gpuinfer bench selfplay` that takes them, if there is one."""

    field: str
    title: str
    about: str
    values: Mapping[str, Sequence[Any]]  # by machine
    flag: str | None = None


PARAMETERS = (
    Parameter(
        "max_rows",
        "`-B max_rows`: rows in a batch, at most",
        "Too little: the fixed cost of a batch is paid too often, and a GPU is left to its launches. Too much: "
        "nothing is lost but memory, and time to the answer: batches are as large as what waits. Leave it out until "
        "memory runs out.",
        {CPU.name: (16, 64, 256, 1024, 4096), GPU.name: (64, 1024, 4096, 16_384, 65_536)},
        "-B max_rows=",
    ),
    Parameter(
        "max_wait_s",
        "`-S max_wait`: how long a request waits for company",
        "Left out it is learnt: nothing waits for what does not come. A timer that is shorter than a batch does "
        "nothing, as requests wait for the model anyhow. Too much: where one more batch could be computed "
        "meanwhile, the model idles until the timer ends, although all workers wait for it.",
        {CPU.name: (None, 0.0, 0.001, 0.01, 0.1), GPU.name: (None, 0.0, 0.001, 0.01, 0.1)},
        "-S max_wait=",
    ),
    Parameter(
        "workers",
        "`--workers`: processes that search",
        "Too few: the search cannot keep up, and the model idles; each worker searches a little over a million "
        "positions a second. Too many: the same rows are divided into smaller requests, and each process takes "
        "memory and its turn at the cores. A CPU, where the model is what is slow, needs one a core.",
        {CPU.name: (1, 2, 4, 16, 32), GPU.name: (1, 4, 8, 16, 32, 64)},
        "--workers",
    ),
    Parameter(
        "games",
        "`--games-in-flight`: games that are played at once, of all workers",
        "Too few: there are not rows enough for the model's best batch, and on a GPU that costs nearly everything. "
        "Too many: each game takes longer, more memory is held, and the tail, when the last games end one by one, "
        "is longer; the rate stays.",
        {CPU.name: (8, 32, 256, 1024, 4096), GPU.name: (256, 1024, 4096, 40_000, 160_000)},
        "--games-in-flight",
    ),
    Parameter(
        "blocks",
        "Requests that each worker keeps under way",
        "Self-play has two: one is searched while the other is in the model. With one the worker idles while it "
        "waits for its answer, which other workers may hide. With more than two the same rows travel in more "
        "pieces, for little.",
        {CPU.name: (1, 2, 4, 8), GPU.name: (1, 2, 4, 8)},
    ),
    Parameter(
        "request_rows",
        "Rows a request (blocks), with the same rows under way",
        "Too small: what a request costs, whatever it holds, is paid for each row, and a GPU waits for Python. Too "
        "large: where one request holds all rows of a worker, there is nothing to search while it is in the model; "
        "other workers may hide that.",
        {CPU.name: (1, 16, 128, 512), GPU.name: (8, 64, 512, 4096)},
    ),
)


def shown(parameter: Parameter, value: Any) -> str:
    """A value for people, and as `bench` takes it."""
    if parameter.field != "max_wait_s":
        return whole(value)
    return "learnt" if value is None else "0" if not value else short(value)


def simulated_rows(parameter: Parameter, machine: Machine) -> Iterator[list[str]]:
    """Value, rows a second by the best, rows a second, mean batch, p95."""
    values = parameter.values[machine.name]
    found = [simulated(machine, replace(USUAL[machine.name], **{parameter.field: value})) for value in values]
    best = max(one.served_rows_per_s for one in found)
    for value, one in zip(values, found, strict=True):
        yield [
            shown(parameter, value),
            f"{one.served_rows_per_s / best:.2f}",
            number(one.served_rows_per_s),
            whole(one.mean_batch_rows),
            short(one.latency_s["p95"]),
            f"{one.utilisation:.0%}",
        ]


def lines(kept: Mapping[str, Any]) -> Iterator[str]:
    """All tables, in Markdown."""
    for parameter in PARAMETERS:
        yield from ("", f"### {parameter.title}", "", *textwrap.wrap(parameter.about, WIDTH))
        for machine in (CPU, GPU):
            measured = kept.get(parameter.field, {}) if machine is CPU else {}
            columns = [machine.name, "÷ best", "rows/s", "mean batch", "p95", "model busy"]
            rows = list(simulated_rows(parameter, machine))
            if measured:
                columns += ["measured ÷ best", "its mean batch"]
                rows = [[*row, *_measured(measured.get(row[0]))] for row in rows]
            yield ""
            yield from written_section.table(columns, rows)
    yield ""


def _measured(one: Mapping[str, float] | None) -> tuple[str, str]:
    return ("–", "–") if one is None else (f"{one['to_best']:.2f}", whole(one["batch"]))


def measure(parameter: Parameter, seconds: float, repeats: int) -> dict[str, dict[str, float]]:
    """By value: the rate over the best one's, and the mean batch, of `gpuinfer bench selfplay` on this machine."""
    given = [value for value in parameter.values[CPU.name] if value is not None]
    words = ",".join(str(value) if parameter.field != "max_wait_s" else f"{value * 1000:g}ms" for value in given)
    usual = USUAL[CPU.name]
    command = [
        sys.executable,
        "-m",
        "gpuinfer",
        "bench",
        "selfplay",
        "--model",
        MODEL,
        "--backend",
        "central",
        "--quiet",
    ]
    command += ["--seconds", f"{seconds:g}", "--repeats", str(repeats), "--no-roofline", "--oversubscribe"]
    if parameter.flag is not None and parameter.flag.startswith("--"):
        command += [parameter.flag, words]
    else:
        short_flag, _, key = str(parameter.flag).partition(" ")
        command += [short_flag, f"{key}{words}"]
    if parameter.field != "workers":
        command += ["--workers", str(usual.workers)]
    if parameter.field != "games":
        command += ["--games-in-flight", str(usual.games)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "bench.json"
        subprocess.run([*command, "--json", str(place)], check=True, stdout=subprocess.DEVNULL)
        compared = json.loads(place.read_text())["comparison"]
    best = max(row["median"] for row in compared)
    return {
        shown(parameter, value): {"to_best": row["median"] / best, "batch": row["rows_per_batch"] or 0.0}
        for value, row in zip(given, compared, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="store_true", help="measure this machine, too")
    parser.add_argument("--only", help="with --machine: parameters, separated by commas")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if arguments.machine:
        for parameter in PARAMETERS:
            if parameter.flag and (arguments.only is None or parameter.field in arguments.only.split(",")):
                print(f"measuring {parameter.field} …", file=sys.stderr, flush=True)
                kept[parameter.field] = measure(parameter, arguments.seconds, arguments.repeats)
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    written_section.write(arguments.page, SECTION, lines(kept))


if __name__ == "__main__":
    main()
