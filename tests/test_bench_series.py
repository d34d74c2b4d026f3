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


def variant(name, backend=Doubler, fails_with_seed=None, **options):
    def build(seed):
        if seed == fails_with_seed:
            raise UsageError("out of luck. Try another seed.")
        return RunPlan(Counting(**{"total": 10**9, **options}), backend(Setup(seed=seed)), AtOnce(), {})

    return Variant(name, build, {}, f"gpuinfer counting {name}")


class Shown:
    """The steps that were shown, an interrupt at one of them."""

    def __init__(self, interrupt_at=None):
        self.steps, self._interrupt_at = [], interrupt_at

    @contextlib.contextmanager
    def __call__(self, step):
        self.steps.append(step)
        if len(self.steps) == self._interrupt_at:
            raise KeyboardInterrupt
        yield lambda update: None

    @property
    def kinds(self):
        return [(step.variant.name, step.kind, step.repeat) for step in self.steps]


def watched(*variants, plan, interrupt_at=None, **more):
    shown = Shown(interrupt_at)
    return Series(list(variants), plan, shown, **more).run(), shown


def test_repeats_run_in_turn_after_everyone_has_warmed_up():
    outcome, shown = watched(variant("a"), variant("b"), plan=SeriesPlan(repeats=2, seconds=0.3, warmup_s=0.0))
    repeats = [(name, repeat) for name, kind, repeat in shown.kinds if kind is RunKind.REPEAT]
    assert repeats == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [(one.variant, one.repeat) for one in outcome.runs] == repeats
    assert shown.kinds.index(("b", RunKind.WARM_UP, 0)) < shown.kinds.index(("a", RunKind.REPEAT, 0))
    assert all(one.rate > 0 and one.report["status"] == "done" for one in outcome.runs)
    assert shown.steps[-1].left_s < shown.steps[0].left_s


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (variant("bad", Unreachable), "there is no such device. Use --device cpu."),
        (variant("bad", prepare="x"), "int_parsing"),
        (variant("bad", fail_at=3), "question 3 makes no sense"),
    ],
)
def test_a_variant_that_cannot_run_is_skipped_with_its_reason(broken, said):
    outcome, shown = watched(broken, variant("good"), plan=SeriesPlan(2, 0.2, 0.2))
    assert said in outcome.skipped["bad"]
    assert [one.variant for one in outcome.runs] == ["good", "good"]
    assert compare_variants(outcome).winner.name == "good"
    assert ("bad", RunKind.REPEAT, 0) not in shown.kinds


def test_a_variant_that_fails_later_is_left_out_and_the_rest_goes_on():
    outcome, _ = watched(variant("bad", fails_with_seed=1), variant("good"), plan=SeriesPlan(3, 0.2, 0.0))
    assert outcome.failed == {"bad": "repeat 2 of 3: out of luck. Try another seed."}
    assert len([one for one in outcome.runs if one.variant == "good"]) == 3
    assert [row.name for row in compare_variants(outcome).rows] == ["good"]


def test_a_signal_keeps_the_runs_so_far_and_so_does_an_interrupt_between_two_runs():
    outcome, shown = watched(variant("a"), variant("b", stop_after=5), plan=SeriesPlan(3, 0.3, None))
    assert (outcome.stopped, [one.variant for one in outcome.runs]) == (True, ["a"])
    assert shown.kinds[-1] == ("b", RunKind.REPEAT, 0)
    outcome, _ = watched(variant("a"), variant("b"), plan=SeriesPlan(3, 0.2, None, parity=False), interrupt_at=4)
    assert (outcome.stopped, [one.variant for one in outcome.runs]) == (True, ["a", "b", "a"])


def test_the_time_left_is_never_more_than_the_deadline_leaves_and_the_first_round_is_always_run():
    outcome, shown = watched(variant("a"), variant("b"), plan=SeriesPlan(9, 0.2, None), deadline=0.0)
    assert {step.left_s for step in shown.steps} == {0.0}
    assert [one.repeat for one in outcome.runs] == [0, 0]


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

    return Variant(name, build, {"backend": name}, f"gpuinfer {name}")


def test_all_bare_models_are_measured_before_anything_warms_the_machine_up(monkeypatch):
    monkeypatch.setattr(measurement, "roofline_of", lambda backend: Roofline(1e9, 64, "none"))
    both = running("a", Model), running("b", Model, dtype="bfloat16")
    _, shown = watched(*both, plan=SeriesPlan(1, 0.2, 0.2, parity=False))
    kinds = [kind for _, kind, _ in shown.kinds]
    assert kinds[:2] == [RunKind.ROOFLINE] * 2
    assert RunKind.ROOFLINE not in kinds[2:]


# Tuners


class Slower(Doubler):
    """The nearer its limit is to 64 rows, the sooner it answers."""

    async def infer(self, batch):
        await asyncio.sleep(0.005 * abs(self.options.max_rows.bit_length() - 7))
        return await super().infer(batch)


def tuner(monkeypatch, budget_s, backends, ladders, **show):
    for name, value in (("SHORTEST_S", 0.25), ("CHECK_S", 0.0), ("FAR_BEHIND", 0.0)):
        monkeypatch.setattr(tuning, name, value)  # two that are alike may look far apart on a busy machine

    def build(point):
        def plan(seed):
            backend = backends[point["backend"]](Setup(seed=seed), max_rows=int(point.get("max_rows", 16)))
            return RunPlan(Counting(total=10**9), backend, AtOnce(), {})

        return Variant(", ".join(point.values()), plan, dict(point), "gpuinfer counting")

    return Tuner(Space(list(backends), build, lambda *_: ladders), budget_s, SeriesPlan(roofline=False), **show)


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
    made = Tuner(Space(["idle"], lambda point: idle, lambda *_: []), 0.0, SeriesPlan(roofline=False))
    assert "nothing was answered within 1." in made.run().skipped["idle"]


def test_a_tuner_that_is_interrupted_says_what_it_knows(monkeypatch):
    made = tuner(monkeypatch, 9.0, {"one": Doubler, "two": Doubler}, [], show=Shown(interrupt_at=2))
    outcome = made.run()
    assert (outcome.stopped, list(made.trials)) == (True, ["one"])
    assert [one.variant for one in outcome.runs] == ["one"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("liar", "failed"),
    [pytest.param(Liar, [], id="wrong answers"), pytest.param(Unreachable, ["bad"], id="no answers at all")],
)
def test_a_winner_whose_answers_are_not_the_models_wins_no_longer(monkeypatch, liar, failed):
    backends, speeds = {"bad": liar, "honest": InProcess}, {"bad": 110.0, "honest": 100.0}

    def measured(variant, seed, seconds, rooflines, watch=None):
        return MeasuredRun(a_report(speeds[variant.name]), ("evaluations_per_s", speeds[variant.name]))

    for module in (tuning, series):  # speeds are given: the answers are what is tried
        monkeypatch.setattr(module, "measure_run", measured)
    space = Space(
        list(backends), lambda point: running(point["backend"], Model, backends[point["backend"]]), lambda *_: []
    )
    outcome = Tuner(space, 0.0, SeriesPlan(roofline=False)).run()
    assert compare_variants(outcome).winner.name == "honest"
    assert list(outcome.failed) == failed
    assert outcome.parity["honest"].holds
