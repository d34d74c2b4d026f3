"""A loop in numbers, from the reports of its steps: the document `gpuinfer.loop/1`, its table and its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer.loop.course import seconds_of
from gpuinfer.loop.plan import KINDS, Plan, Report, reported
from gpuinfer.report.strength import in_elo, in_score
from gpuinfer.units import duration, number, whole

SCHEMA = "gpuinfer.loop/1"
COLUMNS = ("iteration", "games", "playing", "loss", "training", "against the first", "score")
GATE = "its gate"  # where there are gates

Document = Mapping[str, Any]


def document(plan: Plan, settings: Mapping[str, Any], command: str, status: str) -> dict[str, Any]:
    """What is known until now. `status`: done, partial or failed, as of a report."""
    found: dict[int, dict[str, Report]] = {}
    for iteration in range(1, plan.iterations + 1):
        for kind in KINDS:  # matches too that were due under another --iterations
            if (report := reported(plan.step(kind, iteration))) is not None:
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
    }


def _iteration(number: int, reports: Mapping[str, Report], has_won: bool) -> dict[str, Any]:
    """None for what is not done, or was not to be."""
    games, training, gate, match = (reports.get(kind) for kind in KINDS)
    return {
        "iteration": number,
        "games": games and games["progress"]["done"],
        "games_s": games and seconds_of(games),
        "resignation": games and games.get("resignation"),
        "games_per_min": games and games["throughput"].get("games_per_min"),
        "loss": training and loss_of(training),
        "training_s": training and seconds_of(training),
        "gate": gate and {"won": has_won, **gate["strength"]},
        "gate_s": gate and seconds_of(gate),
        "strength": match and match["strength"],
        "match_s": match and seconds_of(match),
    }


def loss_of(report: Report) -> float | None:
    """At the end of a training, on what it has not seen where something was kept apart."""
    training = report["training"]
    found = training["validation"] or training["loss"]
    return None if found is None else float(found["total"])


def columns(told: Document) -> Sequence[str]:
    """The heads of the table."""
    return (*COLUMNS, GATE) if _has_gates(told) else COLUMNS


def _has_gates(told: Document) -> bool:
    return any(one["gate"] for one in told["iterations"])


def _told_of_gate(gate: Mapping[str, Any] | None) -> str:
    return f"{gate['score']:.1%}, {'won' if gate['won'] else 'not won'}" if gate else "–"


def rows(told: Document) -> Iterator[Sequence[str]]:
    """The table, an iteration a row."""
    gates = _has_gates(told)
    for one in told["iterations"]:
        strength = one["strength"]
        yield (
            str(one["iteration"]),
            _or_dash(one["games"], whole),
            _or_dash(one["games_s"], duration),
            _or_dash(one["loss"], number),
            _or_dash(one["training_s"], duration),
            in_elo(strength) if strength else "–",
            f"{strength['score']:.1%}" if strength else "–",
            *([_told_of_gate(one["gate"])] if gates else []),
        )


def verdict(told: Document) -> str:
    """How the last network that played stands against the first."""
    strength = told["strength"]
    if strength is None:
        return "No network has played against the first generation yet."
    number = next(one["iteration"] for one in reversed(told["iterations"]) if one["strength"])
    iterations = f"{number} iteration{'s' if number > 1 else ''}"
    return f"After {iterations}: {in_score(strength)} against the first generation, {in_elo(strength)}."


def _or_dash(value: Any, words: Any) -> str:
    return "–" if value is None else str(words(value))
