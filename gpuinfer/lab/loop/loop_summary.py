"""A loop for people, from the reports of its steps: the document `gpuinfer.loop/1`, its table, its verdict, the
strength of each generation as a drawing in the terminal, and `loop.md`, `loop.html` and `loop.svg`. The loss of each
training step is in `loss.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpuinfer.lab.loop.loop_runner import KINDS, LoopPlan, Report, done_report, step_seconds
from gpuinfer.lab.loop.loop_times import LoopTimes, times_table
from gpuinfer.lab.presenter import Page, Plot, Table, write_file
from gpuinfer.report import plotting
from gpuinfer.report.game_statistics import in_elo, in_score, signed
from gpuinfer.units import duration, number, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = "gpuinfer.loop/1"
COLUMNS = ("iteration", "games", "playing", "rows/batch", "device", "loss", "training", "against the first", "score")
GATE = "its gate"  # where there are gates
STALENESS = "weights older by"  # iterations; where some are

Document = Mapping[str, Any]


def loop_document(plan: LoopPlan, settings: Mapping[str, Any], command: str, status: str) -> dict[str, Any]:
    """What is known until now. `status`: done, partial or failed, as of a report."""
    found: dict[int, dict[str, Report]] = {}
    for iteration in range(1, plan.iterations + 1):
        for kind in KINDS:  # matches too that were due under another --iterations
            if (report := done_report(plan.of(iteration) / f"{kind}.json")) is not None:
                found.setdefault(iteration, {})[kind] = report
    iterations = [_iteration(number, reports, plan.has_won(number)) for number, reports in found.items()]
    return {
        "schema": SCHEMA,
        "status": status,
        "command": command,
        "settings": dict(settings),
        "environment": next((one["environment"] for reports in found.values() for one in reports.values()), None),
        "weights": str(plan.weights(plan.playing(plan.iterations))) if status == "done" else None,
        "iterations": iterations,
        "strength": next((one["strength"] for one in reversed(iterations) if one["strength"]), None),
        "staleness": _together([one["staleness"] for one in iterations if one["staleness"]]),
        "time": LoopTimes(plan).document(),
    }


def _together(found: Sequence[Mapping[str, int]]) -> dict[str, int] | None:
    """Games of all iterations on nodes, by how many iterations their weights were older than the newest possible."""
    if not found:
        return None
    versions = sorted({int(one) for games in found for one in games})
    return {str(one): sum(games.get(str(one), 0) for games in found) for one in versions}


def staleness_words(staleness: Mapping[str, int]) -> str:
    """Such as `40 % by 0, 60 % by 1`: shares of games, by iterations."""
    games = sum(staleness.values())
    return ", ".join(f"{100 * count / games:.0f} % by {versions}" for versions, count in staleness.items())


def _iteration(number: int, reports: Mapping[str, Report], has_won: bool) -> dict[str, Any]:
    """None for what is not done, or was not to be."""
    games, training, gate, match = (reports.get(kind) for kind in KINDS)
    return {
        "iteration": number,
        "games": games and games["progress"]["done"],
        "games_s": games and step_seconds(games),
        "resignation": games and games.get("resignation"),
        "staleness": games and games.get("staleness"),
        "games_per_min": games and games["throughput"].get("games_per_min"),
        **(device_use(games) if games else dict.fromkeys(DEVICE_USE)),
        "loss": training and final_loss(training),
        "training_s": training and step_seconds(training),
        "gate": gate and {"won": has_won, **gate["strength"]},
        "gate_s": gate and step_seconds(gate),
        "strength": match and match["strength"],
        "match_s": match and step_seconds(match),
    }


DEVICE_USE = ("rows_per_batch", "device", "device_utilisation", "device_mb")


def device_use(games: Report) -> dict[str, Any]:
    """Of the games of an iteration, by the names of `DEVICE_USE`: mean rows of a batch; the device's name, its mean
    utilisation (0 to 1), and the MiB that the run has taken of it, None where that is not known (NVML, torch).
    """
    device = games.get("device") or {}
    busy = device.get("utilisation_mean")
    found = (
        (games.get("batches") or {}).get("rows_mean"),
        device.get("name"),
        device.get("utilisation") if busy is None else busy,
        device.get("reserved_mb"),
    )
    return dict(zip(DEVICE_USE, found, strict=True))


def _device_words(one: Mapping[str, Any]) -> str:
    """Such as `87 % busy, 2.1 GB`; a dash where nothing is known, as of a CPU."""
    busy, taken = one.get("device_utilisation"), one.get("device_mb")
    words = [*([] if busy is None else [f"{busy:.0%} busy"]), *([f"{number(taken * 2**20)}B"] if taken else [])]
    return ", ".join(words) or "–"


def final_loss(report: Report) -> float | None:
    """At the end of a training, on what it has not seen where something was kept apart."""
    training = report["training"]
    found = training["validation"] or training["loss"]
    return None if found is None else float(found["total"])


def loop_verdict(document: Document) -> str:
    """How the last network that played stands against the first."""
    strength = document["strength"]
    if strength is None:
        return "No network has played against the first generation yet."
    number = next(one["iteration"] for one in reversed(document["iterations"]) if one["strength"])
    iterations = f"{number} iteration{'s' if number > 1 else ''}"
    return f"After {iterations}: {in_score(strength)} against the first generation, {in_elo(strength)}."


def tracked_summary(document: Document, error: Exception | None) -> dict[str, str | float]:
    """What a tracker is told at the end of a loop, which `error` has ended."""
    strength = document["strength"] or {}
    found = {"verdict": loop_verdict(document), "weights": document["weights"], "error": error and str(error)}
    found |= {name: strength.get(name) for name in ("score", "elo")}
    return {name: value for name, value in found.items() if value is not None}


WIDTH = 48  # columns
ZERO, BEGIN, LINE, MEAN, END = "┊├─●┤"
BEYOND = "◀", "▶"  # an end that is not known: no number of Elo is that far


def strength_lines(document: Document) -> Iterator[tuple[str, str]]:
    """Lines with their names; none before there was a match."""
    matches = {one["iteration"]: one["strength"] for one in document["iterations"] if one["strength"]}
    known = [0.0, *(elo for one in matches.values() for elo in (one["elo"], *one["elo_ci95"]) if elo is not None)]
    low, high = min(known), max(known)
    if low == high:  # all matches drawn, or none whose interval has an end
        low, high = -1.0, 1.0
    if matches:
        left, right = (signed(end) if end else "0" for end in (low, high))
        scale = list(left + right.rjust(WIDTH - len(left)))
        zero = _column(0.0, low, high)
        if all(scale[at] == " " for at in range(max(0, zero - 1), min(WIDTH, zero + 2))):  # there is room for it
            scale[zero] = "0"
        yield "Elo", "".join(scale)
    for iteration, strength in matches.items():
        begin, end = strength["elo_ci95"]
        first = 0 if begin is None else _column(begin, low, high)
        last = WIDTH - 1 if end is None else _column(end, low, high)
        line = [" "] * WIDTH
        line[_column(0.0, low, high)] = ZERO
        line[first : last + 1] = LINE * (last + 1 - first)
        line[first], line[last] = BEGIN if begin is not None else BEYOND[0], END if end is not None else BEYOND[1]
        if strength["elo"] is not None:
            line[_column(strength["elo"], low, high)] = MEAN
        yield f"iteration {iteration}", "".join(line).rstrip()


def _column(elo: float, low: float, high: float) -> int:
    return round((elo - low) / (high - low) * (WIDTH - 1))


SIZE = 8.0, 4.6  # inches


def write_loop(plan: LoopPlan, document: Document) -> None:
    """Put `loop.json`, `loop.md`, `loop.html`, `loop.svg` and `loss.jsonl` into the plan's folder. Raises `WorkError`
    when one cannot be.
    """
    curves = {at: plotting.read_losses(plan.curve(at)) for at in range(1, plan.iterations + 1)}
    rows = [{"iteration": at, **row} for at, curve in curves.items() for row in curve]
    cure = "Make room there."
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    write_file(plan.folder / plotting.LOSS_FILE, lines, cure)
    loop_page(document, curves).write(plan.folder, "loop", document, cure, kind="svg")


def loop_page(document: Document, curves: Mapping[int, Sequence[plotting.LossRow]]) -> Page:
    """What people are shown of a loop, an iteration a row. `curves`: each iteration's rows of `loss.jsonl`."""
    title = "Elo over the first generation, and the loss, by iteration"
    has_gates = any(one["gate"] for one in document["iterations"])
    is_stale = bool(set(document["staleness"] or {}) - {"0"})
    columns = (*COLUMNS, *([GATE] if has_gates else []), *([STALENESS] if is_stale else []))

    def rendered(value: Any, words: Callable[[Any], str]) -> str:
        return "–" if value is None else words(value)

    rows = [
        (
            str(one["iteration"]),
            rendered(one["games"], whole),
            rendered(one["games_s"], duration),
            rendered(one["rows_per_batch"], whole),
            _device_words(one),
            rendered(one["loss"], number),
            rendered(one["training_s"], duration),
            rendered(one["strength"], in_elo),
            rendered(one["strength"], lambda strength: f"{strength['score']:.1%}"),
            *([rendered(one["gate"], _gate_words)] if has_gates else []),
            *([rendered(one["staleness"], staleness_words)] if is_stale else []),
        )
        for one in document["iterations"]
    ]
    return Page(
        "gpuinfer loop",
        loop_verdict(document),
        document["command"],
        Table(columns, rows),
        notes=[("verdict", loop_verdict(document)), ("command", document["command"])],
        more=[] if document["time"] is None else [times_table(document["time"])],
        plots={"loop": Plot(title, lambda: loop_figure(document, curves))},
    )


