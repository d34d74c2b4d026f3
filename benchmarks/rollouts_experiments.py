"""Experiments on rollouts of Diplomacy (docs/experiments.md).

    python benchmarks/rollouts_experiments.py FOLDER [--only tokens,engines,fleet,buffer,reference] [--shapes FILE]
    python benchmarks/rollouts_experiments.py FOLDER --record RECORD        what real games took, into --shapes

Writes a plot for each into FOLDER, and prints tables. `tokens` is what real games took: RECORD is the folder of
`gpuinfer rollouts --env diplomacy --out`. `engines`, `buffer` and `reference` are the rollouts workload itself on a
virtual clock (`rollouts_virtual.py`). `fleet` is `gpuinfer serve --backend standin` with so many replicas behind its
router, by the wall clock, beside `gpuinfer simulate`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts_virtual import Played, play, read_shapes, shapes_of

from gpuinfer.host import machine
from gpuinfer.host.files import write_whole
from gpuinfer.report.plotting import COLOURS, image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = Path(__file__).with_name("rollouts_shapes.json")
ENGINES, DEPTHS = (1, 2, 3, 4, 6, 8), (1, 2, 3, 4)
SEASON_ORDER = ("moves", "retreats", "builds and disbands")

# The experiments


def engines_experiment(shapes: Path, counts: Sequence[int] = ENGINES) -> dict[str, dict[int, float]]:
    """Tokens per second by engines: with as many games as fill the slots, and with few games."""
    return {
        "as many games as fill the slots": {
            count: play(shapes, count, groups=8 + 4 * count).tokens_per_s for count in counts
        },
        "12 games at once": {
            count: play(shapes, count, groups=10, groups_in_flight=2).tokens_per_s for count in counts
        },
    }


def buffer_experiment(shapes: Path, depths: Sequence[int] = DEPTHS) -> dict[str, Any]:
    """A trainer behind buffers of so many batches of one group, where engines have room and where one is full."""
    found: dict[str, Any] = {}
    for name, engines in (("engines with room", 8), ("one engine", 1)):
        rollout_s = play(shapes, engines, groups=4, groups_in_flight=1).group_s
        train_s = rollout_s / 2.5
        runs = {}
        for depth in depths:
            options = {"batch_groups": 1, "buffer_depth": depth, "trainer_seconds": train_s}
            runs[depth] = play(shapes, engines, groups=16, groups_in_flight=8, **options)
        found[name] = {"rollout_s": rollout_s, "train_s": train_s, "runs": runs}
    return found


def expected_step_s(rollout_s: float, train_s: float, depth: int) -> float:
    """Of the trainer, where rollouts take equally long however many are played (docs/rollouts.md)."""
    return max(train_s, (rollout_s + train_s) / (depth + 1))


def reference_experiment(shapes: Path) -> dict[str, dict[str, Played]]:
    """The reference never, inline and deferred, where engines have room and where they are full."""
    ways = {"engines with room": (8, {"groups": 10, "groups_in_flight": 2}), "full engines": (2, {"groups": 32})}
    return {
        name: {when: play(shapes, engines, reference=when, **options) for when in ("none", "inline", "deferred")}
        for name, (engines, options) in ways.items()
    }


def tokens_by_phase(shapes: Path) -> dict[str, dict[str, float]]:
    """Means over the games: calls, prompt tokens and drawn tokens of each kind of phase, and of each phase by name."""
    games = read_shapes(str(shapes))["games"]
    found: dict[str, Counter[str]] = {}
    for game in games:
        for phase in game:
            for name in (phase["phase"], phase["phase"].partition(", ")[2]):
                count = found.setdefault(name, Counter())
                count["calls"] += len(phase["powers"])
                count["prompt"] += sum(prompt for prompt, _ in phase["powers"])
                count["drawn"] += sum(answer for _, answer in phase["powers"])
    return {name: {key: value / len(games) for key, value in count.items()} for name, count in found.items()}


# Stand-ins behind the real router, and the simulator


SERVICE = {"alpha": 0.005, "beta": 0.06}  # seconds a row and a batch
ROWS, CLIENTS = 16, 84  # in a batch; 12 games of 7 powers


def fleet_experiment(counts: Sequence[int] = ENGINES, seconds: float = 8.0) -> dict[str, dict[int, float]]:
    """Rows per second of so many stand-in replicas behind the router, and of the simulator's."""
    found: dict[str, dict[int, float]] = {"stand-ins behind the router": {}, "the simulator": {}}
    for count in counts:
        found["stand-ins behind the router"][count] = served(count, seconds)
        found["the simulator"][count] = simulated(count)
    return found


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gpuinfer", *map(str, words)]


