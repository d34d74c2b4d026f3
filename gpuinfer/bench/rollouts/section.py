"""The cases' documents as one: their rows, runs and reasons together, and a section of what only rollouts have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpuinfer.bench.rollouts.cases import Case, way_of
from gpuinfer.bench.rollouts.counted import Tokens, by_agent, by_step, of_game
from gpuinfer.bench.words import between
from gpuinfer.rollouts.record import Game
from gpuinfer.rollouts.steps import StepRecord
from gpuinfer.units import number

Document = Mapping[str, Any]
TOGETHER = ("runs", "samples", "comparison", "skipped", "failed")  # lists of a document that are those of all cases


def joined(found: Sequence[tuple[Case, Document]], left_out: Mapping[str, str]) -> dict[str, Any]:
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
        "verdict": " ".join(verdict(case, document) for case, document in found if document["comparison"])
        or "Nothing was measured to the end.",
        "rollouts": {
            "cases": [_of_case(case, document) for case, document in found],
            "game": None,
            "steps": [],
            "processor": [],
        },
    }


def of_processor(document: dict[str, Any], costs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of nothing but decoding between tags."""
    pairs = [one for one in costs if one["ratio"] is not None]
    said = "; ".join(f"{one['name']}: {number(one['ratio'])}× {one['beside']}" for one in pairs)
    section = {"cases": [], "game": None, "steps": [], "processor": list(costs)}
    return {**document, "verdict": f"{said}.", "rollouts": section}


def _of_case(case: Case, document: Document) -> dict[str, Any]:
    names = [row["name"] for row in document["comparison"]]
    return {"name": case.name, "title": case.title, "ways": names, "verdict": verdict(case, document)}


def verdict(case: Case, document: Document) -> str:
    """How the others stand beside the first: in tokens per second."""
    first, *others = document["comparison"] or [None]
    if first is None:
        return f"{case.title}: nothing was measured."
    if not others:
        return f"{case.title}: only '{way_of(first['name'])}' was measured."
    each = ", ".join(
        f"'{way_of(row['name'])}' {row['ratio_to_first'] or 0:.2f}×{between(row['ratio_ci95'])}" for row in others
    )
    return f"{case.title}: {each} as many tokens/s as '{way_of(first['name'])}'."


def of_one_game(game: Game) -> dict[str, Any]:
    """What one game took: in all, by its steps, by its agents."""
    return {
        "seconds": game.seconds,
        "steps": game.steps,
        "all": asdict(of_game(game)),
        "by_step": _rows(by_step(game)),
        "by_agent": _rows(by_agent(game)),
    }


def _rows(found: Mapping[str, Tokens]) -> list[dict[str, Any]]:
    return [{"name": name, **asdict(tokens)} for name, tokens in found.items()]


def of_steps(way: str, records: Sequence[StepRecord]) -> dict[str, Any]:
    """The trainer's steps of one run, and what held them up."""
    return {
        "way": way,
        "wall_s": [one.wall_s for one in records],
        "wait_s": [one.wait_s for one in records],
        "train_s": [one.train_s for one in records],
        "rollout_s": [one.step_rollout_s for one in records],
        "stalls": [_kind(one) for one in records],
    }


def _kind(record: StepRecord) -> str:
    return str((record.verdict or {}).get("kind", ""))
