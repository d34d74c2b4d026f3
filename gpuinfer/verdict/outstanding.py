"""Too few rows outstanding: the arithmetic, and what would keep more of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from gpuinfer.evidence import Evidence
from gpuinfer.verdict.bounds import outstanding
from gpuinfer.verdict.case import Case, Verdict
from gpuinfer.verdict.forecast import Gain, with_rows

KIND = "too few rows outstanding"
AGAIN = 2.0  # times as many, where nothing says how many would do


def more_rows(case: Case, best: float, gain: Gain | None = None) -> Verdict:
    """Batches are small because there is no more to put into them. `gain`: of larger ones; None: by a replay."""
    run = case.run
    rows = outstanding(run)
    need = f"the model is {case.faster(best):.1f} times as fast with {best:,.0f} a batch"
    if len(run.forwards) > 1:
        need += f", {best * len(run.forwards):,.0f} for {len(run.forwards)} forwards at once"
    why = f"{product(run.facts, rows)} rows outstanding, batches of {run.rows_mean:,.0f}; {need}."
    told = advise(case, why, max(best / run.rows_usual, 1.0), gain)
    return replace(told, advice=told.advice + _lift(run, best))


def _lift(run: Evidence, rows: float) -> str:
    """What the strategy's cap would do to batches of so many rows."""
    cap = run.options.get("-S", {}).get("max_rows")
    return f" Leave -S max_rows={cap} out then: it would keep them small." if cap and cap < rows else ""


def advise(case: Case, why: str, factor: float, gain: Gain | None = None) -> Verdict:
    """`factor` times the games in flight; where there are no games, larger requests or more clients."""
    run, games = case.run, round(case.run.facts.get("games_in_flight", 0))
    wanted = math.ceil(games * factor)
    if games and run.total is not None and run.total <= games:
        advice = f"All {run.total:,} games are in flight at once: play {wanted:,} or more in one run."
        return Verdict(KIND, "idle", why, advice)
    advice = "Keep more rows outstanding: "
    search = factor if run.work else 1.0  # what a client of which nothing is known does beside it stays what it is
    gain = gain or case.gain_of(lambda now: with_rows(now, factor, search))
    if games:
        most = min(wanted, run.total or wanted)
        advice += "more games in flight." if most == wanted else f"all games in flight, and {wanted:,} games or more."
        return Verdict(KIND, "idle", why, advice, run.change("--", most, "games_in_flight"), gain)
    advice += f"{max(2, math.ceil(run.block_rows * factor)):,} in each request, or {factor:.1f} times the clients."
    return Verdict(KIND, "idle", why, advice, None, gain)


def product(facts: Mapping[str, float], rows_outstanding: float) -> str:
    """The arithmetic behind the rows outstanding: "2 workers × 2 blocks × 96 rows = 384"."""
    workers, blocks = facts.get("workers", 1), facts.get("blocks", 1)
    rows = rows_outstanding / max(workers * blocks, 1)
    factors = [f"{count:,.0f} {name}" for name, count in (("workers", workers), ("blocks", blocks)) if name in facts]
    factors = [factor.removesuffix("s") if factor.startswith("1 ") else factor for factor in factors]
    total = f"{rows_outstanding:,.0f}"
    return " × ".join([*factors, f"{rows:,.0f} rows"]) + f" = {total}" if factors else total
