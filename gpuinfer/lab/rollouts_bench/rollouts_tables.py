"""The cases of rollouts as one document, with its tables and its plot: all ways to do them, a game's tokens, a
trainer's steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from gpuinfer.lab.bench.bench_plots import draw_throughput
from gpuinfer.lab.bench.comparison import NOISE_UNKNOWN, interval_text, span, value_text
from gpuinfer.lab.presenter import Note, Page, Table, plot
from gpuinfer.lab.rollouts_bench.recorded_games import Tokens, tokens_by_agent, tokens_by_step, tokens_of_game
from gpuinfer.lab.rollouts_bench.rollouts_cases import RolloutsCase, way_of
from gpuinfer.report.plotting import COLOURS
from gpuinfer.rollouts.record import Game
from gpuinfer.rollouts.steps import StepRecord
from gpuinfer.units import number, short, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]
TOGETHER = ("runs", "samples", "comparison", "skipped", "failed")  # lists of a document that are those of all cases


def rollouts_document(found: Sequence[tuple[RolloutsCase, Document]], left_out: Mapping[str, str]) -> dict[str, Any]:
    """One document of all cases. No way wins: each case has a question of its own, and a verdict.

    `left_out`: why, of cases that could not begin. `found` holds one at least.
    """
    first = dict(found[0][1])
    lists = {key: [one for _, document in found for one in document[key]] for key in TOGETHER}
    lists["skipped"] = [*lists["skipped"], *({"name": name, "reason": reason} for name, reason in left_out.items())]
    statuses = [document["status"] for _, document in found]
    return {
        **first,
        **lists,
        "environment": next((document["environment"] for _, document in found if document["environment"]), None),
        "status": next((one for one in ("partial", "failed") if one in statuses), "done"),
        "winner": None,
        "ties": [],
        "why": "",
        "command": None,
        "verdict": " ".join(case_verdict(case, document) for case, document in found if document["comparison"])
        or "Nothing was measured to the end.",
        "rollouts": {
            "cases": [
                {
                    "name": case.name,
                    "title": case.title,
                    "ways": [row["name"] for row in document["comparison"]],
                    "verdict": case_verdict(case, document),
                }
                for case, document in found
            ],
            "game": None,
            "steps": [],
            "processor": [],
        },
    }


def processor_document(document: dict[str, Any], costs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of nothing but decoding between tags."""
    pairs = [one for one in costs if one["ratio"] is not None]
    said = "; ".join(f"{one['name']}: {number(one['ratio'])}× {one['beside']}" for one in pairs)
    section = {"cases": [], "game": None, "steps": [], "processor": list(costs)}
    return {**document, "verdict": f"{said}.", "rollouts": section}


def case_verdict(case: RolloutsCase, document: Document) -> str:
    """The other ways' tokens per second as multiples of the first way's."""
    first, *others = document["comparison"] or [None]
    if first is None:
        return f"{case.title}: nothing was measured."
    if not others:
        return f"{case.title}: only '{way_of(first['name'])}' was measured."
    each = ", ".join(
        f"'{way_of(row['name'])}' {row['ratio_to_first'] or 0:.2f}×{interval_text(row['ratio_ci95'])}" for row in others
    )
    unsure = f"; but {NOISE_UNKNOWN}" if any(row["ratio_ci95"] is None for row in others) else ""
    shared = f" {case.caveat}" if case.caveat else ""
    return f"{case.title}: {each} as many tokens/s as '{way_of(first['name'])}'{unsure}.{shared}"


def game_section(game: Game) -> dict[str, Any]:
    """What one game took: in all, by its steps, by its agents."""
    return {
        "seconds": game.seconds,
        "steps": game.steps,
        "all": asdict(tokens_of_game(game)),
        "by_step": _rows(tokens_by_step(game)),
        "by_agent": _rows(tokens_by_agent(game)),
    }


def _rows(found: Mapping[str, Tokens]) -> list[dict[str, Any]]:
    return [{"name": name, **asdict(tokens)} for name, tokens in found.items()]


def steps_section(way: str, records: Sequence[StepRecord]) -> dict[str, Any]:
    """The trainer's steps of one run, and what held them up."""
    return {
        "way": way,
        "wall_s": [one.wall_s for one in records],
        "wait_s": [one.wait_s for one in records],
        "train_s": [one.train_s for one in records],
        "rollout_s": [one.step_rollout_s for one in records],
        "stalls": [str((one.verdict or {}).get("kind", "")) for one in records],
    }


COLUMNS = ("", "tokens/s", "× first", "95 %", "input tokens/s", "rows/step", "held back by")
BRIEF = 3  # of them on a terminal
PROCESSOR = ("in one step", "ms", "beside it", "ms", "ratio")
TOKENS = ("", "calls", "prompt", "cached", "completion", "completion / call")
STEPS = ("", "steps", "median step", "trainer", "wait", "rollout", "starved steps", "stalls")
WAITING = 0.1  # of a step, from which it counts as starved


