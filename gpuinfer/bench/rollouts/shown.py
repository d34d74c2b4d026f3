"""How the cases of rollouts read: a table of all ways, and tables of the game's tokens and the trainer's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from gpuinfer.bench.rollouts.cases import way_of
from gpuinfer.bench.words import between, span, value
from gpuinfer.units import number, short, whole

Document = Mapping[str, Any]
Table = tuple[str, Sequence[str], list[list[str]]]  # title, columns, rows

COLUMNS = ("", "tokens/s", "× first", "95 %", "input tokens/s", "rows/step", "held back by")
BRIEF = 3  # of them on a terminal
PROCESSOR = ("in one step", "ms", "beside it", "ms", "ratio")
TOKENS = ("", "calls", "prompt", "cached", "completion", "completion / call")
STEPS = ("", "steps", "median step", "trainer", "wait", "rollout", "starved steps", "stalls")
WAITING = 0.1  # of a step, from which it counts as starved


def about(document: Document) -> str:
    """What the figures are."""
    if processor_alone(document):
        return "decoding between tags, medians"
    runs = max((len(row["rates"]) for row in document["comparison"]), default=0)
    count = f"median of {runs} runs in turn, ratios pair by pair" if runs > 1 else "one run of each"
    return f"output tokens/s by the wall clock; {count}; × first: of its case" if runs else "nothing was measured"


def processor_alone(document: Document) -> bool:
    """Whether it is decoding between tags that was measured, and no rollouts."""
    return bool(document["rollouts"]["processor"])


def columns(document: Document) -> Sequence[str]:
    return PROCESSOR if processor_alone(document) else COLUMNS


def rows(document: Document) -> Iterator[list[str]]:
    """A line for each case, and one for each of its ways."""
    yield from map(_piece, document["rollouts"]["processor"])
    found = {row["name"]: row for row in document["comparison"]}
    reports = _reports(document)
    for case in document["rollouts"]["cases"]:
        yield [case["title"], *[""] * (len(COLUMNS) - 1)]
        yield from (_row(found[name], reports.get(name)) for name in case["ways"])


def brief(document: Document) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows for a terminal."""
    width = len(PROCESSOR) if processor_alone(document) else BRIEF
    return columns(document)[:width], [row[:width] for row in rows(document)]


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
        value(row["metric"], row["median"]),
        "" if first else f"{row['ratio_to_first']:.2f}{between(row['ratio_ci95'])}",
        span(row["metric"], *row["ci95"]) if row["ci95"] else "",
        number(given) if given else "",
        number(row["rows_per_batch"]) if row["rows_per_batch"] else "",
        row["bottleneck"]["class"],
    ]


def _reports(document: Document) -> dict[str, Mapping[str, Any]]:
    """The last report of each way."""
    pairs = zip(document["samples"], document["runs"], strict=True)
    return {sample["variant"]: report for sample, report in pairs}


def more(document: Document) -> Iterator[Table]:
    own = document["rollouts"]
    if (game := own["game"]) is not None:
        yield (
            "Tokens of one game, by step",
            TOKENS,
            [*map(_tokens, game["by_step"]), _tokens({"name": "all", **game["all"]})],
        )
        yield "Tokens of one game, by agent", TOKENS, [*map(_tokens, game["by_agent"])]
    if own["steps"]:
        yield "Steps of the trainer", STEPS, [_steps(one) for one in own["steps"]]


def notes(document: Document) -> Iterator[tuple[str, str]]:
    own = document["rollouts"]
    if (game := own["game"]) is not None:
        found = game["all"]
        yield (
            "one game",
            f"{whole(found['calls'])} calls in {game['steps']} steps: {number(found['prompt'])} prompt tokens, of them "
            f"{number(found['cached'])} computed before, and {number(found['completion'])} drawn",
        )
    if own["steps"]:
        yield "buffer", "; ".join(_waits(one) for one in own["steps"])


def _waits(one: Mapping[str, Any]) -> str:
    waited, lasted = sum(one["wait_s"]), sum(one["wall_s"])
    share = waited / lasted if lasted else 0.0
    return f"{way_of(one['way'])}: {short(median(one['wall_s']))} a step, {share:.0%} of it waiting"


def _tokens(row: Mapping[str, Any]) -> list[str]:
    counts = [whole(row[name]) for name in ("calls", "prompt", "cached", "completion")]
    return [row["name"], *counts, number(row["completion"] / row["calls"]) if row["calls"] else ""]


def _steps(one: Mapping[str, Any]) -> list[str]:
    starved = sum(wait > WAITING * wall for wait, wall in zip(one["wait_s"], one["wall_s"], strict=True))
    kinds = Counter(kind for kind in one["stalls"] if kind)
    times = [short(median(one[name])) for name in ("wall_s", "train_s", "wait_s", "rollout_s")]
    said = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    return [way_of(one["way"]), whole(len(one["wall_s"])), *times, whole(starved), said]
