"""The document of all cases: valid, told in a table, drawn."""

from __future__ import annotations

import json

import jsonschema
import pytest
from bench_rollouts_games import BUFFER, TURNS, document, game, turn

from gpuinfer.lab.bench.bench_document import bench_schema, variants_below
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.rollouts_bench.constraint_speed import ConstraintCost
from gpuinfer.lab.rollouts_bench.rollouts_tables import (
    game_section,
    processor_document,
    rollouts_document,
    steps_section,
)
from gpuinfer.rollouts.steps import StepRecord


def steps(way: str, waits: list[float]):
    records = [
        StepRecord(step=n, version=n, at_s=n, wall_s=1 + wait, wait_s=wait, train_s=1) for n, wait in enumerate(waits)
    ]
    return steps_section(way, records)


@pytest.fixture
def whole():
    found = [
        (TURNS, document(TURNS, {"one": 100.0, "all": 900.0})),
        (BUFFER, document(BUFFER, {"depth 1": 50.0, "depth 2": 80.0})),
    ]
    made = rollouts_document(found, {"reference": "there is no reference here. Add --ref-model."})
    made["rollouts"]["game"] = game_section(game(("north", (turn(0, 10, 3), turn(1, 5, 2, cached=12)))))
    made["rollouts"]["steps"] = [steps("buffer: depth 1", [2, 1, 3]), steps("buffer: depth 2", [2, 0, 0])]
    return made


def test_it_is_what_the_schema_says(whole):
    jsonschema.validate(json.loads(json.dumps(whole)), bench_schema())


def test_each_case_has_a_verdict_and_none_wins(whole):
    assert whole["winner"] is None
    assert "'all' 9.00× as many tokens/s as 'one'" in whole["verdict"]
    assert "'depth 2' 1.60× as many tokens/s as 'depth 1'" in whole["verdict"]


def test_the_table_has_a_line_for_each_case_and_way(whole):
    page = bench_page(whole)
    rows = page.table.rows
    assert [row[0] for row in rows] == [TURNS.title, "  one", "  all", BUFFER.title, "  depth 1", "  depth 2"]
    assert {len(row) for row in rows} == {len(page.table.columns)}
    assert {len(row) for row in page.brief.rows} == {len(page.brief.columns)}


def test_what_waited_is_told(whole):
    notes = dict(bench_page(whole).notes)
    assert notes["buffer"] == "depth 1: 3 s a step, 67% of it waiting; depth 2: 1 s a step, 40% of it waiting"
    assert notes["one game"].startswith("2 calls in 2 steps: 28 prompt tokens")


def test_a_ratio_that_is_asked_for_is_one_within_a_case(whole):
    assert variants_below(whole, 1.5) == ["reference"]
    assert variants_below(whole, 2.0) == ["buffer: depth 2", "reference"]


def test_without_a_trainer_and_a_game_there_is_less_to_show(tmp_path):
    alone = rollouts_document([(TURNS, document(TURNS, {"one": 100.0}))], {})
    jsonschema.validate(json.loads(json.dumps(alone)), bench_schema())
    assert list(bench_page(alone).plots) == ["throughput"]
    assert "only 'one' was measured" in alone["verdict"]
    assert "<td>" in bench_page(alone).html()


def test_decoding_between_tags_stands_alone(tmp_path):
    costs = [ConstraintCost("build 9 orders", 1.5), ConstraintCost("one step", 0.1, "with masks", 2.0)]
    alone = processor_document(document(TURNS, {}), [one.row() for one in costs])
    jsonschema.validate(json.loads(json.dumps(alone)), bench_schema())
    assert alone["verdict"] == "one step: 0.05× with masks."
    assert bench_page(alone).table.rows == [
        ["build 9 orders", "1.500", "", "", ""],
        ["one step", "0.100", "with masks", "2.000", "0.05"],
    ]
    assert "<td>" in bench_page(alone).html()