def rollouts_page(title: str, document: Document) -> Page:
    """A line for each case, and one for each of its ways; or one for each measured piece of decoding between tags."""
    own = document["rollouts"]
    pieces = bool(own["processor"])  # and no rollouts
    columns, width = (PROCESSOR, len(PROCESSOR)) if pieces else (COLUMNS, BRIEF)
    rows = [*map(_piece, own["processor"])]
    found = {row["name"]: row for row in document["comparison"]}
    samples = zip(document["samples"], document["runs"], strict=True)
    reports = {sample["variant"]: report for sample, report in samples}  # the last of each way
    for case in own["cases"]:
        rows.append([case["title"], *[""] * (len(COLUMNS) - 1)])
        rows += [_row(found[name], reports.get(name)) for name in case["ways"]]
    runs = max((len(row["rates"]) for row in document["comparison"]), default=0)
    count = f"median of {runs} runs in turn, ratios pair by pair" if runs > 1 else "one run of each"
    measured = f"output tokens/s by the wall clock; {count}; × first: of its case" if runs else "nothing was measured"
    plots = {"steps": plot("How long a step of the trainer lasts", 8, lambda axes: draw_steps(axes, document))}
    plots = plots if own["steps"] else {}
    plots["throughput"] = plot("The runs", len(document["comparison"]), lambda axes: draw_throughput(axes, document))
    return Page(
        title,
        document["verdict"],
        document["command"],
        Table(columns, rows),
        "decoding between tags, medians" if pieces else measured,
        brief=Table(columns[:width], [row[:width] for row in rows]),
        notes=list(_notes(own)),
        more=list(_more(own)),
        plots=plots,
    )


def _piece(one: Mapping[str, Any]) -> list[str]:
    """Of decoding between tags."""
    beside = "" if one["beside_ms"] is None else f"{one['beside_ms']:.3f}"
    ratio = "" if one["ratio"] is None else number(one["ratio"])
    return [one["name"], f"{one['ms']:.3f}", one["beside"], beside, ratio]


def _row(row: Mapping[str, Any], report: Mapping[str, Any] | None) -> list[str]:
    given = (report or {}).get("throughput", {}).get("input_tokens_per_s")
    first = row["standing"] == "first" or row["ratio_to_first"] is None
    return [
        f"  {way_of(row['name'])}",
        value_text(row["metric"], row["median"]),
        "" if first else f"{row['ratio_to_first']:.2f}{interval_text(row['ratio_ci95'])}",
        span(row["metric"], *row["ci95"]) if row["ci95"] else "",
        number(given) if given else "",
        number(row["rows_per_batch"]) if row["rows_per_batch"] else "",
        row["bottleneck"]["class"],
    ]


def _more(own: Mapping[str, Any]) -> Iterator[Table]:
    def tokens(row: Mapping[str, Any]) -> list[str]:
        counts = [whole(row[name]) for name in ("calls", "prompt", "cached", "completion")]
        return [row["name"], *counts, number(row["completion"] / row["calls"]) if row["calls"] else ""]

    if (game := own["game"]) is not None:
        rows = [*map(tokens, game["by_step"]), tokens({"name": "all", **game["all"]})]
        yield Table(TOKENS, rows, "Tokens of one game, by step")
        yield Table(TOKENS, [*map(tokens, game["by_agent"])], "Tokens of one game, by agent")
    if own["steps"]:
        rows = []
        for one in own["steps"]:
            starved = sum(wait > WAITING * wall for wait, wall in zip(one["wait_s"], one["wall_s"], strict=True))
            kinds = Counter(kind for kind in one["stalls"] if kind).most_common()
            times = [short(median(one[name])) for name in ("wall_s", "train_s", "wait_s", "rollout_s")]
            stalls = ", ".join(f"{kind} {count}" for kind, count in kinds)
            rows.append([way_of(one["way"]), whole(len(one["wall_s"])), *times, whole(starved), stalls])
        yield Table(STEPS, rows, "Steps of the trainer")


def _notes(own: Mapping[str, Any]) -> Iterator[Note]:
    if (game := own["game"]) is not None:
        found = game["all"]
        yield (
            "one game",
            f"{whole(found['calls'])} calls in {game['steps']} steps: {number(found['prompt'])} prompt tokens, of them "
            f"{number(found['cached'])} computed before, and {number(found['completion'])} drawn",
        )
    if own["steps"]:
        waits = []
        for one in own["steps"]:
            share = sum(one["wait_s"]) / (sum(one["wall_s"]) or 1.0)
            waits.append(f"{way_of(one['way'])}: {short(median(one['wall_s']))} a step, {share:.0%} of it waiting")
        yield "buffer", "; ".join(waits)


def draw_steps(axes: Axes, document: Document) -> None:
    """Seconds of each step but the first, which fills the buffer, a line for each depth; what of it the trainer itself
    took is the dashed line.
    """
    from matplotlib.ticker import MaxNLocator

    found = document["rollouts"]["steps"]
    for place, one in enumerate(found):
        lasted = one["wall_s"][1:]
        axes.plot(
            range(2, len(lasted) + 2),
            lasted,
            "o-",
            color=COLOURS[place % len(COLOURS)],
            label=way_of(one["way"]),
            markersize=4,
        )
    trained = [seconds for one in found for seconds in one["train_s"]]
    axes.axhline(
        sum(trained) / max(1, len(trained)), color="#999999", linestyle="--", linewidth=1, label="the trainer alone"
    )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step of the trainer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("a step lasts")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
