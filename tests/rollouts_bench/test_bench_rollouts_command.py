"""`gpuinfer bench rollouts` as people meet it, on sums and a small model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jsonschema
import pytest

from gpuinfer.lab.bench.bench_document import bench_schema
from gpuinfer.lab.rollouts_bench import constraint_speed

pytestmark = pytest.mark.usefixtures("empty_folder")

BENCH = ["bench", "rollouts", "--env", "arithmetic", "--model", "tiny", "--quiet"]
SMALL = ["--groups", "2", "--samples-per-group", "2", "--batch-size", "4", "--max-new-tokens", "6"]


def test_cases_are_run_shown_and_written(gpuinfer):
    code, out, _ = gpuinfer(*BENCH, *SMALL, "--cases", "turns,peak", "--report", "told", "--json", "all.json")
    document = json.loads(Path("all.json").read_text())
    jsonschema.validate(document, bench_schema())
    assert code == 0
    assert "one call at a time" in out
    assert [case["name"] for case in document["rollouts"]["cases"]] == ["turns", "peak"]
    played = {sample["variant"]: report for sample, report in zip(document["samples"], document["runs"], strict=True)}
    assert played["peak: replayed"]["throughput"]["output_tokens_per_s"] > 0
    assert {"bench.json", "bench.md", "bench.html", "throughput.png"} == {path.name for path in Path("told").iterdir()}


def test_a_replay_asks_for_as_much_as_was_played(gpuinfer):
    code, _, _ = gpuinfer(*BENCH, *SMALL, "--cases", "peak", "--json", "all.json")
    runs = json.loads(Path("all.json").read_text())["runs"]
    tokens = [round(run["throughput"]["output_tokens_per_s"] * run["wall_s"]) for run in runs]
    assert code == 0
    assert tokens[0] == tokens[1] > 0


def test_games_without_the_constraint_have_the_prompts_and_the_lengths_of_those_with_it(gpuinfer):
    own = ["--env", "blob-text", "--cases", "constraint", "--groups", "1", "--horizon", "3"]
    code, _, _ = gpuinfer(*BENCH, *SMALL, *own, "--json", "all.json")
    runs = json.loads(Path("all.json").read_text())["runs"]
    asked, drawn = (
        [round(run["throughput"][f"{kind}_tokens_per_s"] * run["wall_s"]) for run in runs]
        for kind in ("input", "output")
    )
    assert code == 0
    assert len(runs) == 2
    assert asked[0] == asked[1] > 0
    assert drawn[0] == drawn[1] > 0


@pytest.mark.thorough
def test_the_steps_of_each_depth_are_told_and_drawn(gpuinfer):
    own = ["--cases", "buffer", "--depths", "1,2", "--trainer-seconds", "0.01"]
    code, _, _ = gpuinfer(*BENCH, *SMALL, *own, "--report", "told", "--json", "all.json")
    steps = json.loads(Path("all.json").read_text())["rollouts"]["steps"]
    assert code == 0
    assert [one["way"] for one in steps] == ["buffer: depth 1", "buffer: depth 2"]
    assert all(len(one["wall_s"]) == len(one["stalls"]) > 2 for one in steps)
    assert Path("told/steps.png").is_file()


def test_decoding_between_tags_is_measured_by_itself(gpuinfer, monkeypatch):
    monkeypatch.setattr(
        constraint_speed, "measure_constraints", partial(constraint_speed.measure_constraints, 4, 4096, 50, 10)
    )
    code, out, _ = gpuinfer("bench", "rollouts", "--processor", "--json", "all.json")
    document = json.loads(Path("all.json").read_text())
    jsonschema.validate(document, bench_schema())
    assert code == 0
    assert "vLLM's processor on the logits" in out
    assert all(one["ms"] > 0 for one in document["rollouts"]["processor"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param(["--cases", "peek"], "Did you mean 'peak'?", id="no such case"),
        pytest.param(["--engines", "0"], "--engines 0: not whole numbers", id="no engines"),
        pytest.param(["--seconds", "3"], "run to their end", id="a length of runs that end by themselves"),
        pytest.param(["--out", "records"], "keeps none", id="a record"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(gpuinfer, words, told):
    code, _, err = gpuinfer(*BENCH, *words)
    assert code == 2
    assert told in " ".join(err.split())
