"""Flags that name several values, as variants."""

import pytest
from packages import install, install_count

from gpuinfer.cli.comparison_end import apply_settings, overruled
from gpuinfer.cli.variants import variants_of
from gpuinfer.cli.workload_targets import parse_seconds
from gpuinfer.config import registry
from gpuinfer.errors import UnknownName, UsageError

LISTY = """
from count_package import Parrot
from pydantic import Field
from gpuinfer.api import Options

class Listy(Parrot):
    class Options(Options):
        seconds: float = 0.0
        places: list[str] = []
"""


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    install_count(folder)
    install(folder, "listy", {"backends": {"listy": "listy_module:Listy"}}, {"listy_module": LISTY})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(registry.DISABLED, "")
    monkeypatch.chdir(tmp_path)
    registry.search_again()
    return folder


def names(values, *compare, timed=False):
    return [one.name for one in variants_of("count", values, compare, timed=timed)]


@pytest.mark.parametrize(
    ("values", "compare", "expected"),
    [
        pytest.param({}, ["a,b"], ["a", "b"], id="backends"),
        pytest.param({}, ["order=up,down"], ["order up", "order down"], id="values of a flag"),
        pytest.param({}, ["a,b", "workers=1,2"], ["a, 1 worker", "a, 2 workers", "b, 1 worker", "b, 2 workers"],
                     id="every combination, the last fastest"),
        pytest.param({}, ["a,b", "c", "b"], ["a", "b", "c"], id="backends word by word"),
        pytest.param({"backend": "a"}, ["workers=1", "workers=2"], ["1 worker", "2 workers"], id="values word by word"),
        pytest.param({"backend": "parrot", "backend_options": ["max_rows=8,9"], "strategy": "at-once",
                      "strategy_options": ["max_rows=4,5"]}, [],
                     ["8 max rows, 4 strategy.max rows", "8 max rows, 5 strategy.max rows",
                      "9 max rows, 4 strategy.max rows", "9 max rows, 5 strategy.max rows"],
                     id="one key of backend and strategy"),
        pytest.param({"backend": "parrot"}, ["seconds=0,1ms"], ["0 seconds", "1ms seconds"],
                     id="an option of the backend"),
        pytest.param({"backend": "parrot", "strategy": "at-once", "strategy_options": ["at-once.some-key=1,2"]}, [],
                     ["at-once.some key 1", "at-once.some key 2"], id="a plugin with a hyphen"),
        pytest.param({"workers": "1,2", "backend": "parrot"}, [], ["1 worker", "2 workers"], id="a grid"),
        pytest.param({"backend": "a,b"}, [], ["a", "b"], id="a grid of backends"),
        pytest.param({"backend": "parrot", "backend_options": ["seconds=0,1ms"]}, [], ["0 seconds", "1ms seconds"],
                     id="a grid of -B"),
        pytest.param({"backend": "parrot"}, [], ["parrot"], id="one"),
        pytest.param({}, ["a,a, b,"], ["a", "b"], id="each once"),
        pytest.param({"backend": "listy", "backend_options": ["places=x,y"]}, [], ["listy"], id="a list"),
        pytest.param({"backend": "parrot", "out": "a,b"}, [], ["parrot"], id="a path"),
    ],
)  # fmt: skip
def test_the_variants(values, compare, expected):
    assert names(values, *compare) == expected


def test_a_variants_command_runs_it_by_itself():
    made = variants_of(
        "count", {"games": "5", "backend_options": ["seconds=0,1ms", "max_rows=8"]}, ["parrot"], timed=False
    )
    assert made[1].command == "gpuinfer count --games 5 -B max_rows=8 -B seconds=1ms --backend parrot"
    assert made[1].build(7).backend.options.seconds == pytest.approx(1e-3)
    assert made[1].build(7).backend.setup.seed == 7


def test_a_run_by_the_clock_has_more_to_do_than_it_can_and_its_command_has_not():
    (made,) = variants_of("count", {"backend": "parrot", "strategy": "at-once"}, [], timed=True)
    assert made.build(0).workload.options.games > 1e8
    assert "--games" not in made.command
    (made,) = variants_of("count", {"backend": "parrot", "strategy": "at-once", "games": "7"}, [], timed=True)
    assert made.build(0).workload.options.games == 7