def _gate_words(gate: Mapping[str, Any]) -> str:
    return f"{gate['score']:.1%}, {'won' if gate['won'] else 'not won'}"


def loop_figure(document: Document, curves: Mapping[int, Sequence[plotting.LossRow]]) -> Figure:
    """Elo with its interval above, the loss below: of each step as a line, at the end of each iteration as a dot."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    _strength(above, document)
    trained = [(one["iteration"], one["loss"]) for one in document["iterations"] if one["loss"] is not None]
    steps = [
        (iteration - 1 + row["step"] / curve[-1]["step"], row["loss"])
        for iteration, curve in curves.items()
        for row in curve
        if row.get("loss") is not None
    ]
    plotting.draw_losses(below, steps, plotting.COLOURS[1])
    below.plot([at for at, _ in trained], [loss for _, loss in trained], "o", color=plotting.COLOURS[1], markersize=4)
    below.set_ylabel("loss")
    below.set_xlabel("iteration")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _strength(axes: Axes, document: Document) -> None:
    """A dot a match, its interval a whisker; one without a bound is drawn to where it is known, with an arrow."""
    colour = plotting.COLOURS[0]
    axes.axhline(0, color="#999999", linewidth=1, linestyle=":")
    dots: list[tuple[int, float]] = [(0, 0.0)]
    for one in document["iterations"]:
        if (strength := one["strength"]) is None:
            continue
        low, high = strength["elo_ci95"]
        ends = [end for end in (low, high) if end is not None]
        at, elo = one["iteration"], strength["elo"]
        elo = elo if elo is not None else ends[0] if ends else 0.0
        dots.append((at, elo))
        axes.plot([at, at], [low if low is not None else elo, high if high is not None else elo], color=colour)
        if strength["elo"] is None:
            axes.plot([at], [elo], "^" if strength["score"] else "v", color=colour, markersize=9)
        axes.annotate(in_elo(strength), (at, elo), textcoords="offset points", xytext=(0, 9), ha="right", fontsize=7)
    axes.plot([at for at, _ in dots], [elo for _, elo in dots], "o-", color=colour, markersize=4, alpha=0.8)
    axes.set_ylabel("Elo over the first generation,\n95 % interval")
