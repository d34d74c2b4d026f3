"""`gpuinfer bench` and `gpuinfer tune` as people and scripts meet them. What they refuse: test_refusals.py."""

import json
import signal
from pathlib import Path

import jsonschema
import pytest

from gpuinfer.cli import tune
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.host import machine
from gpuinfer.lab.bench.bench_document import bench_schema

pytestmark = pytest.mark.usefixtures("count_package")

COUNT = "bench count --strategy at-once --warmup 0"
BENCH = f"{COUNT} --backend parrot --seconds 0.3"
SLOW = "-B seconds=0,100ms"  # the second is far slower than any noise


def compared(gpuinfer, line: str):
    """The exit code, the document on standard output, and standard error."""
    code, out, err = gpuinfer(*line.split(), "--json", "-")
    document = json.loads(out)
    jsonschema.validate(document, bench_schema())
    return code, document, err


@pytest.mark.thorough
def test_the_document_on_standard_output_stands_there_alone_and_a_report_in_its_folder(gpuinfer):
    code, document, err = compared(gpuinfer, f"{BENCH} {SLOW} --repeats 2 --report deep/out")
    assert code == 0
    assert [one["repeat"] for one in document["samples"]] == [0, 0, 1, 1]
    assert [one["name"] for one in document["comparison"]] == ["0 seconds", "100ms seconds"]
    assert "100ms seconds · repeat 2 of 2" in err
    assert "bench.html" in err
    assert {"bench.json", "bench.md", "bench.html"} <= {path.name for path in Path("deep/out").iterdir()}


@pytest.mark.sample
@pytest.mark.parametrize(("least", "code"), [("0.9", 4), ("0.000001", 0)])
def test_fail_under(gpuinfer, least, code):
    assert gpuinfer(*f"{BENCH} {SLOW} --repeats 2 --fail-under {least}".split())[0] == code


def test_a_variant_that_cannot_run_is_skipped_with_its_reason_and_fails_only_a_check(gpuinfer):
    line = f"{COUNT} --compare parrot,parot --seconds 0.2 --repeats 1"
    code, document, _ = compared(gpuinfer, line)
    (skipped,) = document["skipped"]
    assert (code, skipped["name"]) == (0, "parot")
    assert "no backend named 'parot'. Did you mean 'parrot'?" in skipped["reason"]
    code, _, err = gpuinfer(*line.split(), "--fail-under", "0.1")
    assert (code, "--fail-under 0.1 does not hold for parot." in err) == (4, True)


def test_a_signal_keeps_what_was_measured(gpuinfer):
    code, document, _ = compared(gpuinfer, f"{BENCH} --compare signal_at=none,5 --repeats 2")
    assert (code, document["status"]) == (3, "partial")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_games_that_are_named_are_played_to_their_end(gpuinfer):
    Path("gpuinfer.toml").write_text('[count]\nout = "games"\n')  # which a comparison does not keep
    code, document, _ = compared(gpuinfer, f"{COUNT} --backend parrot --games 4,8 --repeats 1 --out none")
    assert code == 0
    assert [run["progress"]["done"] for run in document["runs"]] == [4, 8]
    assert {one["metric"] for one in document["samples"]} == {"games_per_min"}


@pytest.mark.thorough
def test_what_the_environment_says_against_an_applied_setting_is_told(gpuinfer, monkeypatch):
    monkeypatch.setenv("GPUINFER_BACKENDS__PARROT__SECONDS", "0.5")
    code, _, err = gpuinfer(*f"{BENCH} -B seconds=20ms,0 --apply --quiet".split())
    assert code == 0
    assert "GPUINFER_BACKENDS__PARROT__SECONDS in the environment beats gpuinfer.toml. Unset it." in err


ALL = ["workers", "games_in_flight", "max_rows"]


@pytest.mark.parametrize(
    ("values", "searched"),
    [
        ({}, ALL),
        ({"workers": "2"}, ALL[1:]),
        ({"backend_options": ["max-rows=64"]}, ALL[:2]),
        ({"backend_options": ["inprocess.max_rows=64"]}, ALL[:2]),
        ({"backend_options": ["central.max_rows=64"]}, ALL),
    ],
)
def test_tune_searches_what_the_command_line_leaves_open(monkeypatch, values, searched):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    found = tune.space("selfplay", {"strategy": "dynamic", **values})
    facts = {"workers": 2, "games_in_flight": 512, "max_rows": 4096}  # of a run with the defaults
    assert [axis.name for axis in found.axes("inprocess", facts)] == searched


def test_a_point_of_the_search_has_its_command():
    point = {"backend": "inprocess", "games_in_flight": "256", "max_rows": "2048"}
    found = tune.space("selfplay", {"model": "blobnet-small"}).variant(point)
    assert found.name == "inprocess, 256 games in flight, 2048 max rows"
    own = "--model blobnet-small --backend inprocess --games-in-flight 256 -B max_rows=2048"
    assert found.command == f"gpuinfer selfplay {own}"
    assert found.build(0).backend.options.max_rows == 2048


def test_tune_finds_a_backend_and_applies_it(gpuinfer, monkeypatch):
    monkeypatch.setattr(tune, "LEAST_S", 0.0)
    line = "tune count --backend parrot,parot --strategy at-once --budget 1s --apply"
    code, document, err = compared(gpuinfer, line)
    assert (code, document["winner"]) == (0, "parrot")
    assert [trial["name"] for trial in document["search"]["tried"]] == ["parrot", "parot"]
    assert 'backend = "parrot"' in err.splitlines()[-1]
    assert "parrot" in Path("gpuinfer.toml").read_text()
