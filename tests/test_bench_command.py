"""`gpuinfer bench` and `gpuinfer tune` as people and scripts meet them."""

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

BENCH = ["bench", "count", "--backend", "parrot", "--strategy", "at-once", "--seconds", "0.3", "--warmup", "0"]
SLOW = ["-B", "seconds=0,100ms"]  # the second is far slower than any noise


def test_the_document_on_standard_output_stands_there_alone(gpuinfer):
    code, out, err = gpuinfer(*BENCH, *SLOW, "--repeats", "2", "--json", "-")
    document = json.loads(out)
    jsonschema.validate(document, bench_schema())
    assert code == 0
    assert [one["repeat"] for one in document["samples"]] == [0, 0, 1, 1]
    assert [one["name"] for one in document["comparison"]] == ["0 seconds", "100ms seconds"]
    assert "100ms seconds · repeat 2 of 2" in err


def test_a_report_is_written_to_its_folder(gpuinfer):
    code, _, err = gpuinfer(*BENCH, *SLOW, "--repeats", "1", "--report", "deep/out")
    assert code == 0
    assert "bench.html" in err
    assert {"bench.json", "bench.md", "bench.html"} <= {path.name for path in Path("deep/out").iterdir()}


@pytest.mark.sample
@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(["--fail-under", "0.9", *SLOW], 4, id="one is slower"),
        pytest.param(["--fail-under", "0.000001", *SLOW], 0, id="none is as slow as that"),
        pytest.param(["--fail-under", "0.000001", "-S", "max_wait=1,2"], 2, id="none can run"),
        pytest.param(["--fail-under", "nan"], 2, id="a ratio that nothing could fail"),
    ],
)
def test_fail_under(gpuinfer, words, code):
    assert gpuinfer(*BENCH, "--repeats", "2", *words)[0] == code


def test_a_variant_that_cannot_run_is_skipped_with_its_reason_and_fails_only_a_check(gpuinfer):
    words = [
        "bench",
        "count",
        "--compare",
        "parrot,parot",
        "--strategy",
        "at-once",
        "--seconds",
        "0.2",
        "--warmup",
        "0",
    ]
    code, out, _ = gpuinfer(*words, "--repeats", "1")
    assert code == 0
    assert "parot: no backend named 'parot'. Did you mean 'parrot'?" in " ".join(out.split())
    code, _, err = gpuinfer(*words, "--repeats", "1", "--fail-under", "0.1")
    assert code == 4
    assert "--fail-under 0.1 does not hold for parot." in err


def test_a_signal_keeps_what_was_measured(gpuinfer):
    code, out, _ = gpuinfer(*BENCH, "--compare", "signal_at=none,5", "--repeats", "2", "--json", "-")
    assert code == 3
    document = json.loads(out)
    jsonschema.validate(document, bench_schema())
    assert document["status"] == "partial"


def test_a_termination_between_two_runs_is_an_interrupt_and_afterwards_what_it_was():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_games_that_are_named_are_played_to_their_end(gpuinfer):
    words = ["bench", "count", "--backend", "parrot", "--strategy", "at-once", "--games", "4,8", "--warmup", "0"]
    code, out, _ = gpuinfer(*words, "--json", "-", "--repeats", "1")
    assert code == 0
    document = json.loads(out)
    assert [run["progress"]["done"] for run in document["runs"]] == [4, 8]
    assert {one["metric"] for one in document["samples"]} == {"games_per_min"}


