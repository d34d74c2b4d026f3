"""Plants a bottleneck, runs it, and asks the verdict; then does what it advises, and runs again.

python tests/diagnosis/bench.py --runs 20 --minutes 60 --keep here.jsonl     # again: goes on where it was
python tests/diagnosis/bench.py --table here.jsonl there.jsonl               # what docs/diagnosis.md shows
python tests/diagnosis/bench.py --again here.jsonl                           # today's verdict on yesterday's runs
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)

import real
from keeping import from_plain, judged, to_plain
from outcomes import Outcome, expected, table
from plants import PLANTS, healthy, report_of
from real import REAL

from gpuinfer.host import machine
from gpuinfer.models.processor import cpu_name
from gpuinfer.report.verdict import judge


def try_plant(name: str, seed: int, cure: bool = True) -> Outcome:
    """Without the plant, with it, and, where the verdict is right, with what it advised."""
    return _try_real(name, seed, cure) if name in REAL else _try_asleep(name, seed, cure)


def _try_asleep(name: str, seed: int, cure: bool) -> Outcome:
    chance, plant = random.Random(f"{name} {seed}"), PLANTS[name]
    base = plant.base(healthy(chance), chance)
    planted = plant.plant(base, chance)
    with judged() as seen:
        without, with_it = report_of(base), report_of(planted)
    told, kept = with_it["bottleneck"], [to_plain(run) for run in seen]
    cured = plant.cure(planted, told, base) if cure and told["class"] == plant.expected else None
    after = rate_of(report_of(cured)) if cured else 0.0
    rates = rate_of(with_it), rate_of(without)
    return Outcome(name, seed, told, rates[0], without["bottleneck"], rates[1], after, kept[1], kept[0], kind_of())


def _try_real(name: str, seed: int, cure: bool) -> Outcome:
    chance, plant = random.Random(f"{name} {seed}"), REAL[name]
    base = plant.base(chance)
    planted = plant.plant(base, chance)
    without, with_it = real.observe(base), real.observe(planted)
    told, evidence = with_it["told"], with_it["evidence"]
    cured = real.advised(planted, told) if cure and told["class"] == expected(name)[0] else None
    after = real.observe(cured)["evidence"]["rows_per_s"] if cured else 0.0
    lost = without["evidence"]
    return Outcome(
        name, seed, told, evidence["rows_per_s"], without["told"], lost["rows_per_s"], after, evidence, lost, kind_of()
    )


def kind_of() -> str:
    return f"{machine.cores()} cores of {cpu_name()}"


def rate_of(report: Mapping[str, Any]) -> float:
    return float(report["throughput"]["rows_per_s"])


def again(outcome: Outcome) -> Outcome:
    """What is said today of the same run."""
    told, base = (judge(from_plain(kept)) for kept in (outcome.evidence, outcome.base_evidence))
    return replace(outcome, told=told, base=base)


def read(paths: Sequence[Path]) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for path in paths if path.exists() for line in path.read_text().splitlines()]


def left_to_do(names: Sequence[str], seeds: Sequence[int], done: Sequence[Outcome]) -> Iterator[tuple[str, int]]:
    """Each cause once, then each once more: whenever it is stopped there is about as much of each."""
    known = {(one.name, one.seed) for one in done}
    return ((name, seed) for seed, name in itertools.product(seeds, names) if (name, seed) not in known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="seeds of each cause")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--cause", action="append", choices=[*PLANTS, *REAL], help="repeatable; default: all")
    parser.add_argument("--keep", type=Path, help="add each outcome to this file; what it has is not run again")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="show what these files have; run nothing")
    parser.add_argument("--again", type=Path, nargs="+", metavar="FILE", help="the same, judged anew")
    given = parser.parse_args()
    if given.table or given.again:
        outcomes = read(given.table or given.again)
        print(table([again(one) for one in outcomes] if given.again else outcomes))
        return
    print(table(measured(given)))


def measured(given: argparse.Namespace) -> list[Outcome]:
    outcomes, until = read([given.keep] if given.keep else []), time.monotonic() + 60 * given.minutes
    seeds = range(given.first, given.first + given.runs)
    for name, seed in left_to_do(given.cause or [*PLANTS, *REAL], seeds, list(outcomes)):
        if time.monotonic() > until:
            break
        try:
            outcomes.append(try_plant(name, seed))
        except Exception as error:  # noqa: BLE001  the other causes go on
            print(f"{name} {seed} failed: {error!r}", file=sys.stderr, flush=True)
            continue
        print(_line(outcomes[-1]), file=sys.stderr, flush=True)
        if given.keep:
            with given.keep.open("a") as file:
                file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    return outcomes


def _line(outcome: Outcome) -> str:
    ratio = f"predicted ÷ measured {outcome.ratio:.2f}" if outcome.ratio else ""
    told = f"{outcome.told['class']} ({outcome.told['station']}){'' if outcome.right else ' (WRONG)'}"
    base = "" if outcome.base["healthy"] else f"base: {outcome.base['class']}"
    return f"{outcome.name} {outcome.seed}: {told}, strength {outcome.strength:.0%} {ratio} {base}"


if __name__ == "__main__":
    main()