def test_options_that_go_with_another_value_are_left_out_of_a_variant():
    found = variants_of("count", {"backend_options": ["stages=3"]}, ["parallel=data,layers,pipeline"], timed=False)
    assert [one.name for one in found] == ["parallel data", "parallel layers", "parallel pipeline"]
    assert ["stages=3" in one.command for one in found] == [False, True, True]
    for one in found:
        one.build(0)


@pytest.mark.parametrize(
    ("values", "compare", "error", "said"),
    [
        pytest.param({}, ["gmes=1,2"], UnknownName, "Did you mean 'games'", id="an unknown key"),
        pytest.param({}, ["json=a,b"], UnknownName, "no setting to compare", id="a flag that is no part of a run"),
        pytest.param({}, ["workers="], UsageError, "Write --compare workers=a,b", id="nothing"),
        pytest.param({"workers": "1"}, ["workers=1,2"], UsageError, "Leave one of them out", id="twice"),
        pytest.param(
            {"backend": "parrot", "backend_options": ["seconds=1"]},
            ["seconds=1,2"],
            UsageError,
            "--compare and -B both name values of 'seconds'",
            id="an option twice",
        ),
        pytest.param(
            {"backend_options": ["parot.seconds=1"]},
            ["parrot"],
            UnknownName,
            "no backend named 'parot'. Did you mean 'parrot'",
            id="an option of nobody",
        ),
        pytest.param({"backend_options": ["seconds"]}, ["a,b"], UsageError, "Write -B seconds=VALUE", id="no value"),
    ],
)
def test_bad_comparisons_are_explained(values, compare, error, said):
    with pytest.raises(error, match=said):
        names(values, *compare)


@pytest.mark.parametrize(
    ("text", "found"), [("60s", 60), ("2m", 120), ("90", 90), ("1.5min", 90), ("500ms", 0.5), (" 2 s ", 2)]
)
def test_times(text, found):
    assert parse_seconds("--budget", text) == pytest.approx(found)


# What --apply writes

OWN = """# mine
seed = 3  # lucky

[count]
games = 9  # many
workers = 1

[backends.parrot]
max_rows = 8
"""


def test_applying_keeps_what_else_the_file_says_and_its_comments(tmp_path):
    (tmp_path / "gpuinfer.toml").write_text(OWN)
    path, written = apply_settings(
        "count", {"backend": "parrot", "workers": "2", "backend_options": ["seconds=2ms"], "json": "-", "quiet": True}
    )
    text = (tmp_path / path).read_text()
    assert written == ['backend = "parrot"', "count.workers = 2", "backends.parrot.seconds = 0.002"]
    for line in ("# mine", "seed = 3  # lucky", "games = 9  # many", "workers = 2", "max_rows = 8", "seconds = 0.002"):
        assert line in text.splitlines()
    assert "json" not in text


def test_after_applying_the_bare_command_does_what_the_winner_did():
    flags = {
        "backend": "parrot",
        "strategy": "at-once",
        "order": "down",
        "resume": True,
        "workers": "none",
        "out": "x y",
    }
    (winner,) = variants_of("count", flags, [], timed=False)
    apply_settings("count", flags)
    (bare,) = variants_of("count", {}, [], timed=False)
    assert bare.build(0).settings == winner.build(0).settings


def test_variables_that_beat_what_was_applied_are_named(monkeypatch):
    flags = {"backend": "parrot", "workers": "2", "backend_options": ["seconds=1"]}
    assert overruled("count", flags) == []
    monkeypatch.setenv("GPUINFER_COUNT__WORKERS", "9")
    monkeypatch.setenv("GPUINFER_BACKENDS__PARROT__SECONDS", "9")
    monkeypatch.setenv("GPUINFER_COUNT__GAMES", "9")
    apply_settings("count", flags)
    assert overruled("count", flags) == ["GPUINFER_COUNT__WORKERS", "GPUINFER_BACKENDS__PARROT__SECONDS"]
