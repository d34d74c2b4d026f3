"""What is said of a verification: a table, and notes on what is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COLUMNS = ("check", "result", "compared", "differ by", "took")
MOST_SHOWN = 3  # faults of a check


def heading(document: dict[str, Any]) -> str:
    dtype, computed = document["environment"]["dtype"], document.get("computed_in")
    format = dtype if computed in (None, dtype) else f"{dtype} computed in {computed}"
    said = f"{document.get('device', '')}, {format}, {document.get('prompts', 0)} prompts"
    return f"verify · {document['model']} · {said}"


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    return [_row(check) for check in document["checks"]]


def notes(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was skipped, the ties, the faults, and the sentence that sums it up."""
    for check in document["checks"]:
        if check["status"] == "skipped":
            yield "skipped", f"{check['name']}: {check['why']}"
        faults = [one for one in check["divergences"] if not one["tie"]]
        faults.sort(key=lambda one: one["theirs"])  # ours first
        for one in faults[:MOST_SHOWN] or check["divergences"][:1]:
            yield ("tie" if one["tie"] else "differs" if one["theirs"] else "failed"), _said(check, one)
        if len(faults) > MOST_SHOWN:
            yield "", f"and {len(faults) - MOST_SHOWN} more: see --json"
        if far := check["from_float32"]:
            sides = ", ".join(f"{side} {value:.2g}" for side, value in far.items())
            yield "float32", f"{check['name']}: logits are up to so far from float32: {sides}"
    yield "verdict", _verdict(document)


def _row(check: dict[str, Any]) -> tuple[str, ...]:
    ties = f", {check['ties']} tie{'s' if check['ties'] > 1 else ''}" if check["ties"] else ""
    if check["status"] == "skipped":
        return check["name"], "skipped", "", "", ""
    compared = f"{check['compared']:,} {check['unit']}"
    result = "FAILS" if check["status"] == "fails" else check["status"]
    if check["unit"] == "texts":
        return check["name"], result, compared, "", f"{check['seconds']:.1f} s"
    return check["name"], f"{result}{ties}", compared, f"{check['largest_difference']:.1e}", f"{check['seconds']:.1f} s"


def _said(check: dict[str, Any], one: dict[str, Any]) -> str:
    if check["unit"] == "texts":
        return f"{check['name']}: “{one['prompt']}”, token {one['position']} of the prompt: {one['why']}"
    where = f"position {one['position']}" + (" of prompt and answer" if check["unit"] == "positions" else "")
    sample = f", sample {one['sample']}" if one["sample"] else ""
    sides = "; ".join(
        f"{side} has {values[0]:.6g} for token {one['tokens'][0]} and {values[1]:.6g} for token {one['tokens'][1]}"
        for side, values in one["logits"].items()
    )
    which = f"{check['name']}: prompt {one['number']} “{one['prompt']}”{sample}"
    return f"{which}, {where}: {sides or 'no logits'}. {one['why']}"


def _verdict(document: dict[str, Any]) -> str:
    failed = [check["name"] for check in document["checks"] if check["status"] == "fails"]
    if failed:
        return f"{len(failed)} of {len(document['checks'])} checks do not hold: {', '.join(failed)}."
    if document["status"] == "partial":
        return "Stopped before all checks were made; those that were made hold."
    ties = sum(check["ties"] for check in document["checks"])
    made = sum(check["status"] != "skipped" for check in document["checks"])
    theirs = [check["name"] for check in document["checks"] if check["status"] == "differs"]
    aside = f" Not ours to mend: {', '.join(theirs)}." if theirs else ""
    return f"All {made - len(theirs)} checks that were made hold" + (f", with {ties} ties." if ties else ".") + aside