@pytest.mark.thorough
def test_what_the_environment_says_against_an_applied_setting_is_told(gpuinfer, monkeypatch):
    monkeypatch.setenv("GPUINFER_BACKENDS__PARROT__SECONDS", "0.5")
    code, _, err = gpuinfer(*BENCH, "-B", "seconds=20ms,0", "--apply", "--quiet")
    assert code == 0
    assert "GPUINFER_BACKENDS__PARROT__SECONDS in the environment beats gpuinfer.toml. Unset it." in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["bench", "cuont"], "no target named 'cuont'. Did you mean 'count'?", id="unknown target"),
        pytest.param([*BENCH, "--compare", "gmes=1,2"], "Did you mean 'games'?", id="unknown setting"),
        pytest.param([*BENCH, "--seconds", "soon"], "--seconds: 'soon' is no time", id="no time"),
        pytest.param([*BENCH, "--repeats", "0"], "--repeats", id="no repeats"),
        pytest.param([*BENCH, "--seed", "1,2"], "--seed: '1,2' is not a whole number", id="seeds are the repeats'"),
        pytest.param([*BENCH, "--out", "games"], "keeps none. Leave it out.", id="records"),
        pytest.param([*BENCH, "--report", "/dev/null/x"], "Give a folder that can be written to", id="no folder"),
        pytest.param([*BENCH, "--json", "no/where.json"], "Create it (mkdir -p no).", id="no place for the document"),
        pytest.param(["tune", "count", "--budget", "1s"], "no time of 10 s or more", id="too small a budget"),
        pytest.param(["tune", "count", "--backend", ","], "names no backend", id="no backend to try"),
        pytest.param(["tune", "count", "--resume"], "keeps none. Leave it out.", id="nothing to resume"),
    ],
)
def test_bad_usage_is_explained(gpuinfer, words, said):
    code, out, err = gpuinfer(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 3


def test_records_in_the_settings_file_are_refused_with_a_way_round(gpuinfer):
    Path("gpuinfer.toml").write_text('[count]\nout = "games"\n')
    code, _, err = gpuinfer(*BENCH)
    assert code == 2
    assert "gpuinfer.toml [count] out: " in err
    assert "Add --out none." in err
    assert gpuinfer(*BENCH, "--out", "none", "--repeats", "1")[0] == 0


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_help_names_the_targets_and_shows_their_flags(gpuinfer, command):
    assert "Counts to a number and asks for each." in gpuinfer(command, "--help")[1]
    _, out, _ = gpuinfer(command, "count", "--help")
    for words in ("--games", "--backend", "--apply"):
        assert words in out


FACTS = {"workers": 2, "games_in_flight": 512, "max_rows": 4096}  # of a run with the defaults


@pytest.mark.parametrize(
    ("values", "searched"),
    [
        pytest.param({}, ["workers", "games_in_flight", "max_rows"], id="all"),
        pytest.param({"workers": "2"}, ["games_in_flight", "max_rows"], id="but what is given"),
        pytest.param({"backend_options": ["max-rows=64"]}, ["workers", "games_in_flight"], id="as an option too"),
        pytest.param(
            {"backend_options": ["inprocess.max_rows=64"]},
            ["workers", "games_in_flight"],
            id="as an option of this backend",
        ),
        pytest.param(
            {"backend_options": ["central.max_rows=64"]},
            ["workers", "games_in_flight", "max_rows"],
            id="as an option of another backend",
        ),
    ],
)
def test_tune_searches_what_the_command_line_leaves_open(monkeypatch, values, searched):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    found = tune.space("selfplay", {"strategy": "dynamic", **values})
    assert [axis.name for axis in found.axes("inprocess", FACTS)] == searched


def test_a_point_of_the_search_has_its_command(monkeypatch):
    point = {"backend": "inprocess", "games_in_flight": "256", "max_rows": "2048"}
    found = tune.space("selfplay", {"model": "blobnet-small"}).variant(point)
    assert found.name == "inprocess, 256 games in flight, 2048 max rows"
    assert found.command == (
        "gpuinfer selfplay --model blobnet-small --backend inprocess --games-in-flight 256 -B max_rows=2048"
    )
    assert found.build(0).backend.options.max_rows == 2048


def test_tune_finds_a_backend_and_applies_it(gpuinfer, monkeypatch):
    monkeypatch.setattr(tune, "LEAST_S", 0.0)
    code, out, err = gpuinfer(
        "tune",
        "count",
        "--backend",
        "parrot,parot",
        "--strategy",
        "at-once",
        "--budget",
        "1s",
        "--json",
        "-",
        "--apply",
    )
    document = json.loads(out)
    jsonschema.validate(document, bench_schema())
    assert (code, document["winner"]) == (0, "parrot")
    assert [trial["name"] for trial in document["search"]["tried"]] == ["parrot", "parot"]
    assert 'backend = "parrot"' in err.splitlines()[-1]
    assert "parrot" in Path("gpuinfer.toml").read_text()
