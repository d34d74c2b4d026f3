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
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)

import real
from observed import from_plain, judged
from plants import PLANTS, healthy, report_of
from real import REAL

from gpuinfer.host import machine
from gpuinfer.models.processor import cpu_name
from gpuinfer.report.verdict import judge

STRONG = 0.20  # of the throughput, lost to the plant
CLOSE = 0.10  # of what was measured
NOTHING, NOTHING_REAL = "nothing", "nothing, in real commands"
NO_ALARM = "nothing to mend"


@dataclass(frozen=True)
class Outcome:
    """One seed of one plant: the verdicts, and rows a second. Evidence is kept as plain values."""

    name: str
    seed: int
    told: Mapping[str, Any]
    rate: float
    base: Mapping[str, Any]  # the verdict without the plant
    without: float  # the plant
    after: float = 0.0  # what was advised; 0 where nothing was
    evidence: Mapping[str, Any] = field(default_factory=dict)
    base_evidence: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""

    @property
    def said(self) -> str:
        """The class, with the station where one is expected."""
        return f"{self.told['class']} ({self.told['station']})" if expected(self.name)[1] else str(self.told["class"])

    @property
    def right(self) -> bool:
        kind, station = expected(self.name)
        return self.said == (f"{kind} ({station})" if station else kind)

    @property
    def strength(self) -> float:
        return 1 - self.rate / self.without

    @property
    def ratio(self) -> float | None:
        """Predicted ÷ measured throughput after the advised change."""
        gain = self.told["gain"]["expected"]
        return self.rate * gain / self.after if self.after and gain else None


def expected(name: str) -> tuple[str, str | None]:
    return (REAL[name].expected, REAL[name].station) if name in REAL else (PLANTS[name].expected, None)


def try_plant(name: str, seed: int, cure: bool = True) -> Outcome:
    """Without the plant, with it, and, where the verdict is right, with what it advised."""
    return (_try_real if name in REAL else _try_asleep)(name, seed, cure)


def _try_asleep(name: str, seed: int, cure: bool) -> Outcome:
    chance, plant = random.Random(f"{name} {seed}"), PLANTS[name]
    base = plant.base(healthy(chance), chance)
    planted = plant.plant(base, chance)
    with judged() as seen:
        without, with_it = report_of(base), report_of(planted)
    told, kept = with_it["bottleneck"], [asdict(run) for run in seen]
    cured = plant.cure(planted, told, base) if cure and told["class"] == plant.expected else None
    after = rate_of(report_of(cured)) if cured else 0.0
    rates = rate_of(with_it), rate_of(without)
    return Outcome(name, seed, told, rates[0], without["bottleneck"], rates[1], after, kept[1], kept[0], kind_of())


def _try_real(name: str, seed: int, cure: bool) -> Outcome:
    chance, plant = random.Random(f"{name} {seed}"), REAL[name]
    base = plant.base(chance)
    planted = plant.plant(base, chance)
    without, with_it = real.observe(base), real.observe(planted)
    told, evidence, lost = with_it["told"], with_it["evidence"], without["evidence"]
    cured = real.advised(planted, told) if cure and told["class"] == expected(name)[0] else None
    after = real.observe(cured)["evidence"]["rows_per_s"] if cured else 0.0
    rates = evidence["rows_per_s"], lost["rows_per_s"]
    return Outcome(name, seed, told, rates[0], without["told"], rates[1], after, evidence, lost, kind_of())


def kind_of() -> str:
    return f"{machine.cores()} cores of {cpu_name()}"


def rate_of(report: Mapping[str, Any]) -> float:
    return float(report["throughput"]["rows_per_s"])


def again(outcome: Outcome) -> Outcome:
    """What is said today of the same run."""
    told, base = (judge(from_plain(kept)) for kept in (outcome.evidence, outcome.base_evidence))
    return replace(outcome, told=told, base=base)


# Tables


def strong(outcomes: Sequence[Outcome], name: str) -> list[Outcome]:
    """The runs of one plant in which it cost enough to be counted. Slow arrivals and long prompts cost nothing: they
    are what is asked for.
    """
    return [one for one in outcomes if one.name == name and one.strength >= STRONG]


def healthy_verdicts(outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    """Of the sleeping runs that nothing was planted into."""
    return [one.base for one in outcomes if one.name in PLANTS and PLANTS[one.name].base_is_healthy]


def table(outcomes: Sequence[Outcome]) -> str:
    """The confusion matrix and the predictions, in Markdown, for each kind of machine."""
    parts = []
    for kind in dict.fromkeys(one.machine for one in outcomes):
        here = [one for one in outcomes if one.machine == kind]
        parts += [f"On {kind}:" if kind else "", "", *matrix(here), "", *predictions(here), ""]
    return "\n".join(parts)


def matrix(outcomes: Sequence[Outcome]) -> list[str]:
    """A row for what was planted, a column for what was said. Of runs that nothing was planted into: any alarm."""

    def alarms(told: Sequence[Mapping[str, Any]]) -> Counter[str]:
        return Counter(NO_ALARM if one["healthy"] else str(one["class"]) for one in told)

    rows = {name: Counter(one.said for one in strong(outcomes, name)) for name in (*PLANTS, *REAL)}
    rows[NOTHING] = alarms(healthy_verdicts(outcomes))
    rows[NOTHING_REAL] = alarms([one.base for one in outcomes if one.name in REAL])
    rows = {name: counts for name, counts in rows.items() if counts}
    columns = [*dict.fromkeys(kind for row in rows.values() for kind in row if kind != NO_ALARM), NO_ALARM]
    lines = [_row("planted ↓ said →", "runs", *columns), _row("---", *["---:"] * (len(columns) + 1))]
    for name, counts in rows.items():
        lines.append(_row(name, sum(counts.values()), *(counts.get(kind) or "·" for kind in columns)))
    return lines


def predictions(outcomes: Sequence[Outcome]) -> list[str]:
    """How near the throughput after the advised change came to what had been predicted."""
    lines = [_row("planted", "predicted ÷ measured, after the advised change"), _row("---", "---")]
    counted = {name: found for name in (*PLANTS, *REAL) if (found := strong(outcomes, name))}
    counted["all"] = [one for one in outcomes if one.strength >= STRONG]
    for name, found in counted.items():
        ratios = sorted(one.ratio for one in found if one.ratio is not None)
        close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
        within = f"{close} of {len(ratios)} within {CLOSE:.0%}"
        lines.append(_row(name, f"median {statistics.median(ratios):.2f}, {within}" if ratios else "–"))
    return lines


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# The command


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
