"""`gpuinfer bench rollouts`: as people meet it, on sums and a small model; and its documents, of games made by hand."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import jsonschema
import msgspec
import pytest

from gpuinfer.api import Progress, Setup
from gpuinfer.config import options, registry
from gpuinfer.errors import WorkError
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.lab.bench.bench_document import bench_document, bench_schema, variants_below
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.measurement import Variant
from gpuinfer.lab.bench.series import Measured, SeriesOutcome, SeriesPlan
from gpuinfer.lab.rollouts_bench import constraint_speed, recorded_games, rollouts_tables
from gpuinfer.lab.rollouts_bench.recorded_games import ForcedInfer, RecordedAnswers, RecordedCall, Tokens
from gpuinfer.lab.rollouts_bench.rollouts_cases import CASES, RolloutsCase, RolloutsVariant, SelectedCases, full_name
from gpuinfer.report import report
from gpuinfer.rollouts.record import Game, Group, Timing, Trajectory, Turn
from gpuinfer.rollouts.steps import StepRecord
from gpuinfer.stats import Snapshot
from gpuinfer.testing.fakes import FakeInfer, made_up
from gpuinfer.workloads.rollouts.options import RolloutsOptions

pytestmark = pytest.mark.usefixtures("empty_folder")

BENCH = ["bench", "rollouts", "--env", "arithmetic", "--model", "tiny", "--quiet"]
SMALL = ["--groups", "2", "--samples-per-group", "2", "--batch-size", "4", "--max-new-tokens", "6"]
STARTED = "2026-01-01T00:00:00+00:00"
TURNS = RolloutsCase("turns", "All at once, against one call", [RolloutsVariant("one"), RolloutsVariant("all")])
DEPTHS = [RolloutsVariant("depth 1", steps=True), RolloutsVariant("depth 2", steps=True)]
BUFFER = RolloutsCase("buffer", "A trainer behind a buffer", DEPTHS)


@pytest.fixture
def measured(gpuinfer):
    """The document of a bench that ends with 0, which is as its schema says; and its output."""

    def run(*words):
        code, out, err = gpuinfer(*words, "--json", "all.json")
        assert code == 0, err
        document = json.loads(Path("all.json").read_text())
        jsonschema.validate(document, bench_schema())
        return document, out

    return run


def tokens_of(run, kind):
    return round(run["throughput"][f"{kind}_tokens_per_s"] * run["wall_s"])


@pytest.mark.thorough
def test_cases_are_run_shown_and_written_and_a_replay_asks_for_as_much_as_was_played(measured):
    document, out = measured(*BENCH, *SMALL, "--cases", "turns,peak", "--report", "folder")
    assert "one call at a time" in out
    assert [case["name"] for case in document["rollouts"]["cases"]] == ["turns", "peak"]
    played = {sample["variant"]: run for sample, run in zip(document["samples"], document["runs"], strict=True)}
    replayed, again = played["peak: replayed"], played["peak: played"]
    assert tokens_of(replayed, "output") == tokens_of(again, "output") > 0
    assert {path.name for path in Path("folder").iterdir()} == {
        "bench.json",
        "bench.md",
        "bench.html",
        "throughput.png",
    }


@pytest.mark.thorough
def test_games_without_the_constraint_have_the_prompts_and_the_lengths_of_those_with_it(measured):
    own = ["--env", "blob-text", "--cases", "constraint", "--groups", "1", "--horizon", "3"]
    free, constrained = measured(*BENCH, *SMALL, *own)[0]["runs"]
    for kind in ("input", "output"):
        assert tokens_of(free, kind) == tokens_of(constrained, kind) > 0


@pytest.mark.thorough
def test_the_steps_of_each_depth_are_shown_and_drawn(measured):
    own = ["--cases", "buffer", "--depths", "1,2", "--trainer-seconds", "0.01", "--report", "folder"]
    steps = measured(*BENCH, *SMALL, *own)[0]["rollouts"]["steps"]
    assert [one["way"] for one in steps] == ["buffer: depth 1", "buffer: depth 2"]
    assert all(len(one["wall_s"]) == len(one["stalls"]) > 2 for one in steps)
    assert Path("folder/steps.png").is_file()


def test_decoding_between_tags_is_measured_by_itself(measured, monkeypatch):
    small = partial(constraint_speed.measure_constraints, 4, 4096, 50, 10)
    monkeypatch.setattr(constraint_speed, "measure_constraints", small)
    document, out = measured("bench", "rollouts", "--processor")
    assert "vLLM's processor on the logits" in out
    assert all(one["ms"] > 0 for one in document["rollouts"]["processor"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cases peek", "Did you mean 'peak'?"),
        ("--engines 0", "--engines 0: not whole numbers"),
        ("--seconds 3", "run to their end"),
        ("--out records", "keeps none"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(gpuinfer, words, message):
    code, _, err = gpuinfer(*BENCH, *words.split())
    assert (code, message in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_ways_of_different_names_whose_flags_there_are(name):
    case = CASES[name](SelectedCases())
    assert (case.name, len({way.name for way in case.ways})) == (name, len(case.ways))
    assert len(case.ways) >= 2
    for way in case.ways:
        backend = registry.load("backends", way.flags.get("backend", "inprocess"))
        assert set(way.backend) <= set(options.fields_of(backend.Options))
        RolloutsOptions(**{flag: value for flag, value in way.flags.items() if flag != "backend"})


def turn(step, prompt, completion, *, anew=False, cached=0, asked=0.0):
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


def game(**turns):
    common = {"role": "policy", "trainable": True, "model": "m", "reward": 0.0}
    agents = [Trajectory(id=f"g0/0/{agent}", agent=agent, turns=each, **common) for agent, each in turns.items()]
    return Game(sample=0, seed=0, ending="done", trajectories=tuple(agents), steps=2)


def test_tokens_are_counted_once_and_calls_are_asked_again_in_their_order_with_their_whole_prompts():
    """A turn that goes on has what was said before in its prompt; one that begins anew has not."""
    two = game(
        north=(turn(0, 10, 3, asked=1.0), turn(1, 5, 2, cached=12, asked=3.0)),
        south=(turn(0, 20, 4, asked=2.0), turn(1, 7, 1, anew=True, asked=4.0)),
    )
    by_step = {"step 1": Tokens(2, 30, 0, 7), "step 2": Tokens(2, 10 + 3 + 5 + 7, 12, 3)}
    assert recorded_games.tokens_by_step(two) == by_step
    assert recorded_games.tokens_of_game(two) == Tokens(4, 55, 12, 10)
    assert recorded_games.tokens_by_agent(two) == {"north": Tokens(2, 28, 12, 5), "south": Tokens(2, 27, 0, 5)}
    group = Group(id="g0", number=0, environment="made", games=(two,))
    found = recorded_games.calls([group])
    assert [(len(one.tokens), one.length) for one in found] == [(10, 3), (20, 4), (18, 2), (7, 1)]
    assert found[2] == RecordedCall((*range(10), 100, 101, 102, *range(5)), 2)
    lengths = {"north/0": 3, "north/1": 2, "south/0": 4, "south/1": 1}
    answers = {f"g0/0/{key}": RecordedAnswers("", length) for key, length in lengths.items()}
    assert recorded_games.recorded_answers([group]) == answers


def test_games_led_by_a_record_hear_what_it_says_while_as_many_tokens_are_drawn_freely():
    constrained = Sampling(max_tokens=50, constraint=Constraint(choice=("x",)))
    prompt = Prompt(tokens=(1, 2), key="g0/0/a/0", sampling=constrained)
    infer = FakeInfer(lambda request: made_up(request.payload))
    (found,) = asyncio.run(ForcedInfer(infer, {prompt.key: RecordedAnswers("hold", 3)})(prompt)).completions
    asked = infer.requests[0].payload
    assert asked.sampling == msgspec.structs.replace(constrained, constraint=None, max_tokens=3, ignore_eos=True)
    assert (found.text, found.tokens) == ("hold", made_up(asked).completions[0].tokens)
    with pytest.raises(WorkError, match="no answer to g0/0/a/0"):  # they go another way than the record
        asyncio.run(ForcedInfer(infer, {})(prompt))


def document(case, rates):
    """As if each way of the case had run once, at that many tokens a second."""
    outcome = SeriesOutcome([Variant(full_name(case, way), lambda seed: None, {}, "gpuinfer") for way in case.ways])
    for variant in outcome.variants:
        if (rate := rates.get(variant.name.partition(": ")[2])) is not None:
            progress = Progress(1, 1, "groups", counts={"input_tokens": 10 * rate, "output_tokens": rate})
            run = report.Run(
                workload="rollouts",
                backend="inprocess",
                strategy="dynamic",
                started_at=STARTED,
                setup_s=0.0,
                wall_s=1.0,
                status="done",
                setup=Setup(),
                snapshot=Snapshot(),
                progress=progress,
                settings={},
            )
            outcome.runs.append(Measured(variant.name, 0, 0, "output_tokens_per_s", rate, report.build(run)))
    course = SeriesPlan(1, None, None, 0, roofline=False, parity=False)
    return bench_document("rollouts", outcome, compare_variants(outcome), course, STARTED)


def steps(way, waits):
    records = [
        StepRecord(step=n, version=n, at_s=n, wall_s=1 + wait, wait_s=wait, train_s=1) for n, wait in enumerate(waits)
    ]
    return rollouts_tables.steps_section(way, records)


def test_a_document_of_all_cases_has_a_verdict_and_a_line_for_each_and_says_what_waited():
    found = [
        (TURNS, document(TURNS, {"one": 100.0, "all": 900.0})),
        (BUFFER, document(BUFFER, {"depth 1": 50.0, "depth 2": 80.0})),
    ]
    whole = rollouts_tables.rollouts_document(found, {"reference": "there is no reference here. Add --ref-model."})
    played = game(north=(turn(0, 10, 3), turn(1, 5, 2, cached=12)))
    whole["rollouts"]["game"] = rollouts_tables.game_section(played)
    whole["rollouts"]["steps"] = [steps("buffer: depth 1", [2, 1, 3]), steps("buffer: depth 2", [2, 0, 0])]
    jsonschema.validate(json.loads(json.dumps(whole)), bench_schema())
    assert whole["winner"] is None
    assert "'all' 9.00× as many tokens/s as 'one'; but one run of each tells nothing of the noise." in whole["verdict"]
    assert "'depth 2' 1.60× as many tokens/s as 'depth 1'" in whole["verdict"]
    assert variants_below(whole, 1.5) == ["reference"]  # ratios are those within a case
    assert variants_below(whole, 2.0) == ["buffer: depth 2", "reference"]
    page = bench_page(whole)
    titles = [row[0] for row in page.table.rows]
    assert titles == [TURNS.title, "  one", "  all", BUFFER.title, "  depth 1", "  depth 2"]
    for table in (page.table, page.brief):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    notes = dict(page.notes)
    assert notes["buffer"] == "depth 1: 3 s a step, 67% of it waiting; depth 2: 1 s a step, 40% of it waiting"
    assert notes["one game"].startswith("2 calls in 2 steps: 28 prompt tokens")


def test_a_comparison_of_engines_says_that_they_share_a_machine():
    case = CASES["engines"](SelectedCases(engines=(1, 2)))
    found = document(case, {"1 engine": 10.0, "2 engines": 12.8})
    assert "'2 engines' 1.28×" in (verdict := rollouts_tables.case_verdict(case, found))
    assert verdict.endswith(
        "All engines share this machine, its cores too: on machines of their own they may bring more."
    )


def test_without_a_trainer_a_game_or_rollouts_there_is_less_to_show():
    alone = rollouts_tables.rollouts_document([(TURNS, document(TURNS, {"one": 100.0}))], {})
    costs = [
        {"name": "build 9 orders", "ms": 1.5, "beside": "", "beside_ms": None, "ratio": None},
        {"name": "one step", "ms": 0.1, "beside": "with masks", "beside_ms": 2.0, "ratio": 0.05},
    ]
    processor = rollouts_tables.processor_document(document(TURNS, {}), costs)
    for made, verdict in ((alone, "only 'one' was measured"), (processor, "one step: 0.05× with masks.")):
        jsonschema.validate(json.loads(json.dumps(made)), bench_schema())
        assert verdict in made["verdict"]
        assert "<td>" in bench_page(made).html()
    assert list(bench_page(alone).plots) == ["throughput"]
    rows = [["build 9 orders", "1.500", "", "", ""], ["one step", "0.100", "with masks", "2.000", "0.05"]]
    assert bench_page(processor).table.rows == rows
