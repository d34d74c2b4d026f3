"""Series and tuners on real small runs: in turn, by the same seeds, and one that cannot run harms no other."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from bench_outcomes import a_report
from bench_plugins import Liar
from helpers import AtOnce, Counting, Doubler, Unreachable

from gpuinfer.api import ModelSpec, Progress, Roofline, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import UsageError
from gpuinfer.lab.bench import measurement, series, tuning
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.measurement import MeasuredRun, Variant
from gpuinfer.lab.bench.series import RunKind, Series, SeriesPlan
from gpuinfer.lab.bench.tuning import Space, Tuner, ladder
from gpuinfer.runtime.run import RunPlan

BRIEF = SeriesPlan(repeats=2, seconds=0.3, warmup_s=0.0)


def variant(name, backend=Doubler, seeds=None, settings=None, **options):
    def build(seed):
        if seeds is not None:
            seeds.append(seed)
        return RunPlan(Counting(**{"total": 10**9, **options}), backend(Setup(seed=seed)), AtOnce(), {})

    return Variant(name, build, settings or {}, f"gpuinfer counting {name}")


def watched(*variants, series_plan=BRIEF, **more):
    """The series' outcome and the steps that were shown."""
    steps = []

    @contextlib.contextmanager
    def show(step):
        steps.append((step.variant.name, step.kind, step.repeat))
        yield lambda update: None

    return Series(list(variants), series_plan, show, **more).run(), steps


def test_repeats_run_in_turn_after_everyone_has_warmed_up():
    outcome, steps = watched(variant("a"), variant("b"))
    repeats = [(name, repeat) for name, kind, repeat in steps if kind is RunKind.REPEAT]
    assert repeats == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [(one.variant, one.repeat) for one in outcome.runs] == repeats
    assert steps.index(("b", RunKind.WARM_UP, 0)) < steps.index(("a", RunKind.REPEAT, 0))
    assert all(one.rate > 0 and one.report["status"] == "done" for one in outcome.runs)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        pytest.param(variant("bad", Unreachable), "there is no such device. Use --device cpu.", id="it cannot start"),
        pytest.param(variant("bad", prepare="x"), "int_parsing", id="its options are refused"),
        pytest.param(variant("bad", fail_at=3), "question 3 makes no sense", id="its work fails"),
    ],
)
def test_a_variant_that_cannot_run_is_skipped_with_its_reason(broken, said):
    outcome, steps = watched(broken, variant("good"), series_plan=SeriesPlan(2, 0.2, 0.2))
    assert said in outcome.skipped["bad"]
    assert [one.variant for one in outcome.runs] == ["good", "good"]
    assert compare_variants(outcome).winner.name == "good"
    assert ("bad", RunKind.REPEAT, 0) not in steps


def test_a_variant_that_fails_later_is_left_out_and_the_rest_goes_on():
    seeds = []

    def build(seed):
        seeds.append(seed)
        if seed == 1:
            raise UsageError("out of luck. Try another seed.")
        return RunPlan(Counting(total=10**9), Doubler(Setup()), AtOnce(), {})

    outcome, _ = watched(Variant("bad", build, {}, ""), variant("good"), series_plan=SeriesPlan(3, 0.2, 0.0))
    assert outcome.failed == {"bad": "repeat 2 of 3: out of luck. Try another seed."}
    assert len([one for one in outcome.runs if one.variant == "good"]) == 3
    assert [row.name for row in compare_variants(outcome).rows] == ["good"]


def test_a_signal_keeps_the_runs_so_far():
    outcome, steps = watched(variant("a"), variant("b", stop_after=5), series_plan=SeriesPlan(3, 0.3, None))
    assert outcome.stopped
    assert [one.variant for one in outcome.runs] == ["a"]
    assert steps[-1] == ("b", RunKind.REPEAT, 0)


def test_an_interrupt_between_two_runs_keeps_them_too():
    shown = []

    @contextlib.contextmanager
    def show(step):
        shown.append(step)
        if len(shown) == 4:
            raise KeyboardInterrupt
        yield lambda update: None

    outcome = Series([variant("a"), variant("b")], SeriesPlan(3, 0.2, None, parity=False), show).run()
    assert outcome.stopped
    assert [one.variant for one in outcome.runs] == ["a", "b", "a"]


def test_the_time_left_shrinks_and_is_never_more_than_the_deadline_leaves():
    left = []

    @contextlib.contextmanager
    def show(step):
        left.append(step.left_s)
        yield lambda update: None

    Series([variant("a")], SeriesPlan(3, 0.2, 0.0), show).run()
    assert left[-1] < left[0]
    left.clear()
    outcome = Series([variant("a"), variant("b")], SeriesPlan(9, 0.2, None), show, deadline=0.0).run()
    assert set(left) == {0.0}
    assert [one.repeat for one in outcome.runs] == [0, 0]  # the first round is always run


class Model(Counting):
    """Asks a model, until it is told to stop."""

    def model(self):
        return ModelSpec("blobnet-small", inputs=40, input_dtype="uint8", arguments={"actions": 8, "seats": 2})

    async def run(self, infer):
        rows, done = np.zeros((4, 40), np.uint8), 0
        while not infer.stopping.is_set():
            await infer(rows, rows=len(rows))
            done += 1
            yield Progress(done)


