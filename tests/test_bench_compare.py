"""The winner, ties and what is said of them."""

import json
from dataclasses import replace

import jsonschema
import pytest
from bench_outcomes import MISSHAPEN, RIGHT, WRONG, document, outcome

from gpuinfer.cli.comparison_end import comparison_exit_code
from gpuinfer.lab.bench.bench_document import bench_document, bench_schema, variants_below, wrong_variants
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.series import SeriesPlan
from gpuinfer.report import report

CLEAR = {"a": [100, 102, 98], "b": [131, 133, 129]}
NOISY = {"a": [100, 140, 80], "b": [120, 110, 130]}
LEVEL = {"a": [50, 51, 49], "b": [100, 101, 99], "c": [101, 99, 100]}


@pytest.mark.parametrize(
    ("rates", "winner", "ties"),
    [
        pytest.param(CLEAR, "b", [], id="a clear difference"),
        pytest.param(NOISY, "a", ["b"], id="noise that allows both: the first stays"),
        pytest.param(LEVEL, "b", ["c"], id="two that are level beat a third"),
        pytest.param({"a": [100], "b": [500]}, "a", ["b"], id="one run of each tells nothing"),
        pytest.param({"a": [100, 101, 99]}, "a", [], id="only one"),
        pytest.param({"a": [0, 0, 0], "b": [10, 11, 10]}, "b", [], id="one that did nothing"),
        pytest.param({"a": [0, 0]}, None, [], id="none that did anything"),
        pytest.param({"a": [], "b": []}, None, [], id="no runs at all"),
    ],
)
def test_winners(rates, winner, ties):
    found = compare_variants(outcome(rates))
    assert found.winner is None if winner is None else found.winner.name == winner
    assert [row.name for row in found.ties] == ties


def test_noise_that_both_runs_of_a_pair_share_does_not_hide_a_difference():
    found = compare_variants(outcome({"a": [100, 50, 200], "b": [110, 55.2, 219]}))
    assert (found.winner.name, found.ties) == ("b", [])
    assert found.rows[0].speed.low < 50 < 200 < found.rows[0].speed.high


def test_wrong_answers_cannot_win():
    found = compare_variants(outcome(CLEAR, parity={"a": RIGHT, "b": WRONG}))
    assert (found.winner.name, found.ties) == ("a", [])
    made = document(CLEAR, parity={"a": RIGHT, "b": WRONG})
    assert wrong_variants(made) == ["b"]
    assert "the only one that answered, and as the model does" in made["verdict"]


@pytest.mark.parametrize(
    ("made", "code"),
    [
        pytest.param(document(CLEAR, parity={"a": RIGHT, "b": RIGHT}), 0, id="all is well"),
        pytest.param(document(CLEAR, parity={"a": RIGHT, "b": WRONG}), 4, id="wrong answers"),
        pytest.param(document(LEVEL, failed={"c": "out of memory"}), 1, id="a variant failed"),
        pytest.param(document(CLEAR, parity={"b": WRONG}, stopped=True), 3, id="stopped"),
    ],
)
def test_exit_codes(made, code):
    assert comparison_exit_code(made, None) == code


def counting(made, name, metric, **throughput):
    """The outcome, with the runs of one variant in another metric."""
    made.runs = [
        replace(one, metric=metric, rate=1e9, report={**one.report, "throughput": throughput})
        if one.variant == name
        else one
        for one in made.runs
    ]
    return made


def test_runs_that_were_counted_otherwise_are_compared_by_what_all_have():
    made = counting(outcome(CLEAR), "b", "games_per_min", games_per_min=1e9, evaluations_per_s=50.0)
    found = compare_variants(made)
    assert [row.metric for row in found.rows] == ["evaluations_per_s"] * 2
    assert found.winner.name == "a"


def test_a_variant_that_counts_nothing_that_the_others_do_is_named_and_not_compared():
    made = counting(outcome(LEVEL), "c", "simulations_per_s", simulations_per_s=1e9)
    found = bench_document("selfplay", made, compare_variants(made), SeriesPlan(), "2025-01-01T00:00:00+00:00")
    assert [row["name"] for row in found["comparison"]] == ["a", "b"]
    (odd,) = found["failed"]
    assert (odd["name"], found["status"], found["winner"]) == ("c", "failed", "b")
    assert "it counts simulations/s, which the others have none of." in odd["reason"]
    jsonschema.validate(found, bench_schema())


@pytest.mark.parametrize(
    ("rates", "more", "said"),
    [
        pytest.param(CLEAR, {}, "b wins: 1.31× (1.2", id="a winner"),
        pytest.param(NOISY, {}, "A tie: the noise allows no choice between a and b", id="a tie"),
        pytest.param(LEVEL, {}, "Slower: a.", id="a tie of two before a third"),
        pytest.param({"a": [1], "b": [2]}, {}, "b was fastest, but one run", id="one run"),
        pytest.param({"a": [1, 2]}, {}, "Only a was measured", id="one variant"),
        pytest.param({"a": [0, 0], "b": [1, 2]}, {}, "b is the only one that answered", id="one that did nothing"),
        pytest.param({"a": []}, {}, "no winner", id="nothing"),
    ],
)
def test_the_verdict(rates, more, said):
    assert said in document(rates, **more)["verdict"]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(document(CLEAR, parity={"a": RIGHT, "b": RIGHT}), id="done"),
        pytest.param(document(NOISY, parity={"a": WRONG, "b": MISSHAPEN}), id="wrong answers"),
        pytest.param(document({"a": [1.0], "b": []}, stopped=True), id="stopped"),
        pytest.param(document({"a": [], "b": []}, skipped={"a": "why", "b": "why"}), id="nothing ran"),
        pytest.param(document(LEVEL, failed={"c": "why"}), id="one failed"),
    ],
)
def test_a_document_is_what_its_schema_says(made):
    jsonschema.validate(made, bench_schema())
    for run in made["runs"]:
        jsonschema.validate(run, report.schema())
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    page = bench_page(made)
    assert all(len(row) == len(page.table.columns) for row in page.table.rows)
    assert dict(page.notes)["verdict"] == made["verdict"]


def test_what_could_not_be_measured_is_below_any_ratio():
    made = document(LEVEL, skipped={"b": "no such device"}, failed={"c": "out of memory"})
    assert variants_below(made, 0.1) == ["b", "c"]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        pytest.param({"a": [100, 102, 98]}, None, id="a quiet machine"),
        pytest.param({"a": [100, 30, 98]}, "differ by 3.3×", id="runs far apart"),
        pytest.param({"a": [2e5, 2e5]}, "200% of what the bare model", id="faster than the bare model"),
    ],
)
def test_a_busy_machine_is_noticed(rates, said):
    note = dict(bench_page(document(rates)).notes).get("unquiet")
    assert note is None if said is None else said in note


def test_what_went_wrong_is_said():
    made = document(LEVEL, parity={"b": WRONG, "c": MISSHAPEN}, skipped={"a": "no such device."}, stopped=True)
    notes = bench_page(made).notes
    assert ("skipped", "a: no such device.") in notes
    assert ("wrong answers", "b: 0.5 off, where 1e-05 is allowed") in notes
    assert any(name == "stopped" for name, _ in notes)
