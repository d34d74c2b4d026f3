"""Outcomes of comparisons as if they had been measured: real reports, invented rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.api import Progress, Roofline, Setup
from gpuinfer.lab.bench.bench_document import bench_document
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.measurement import Variant
from gpuinfer.lab.bench.parity import Parity
from gpuinfer.lab.bench.series import Measured, SeriesOutcome, SeriesPlan
from gpuinfer.report import report
from gpuinfer.stats import Histogram, Snapshot

WAITS = Histogram()
for _seconds in (1e-4, 2e-4, 5e-3):
    WAITS.add(_seconds)
BARE = 1e5  # rows per second


def a_report(rate: float) -> dict[str, Any]:
    lanes = ({"name": "search", "stations": {"search": 3.0}}, {"name": "forward 0", "stations": {"forward": 4.0}})
    snapshot = Snapshot(
        requests=30,
        rows=int(5 * rate),
        batches={100: 10, 400: 20},
        reasons={"full": 30},
        queue_wait=WAITS.to_wire(),
        lanes=lanes,
    )
    bare = Roofline(max(rate, BARE), 512, "1 forward × 2 threads", (BARE,), raised=rate > BARE)
    return report.build(
        report.Run("selfplay", "inprocess", "dynamic", "2025-01-01T00:00:00+00:00", 1.0, 5.0, "done", Setup(), snapshot,
                   Progress(3, 9, "games"), roofline=bare)
    )  # fmt: skip


def outcome(rates: Mapping[str, Sequence[float]], **more: Any) -> SeriesOutcome:
    """Of variants by name, with the rates of their repeats."""
    variants = [Variant(name, lambda seed: None, {"backend": name}, f"gpuinfer selfplay -b {name}") for name in rates]
    made = SeriesOutcome(variants, **more)
    for name, each in rates.items():
        made.runs += [
            Measured(name, repeat, repeat, "evaluations_per_s", rate, a_report(rate))
            for repeat, rate in enumerate(each)
        ]
    return made


def made_document(made: SeriesOutcome) -> dict[str, Any]:
    return bench_document("selfplay", made, compare_variants(made), SeriesPlan(), "2025-01-01T00:00:00+00:00")


def document(rates: Mapping[str, Sequence[float]], **more: Any) -> dict[str, Any]:
    return made_document(outcome(rates, **more))


RIGHT, WRONG, MISSHAPEN = Parity(1e-7, 1e-5, 400), Parity(0.5, 1e-5, 400), Parity(float("inf"), 1e-5, 400)