class Idle(Counting):
    """Never gets anything done."""

    async def run(self, infer):
        while not infer.stopping.is_set():
            yield Progress(0)
            await asyncio.sleep(0.01)


def running(name, workload, backend=InProcess, dtype="float32"):
    def build(seed):
        setup = Setup(model=workload().model(), devices=("cpu",), dtype=dtype, seed=seed)
        return RunPlan(workload(), backend(setup), AtOnce(), {})

    return Variant(name, build, {}, f"gpuinfer {name}")


def test_all_bare_models_are_measured_before_anything_warms_the_machine_up(monkeypatch):
    monkeypatch.setattr(measurement, "roofline_of", lambda backend: Roofline(1e9, 64, "none"))
    both = running("a", Model), running("b", Model, dtype="bfloat16")
    _, steps = watched(*both, series_plan=SeriesPlan(1, 0.2, 0.2, parity=False))
    assert [kind for _, kind, _ in steps[:2]] == [RunKind.ROOFLINE] * 2
    assert RunKind.ROOFLINE not in [kind for _, kind, _ in steps[2:]]


# Tuners


class Slower(Doubler):
    """The nearer its limit is to 64 rows, the sooner it answers."""

    async def infer(self, batch):
        await asyncio.sleep(0.005 * abs(self.options.max_rows.bit_length() - 7))
        return await super().infer(batch)


def tuner(monkeypatch, budget_s, backends, ladders, show=None):
    monkeypatch.setattr(tuning, "SHORTEST_S", 0.25)
    monkeypatch.setattr(tuning, "CHECK_S", 0.0)
    monkeypatch.setattr(tuning, "FAR_BEHIND", 0.0)  # two that are alike may look far apart on a busy machine

    def build(point):
        def plan(seed):
            backend = backends[point["backend"]]
            return RunPlan(
                Counting(total=10**9), backend(Setup(seed=seed), max_rows=int(point.get("max_rows", 16))), AtOnce(), {}
            )

        return Variant(", ".join(point.values()), plan, dict(point), "gpuinfer counting")

    space = Space(list(backends), build, lambda backend, facts: ladders)
    more = {"show": show} if show else {}
    return Tuner(space, budget_s, SeriesPlan(roofline=False), **more)


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_tuner_finds_a_setting_and_races_it_against_the_defaults(monkeypatch):
    monkeypatch.setattr(tuning, "MOST_REPEATS", 3)
    made = tuner(monkeypatch, 30.0, {"slower": Slower}, [ladder("max_rows", 16, 256, 16)])
    outcome = made.run()
    found = max(made.trials.values(), key=lambda trial: trial.rate)
    assert found.variant.name == "slower, 64"
    assert [one.name for one in outcome.variants] == ["slower", "slower, 64"]
    assert compare_variants(outcome).winner.name == "slower, 64"
    trialled = made.trials["slower"].run.report
    assert [one.report is trialled for one in outcome.runs if one.variant == "slower"] == [True, False, False]
    picked = made.trials["slower, 64"].run.report  # for its result, which does not count again
    assert [one.report is picked for one in outcome.runs if one.variant == "slower, 64"] == [False] * 3


def test_a_tuner_says_why_when_nothing_was_answered():
    idle = running("idle", Idle, Doubler)
    made = Tuner(Space(["idle"], lambda point: idle, lambda backend, facts: []), 0.0, SeriesPlan(roofline=False))
    outcome = made.run()
    assert "nothing was answered within 1." in outcome.skipped["idle"]


def test_a_tuner_that_is_interrupted_says_what_it_knows(monkeypatch):
    shown = []

    @contextlib.contextmanager
    def show(step):
        shown.append(step)
        if len(shown) == 2:
            raise KeyboardInterrupt
        yield lambda update: None

    made = tuner(monkeypatch, 9.0, {"one": Doubler, "two": Doubler}, [], show)
    outcome = made.run()
    assert outcome.stopped
    assert list(made.trials) == ["one"]
    assert [one.variant for one in outcome.runs] == ["one"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("liar", "winner", "failed"),
    [
        pytest.param(Liar, "honest", [], id="wrong answers"),
        pytest.param(Unreachable, "honest", ["bad"], id="no answers at all"),
    ],
)
def test_a_winner_whose_answers_are_not_the_models_wins_no_longer(monkeypatch, liar, winner, failed):
    backends = {"bad": (liar, 110.0), "honest": (InProcess, 100.0)}

    def build(point):
        backend, _ = backends[point["backend"]]

        def plan(seed):
            setup = Setup(model=Model().model(), devices=("cpu",), seed=seed)
            return RunPlan(Model(), backend(setup), AtOnce(), {})

        return Variant(point["backend"], plan, dict(point), "gpuinfer model")

    def measured(variant, seed, seconds, rooflines, watch=None):
        report = a_report(backends[variant.name][1])
        return MeasuredRun(report, ("evaluations_per_s", backends[variant.name][1]))

    for module in (tuning, series):  # speeds are given: the answers are what is tried
        monkeypatch.setattr(module, "measure_run", measured)
    made = Tuner(Space(list(backends), build, lambda backend, facts: []), 0.0, SeriesPlan(roofline=False))
    outcome = made.run()
    assert compare_variants(outcome).winner.name == winner
    assert list(outcome.failed) == failed
    assert outcome.parity["honest"].holds
