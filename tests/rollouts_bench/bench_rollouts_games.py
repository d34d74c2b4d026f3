"""Games and documents of rollouts, made by hand."""

from __future__ import annotations

from gpuinfer.api import Progress, Setup
from gpuinfer.lab.bench.bench_document import bench_document
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.measurement import Variant
from gpuinfer.lab.bench.series import Measured, SeriesOutcome, SeriesPlan
from gpuinfer.lab.rollouts_bench.rollouts_cases import RolloutsCase, RolloutsVariant, full_name
from gpuinfer.report import report
from gpuinfer.rollouts.record import Game, Group, Timing, Trajectory, Turn
from gpuinfer.stats import Snapshot

COURSE = SeriesPlan(1, None, None, 0, roofline=False, parity=False)


def turn(step: int, prompt: int, completion: int, *, anew: bool = False, cached: int = 0, asked: float = 0.0) -> Turn:
    return Turn(
        step=step,
        messages=(),
        anew=anew,
        prompt_tokens=tuple(range(prompt)),
        completion_tokens=tuple(range(100, 100 + completion)),
        text="",
        finish_reason="stop",
        cached_tokens=cached,
        timing=Timing(asked=asked),
    )


def game(*trajectories: tuple[str, tuple[Turn, ...]]) -> Game:
    return Game(
        sample=0,
        seed=0,
        ending="done",
        trajectories=tuple(
            Trajectory(
                id=f"g0/0/{agent}", agent=agent, role="policy", trainable=True, model="m", turns=turns, reward=0.0
            )
            for agent, turns in trajectories
        ),
        steps=2,
    )


def group(*games: Game) -> Group:
    return Group(id="g0", number=0, environment="made", games=games)


def document(case: RolloutsCase, rates: dict[str, float]) -> dict[str, object]:
    """As if each way of the case had run once, at that many tokens a second."""
    variants = [Variant(full_name(case, way), lambda seed: None, dict(way.flags), "gpuinfer") for way in case.ways]  # type: ignore[arg-type,return-value]
    outcome = SeriesOutcome(variants)
    for variant in variants:
        if (rate := rates.get(variant.name.partition(": ")[2])) is not None:
            outcome.runs.append(Measured(variant.name, 0, 0, "output_tokens_per_s", rate, _report(rate)))
    return bench_document("rollouts", outcome, compare_variants(outcome), COURSE, "2026-01-01T00:00:00+00:00")


def _report(rate: float) -> dict[str, object]:
    counts = {"input_tokens": 10 * rate, "output_tokens": rate}
    return report.build(
        report.Run(
            workload="rollouts",
            backend="inprocess",
            strategy="dynamic",
            started_at="2026-01-01T00:00:00+00:00",
            setup_s=0.0,
            wall_s=1.0,
            status="done",
            setup=Setup(),
            snapshot=Snapshot(),
            progress=Progress(1, 1, "groups", counts=counts),
            settings={},
        )
    )


TURNS = RolloutsCase(
    "turns", "All at once, against one call after another", [RolloutsVariant("one"), RolloutsVariant("all")]
)
BUFFER = RolloutsCase(
    "buffer",
    "A trainer behind a buffer",
    [RolloutsVariant("depth 1", steps=True), RolloutsVariant("depth 2", steps=True)],
)