def served(replicas: int, seconds: float) -> float:
    options = [word for name, value in SERVICE.items() for word in ("-B", f"{name}={value}")]
    model = ["--model", "blobnet-small"]  # whose rows `load` sends as they are in games
    rows = ["--features", 256, "--input-dtype", "uint8", "--actions", 52, "--seats", 4]
    with tempfile.TemporaryDirectory() as scratch:
        ready, report = Path(scratch, "ready.json"), Path(scratch, "report.json")
        words = (
            "serve",
            "--backend",
            "standin",
            *options,
            "-B",
            f"max_rows={ROWS}",
            *model,
            *rows,
            "--replicas",
            replicas,
        )
        server = subprocess.Popen(_command(*words, "--port", 0, "--ready-file", ready, "--quiet"))
        try:
            until = time.monotonic() + 120
            while not ready.exists() and time.monotonic() < until:
                time.sleep(0.1)
            url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
            while time.monotonic() < until:
                with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
                    if json.loads(answer.read())["healthy_workers"] == replicas:
                        break
            load = ["load", "--backend", "fleet", "-B", f"endpoint={url}", "--clients", CLIENTS, "--duration", seconds]
            words = (*load, *model, "--json", report, "--no-roofline", "--quiet", "--no-trial")
            subprocess.run(_command(*words), check=True, stdout=subprocess.DEVNULL, timeout=120)
        finally:
            server.terminate()
            server.wait(60)
        return float(json.loads(report.read_text())["throughput"]["rows_per_s"])


def simulated(replicas: int) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        words = ["simulate", "--max-rows", ROWS, "--clients", CLIENTS, "--replicas", replicas, "--duration", "60s"]
        words += [word for name, value in SERVICE.items() for word in (f"--{name}", value)]
        subprocess.run(_command(*words, "--json", report), check=True, stdout=subprocess.DEVNULL, timeout=120)
        return float(json.loads(report.read_text())["runs"][0]["throughput"]["rows_per_s"])


# Tables and plots


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def draw(path: Path, how: Callable[[Axes], None], x: str, y: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    how(axes)
    axes.set(xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    write_whole(path, image(figure, "svg"))


def scaling(folder: Path, name: str, found: Mapping[str, Mapping[int, float]], y: str) -> str:
    """Speed by engines, beside as many times that of the first count."""

    def lines(axes: Axes) -> None:
        for place, (label, speeds) in enumerate(found.items()):
            axes.plot(list(speeds), list(speeds.values()), "o-", color=COLOURS[place], label=label, markersize=4)
        counts = list(next(iter(found.values())))
        one = next(iter(found.values()))[counts[0]] / counts[0]
        axes.plot(counts, [one * count for count in counts], "--", color="#999999", linewidth=1, label="in proportion")
        axes.set_xticks(counts)

    draw(folder / f"rollouts-{name}.svg", lines, "engines", y)
    counts = list(next(iter(found.values())))
    rows = []
    for label, speeds in found.items():
        first = speeds[counts[0]]
        rows.append([label, *(f"{speeds[count]:,.0f} ({speeds[count] / first:.2f})" for count in counts)])
    return table([f"{y}, and times the first", *map(str, counts)], rows)


def tokens_table(folder: Path, shapes: Path) -> str:
    found = tokens_by_phase(shapes)
    phases = [name for name in found if name not in SEASON_ORDER]
    phases.sort(
        key=lambda name: (name.split()[1], ["Spring", "Fall", "Winter"].index(name.split()[0]), name.split(", ")[1])
    )

    def bars(axes: Axes) -> None:
        places = range(len(phases))
        axes.bar(places, [found[name]["prompt"] / 10 for name in phases], 0.8, color=COLOURS[5], label="prompt / 10")
        axes.bar(places, [found[name]["drawn"] for name in phases], 0.4, color=COLOURS[0], label="drawn")
        short = [f"{name[0]}{name.split()[1][2:4]}{name.split(', ')[1][0].upper()}" for name in phases]
        axes.set_xticks(places, short, fontsize=7)

    draw(folder / "rollouts-tokens.svg", bars, "phase (S01M: moves of spring 1901)", "tokens of a game")
    whole: Counter[str] = Counter()
    for name in phases:
        whole.update(found[name])
    rows = []
    for name in (*(one for one in SEASON_ORDER if one in found), "all"):
        one = whole if name == "all" else found[name]
        share = one["drawn"] / whole["drawn"]
        rows.append(
            [
                name,
                *(f"{one[key]:,.0f}" for key in ("calls", "prompt", "drawn")),
                f"{one['drawn'] / one['calls']:.0f}",
                f"{share:.0%}",
            ]
        )
    years = sorted({name.split()[1].rstrip(",") for name in phases})
    by_year = [[year, f"{sum(found[name]['drawn'] for name in phases if year in name):,.0f}"] for year in years]
    columns = ["a game", "calls", "prompt tokens", "drawn", "drawn a call", "of all drawn"]
    return table(columns, rows) + "\n" + table(["year", "drawn"], by_year)


def buffer_table(folder: Path, found: Mapping[str, Any]) -> str:
    def lines(axes: Axes) -> None:
        for place, (name, one) in enumerate(found.items()):
            depths = list(one["runs"])
            waited = [100 * run.waited for run in one["runs"].values()]
            axes.plot(depths, waited, "o-", color=COLOURS[place], label=name, markersize=4)
            axes.plot(
                depths,
                [100 * expected_wait(one, depth) for depth in depths],
                "--",
                color=COLOURS[place],
                linewidth=1,
                label=f"{name}, by the formula",
            )
        axes.set_xticks(depths)

    draw(folder / "rollouts-buffer.svg", lines, "depth of the buffer, in batches", "% of a step that the trainer waits")
    rows: list[list[str]] = []
    for name, one in found.items():
        for depth, run in one["runs"].items():
            expected = expected_step_s(one["rollout_s"], one["train_s"], depth)
            rows.append(
                [
                    f"{name}, depth {depth}",
                    f"{run.step_s:.1f} s",
                    f"{expected:.1f} s",
                    f"{run.waited:.0%}",
                    f"{expected_wait(one, depth):.0%}",
                    f"{run.staleness:.1f}",
                ]
            )
    return table(["", "a step", "by the formula", "waited", "by the formula", "staleness"], rows)


def expected_wait(one: Mapping[str, Any], depth: int) -> float:
    """The share of a step that the trainer waits."""
    return 1 - one["train_s"] / expected_step_s(one["rollout_s"], one["train_s"], depth)


def reference_table(folder: Path, found: Mapping[str, Mapping[str, Played]]) -> str:
    def bars(axes: Axes) -> None:
        ways = list(next(iter(found.values())))
        for place, when in enumerate(ways):
            at = [number + 0.25 * (place - 1) for number in range(len(found))]
            heights = [runs[when].ready_per_s / runs["none"].ready_per_s for runs in found.values()]
            axes.bar(at, heights, 0.22, color=COLOURS[place], label=when)
        axes.set_xticks(range(len(found)), list(found))

    draw(folder / "rollouts-reference.svg", bars, "", "tokens/s, times those without a reference")
    rows = []
    for name, runs in found.items():
        for when, run in runs.items():
            ratio = run.ready_per_s / runs["none"].ready_per_s
            speeds = [f"{run.tokens_per_s:,.0f}", f"{run.ready_per_s:,.0f}", f"{ratio:.2f}"]
            rows.append([f"{name}, {when}", *speeds, f"{run.group_s:.1f} s"])
    return table(["reference", "tokens/s in full swing", "to the end", "times none", "a group in its place"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the plots")
    parser.add_argument("--only", default="tokens,engines,fleet,buffer,reference")
    parser.add_argument("--shapes", type=Path, default=SHAPES, help="lengths of recorded games, JSON")
    parser.add_argument("--record", type=Path, help="a record of real games, whose lengths are written into --shapes")
    given = parser.parse_args(arguments)
    if given.record is not None:
        write_whole(given.shapes, json.dumps(shapes_of(given.record)).encode() + b"\n")
    given.folder.mkdir(parents=True, exist_ok=True)
    shapes, folder = given.shapes.absolute(), given.folder
    print(f"{machine.cores()} cores, {time.strftime('%d %B %Y')}, {len(read_shapes(str(shapes))['games'])} games\n")
    made = {
        "tokens": lambda: tokens_table(folder, shapes),
        "engines": lambda: scaling(folder, "engines", engines_experiment(shapes), "tokens/s"),
        "fleet": lambda: scaling(folder, "fleet", fleet_experiment(), "rows/s"),
        "buffer": lambda: buffer_table(folder, buffer_experiment(shapes)),
        "reference": lambda: reference_table(folder, reference_experiment(shapes)),
    }
    for name in given.only.split(","):
        began = time.monotonic()
        print(f"## {name}\n\n{made[name]()}\n{time.monotonic() - began:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
