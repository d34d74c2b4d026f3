"""Flags that name several values, as variants, and what `--apply` writes of the winner."""

import pytest
from packages import install

from gpuinfer.cli.comparison_end import apply_settings, overruled
from gpuinfer.cli.variants import variants_of
from gpuinfer.cli.workload_targets import parse_seconds
from gpuinfer.config import registry

LISTY = """
from count_package import Parrot
from gpuinfer.api import Options

class Listy(Parrot):
    class Options(Options):
        seconds: float = 0.0
        places: list[str] = []
"""
PARROT = {"backend": "parrot"}
AT_ONCE = {**PARROT, "strategy": "at-once"}


@pytest.fixture(autouse=True)
def site(count_package):
    install(count_package, "listy", {"backends": {"listy": "bad_module:Listy"}}, {"bad_module": LISTY})
    registry.search_again()


@pytest.mark.parametrize(
    ("values", "compare", "expected"),
    [
        ({}, "a,b", "a; b"),
        ({}, "order=up,down", "order up; order down"),
        ({}, "a,b workers=1,2", "a, 1 worker; a, 2 workers; b, 1 worker; b, 2 workers"),
        ({}, "a,b c b", "a; b; c"),
        ({"backend": "a"}, "workers=1 workers=2", "1 worker; 2 workers"),
        ({**AT_ONCE, "backend_options": ["max_rows=8,9"], "strategy_options": ["max_rows=4,5"]}, "",
         "8 max rows, 4 strategy.max rows; 8 max rows, 5 strategy.max rows; "
         "9 max rows, 4 strategy.max rows; 9 max rows, 5 strategy.max rows"),
        (PARROT, "seconds=0,1ms", "0 seconds; 1ms seconds"),
        ({**AT_ONCE, "strategy_options": ["at-once.some-key=1,2"]}, "", "at-once.some key 1; at-once.some key 2"),
        ({"workers": "1,2", **PARROT}, "", "1 worker; 2 workers"),
        ({"backend": "a,b"}, "", "a; b"),
        ({**PARROT, "backend_options": ["seconds=0,1ms"]}, "", "0 seconds; 1ms seconds"),
        (PARROT, "", "parrot"),
        ({}, "a,a,b,", "a; b"),
        ({"backend": "listy", "backend_options": ["places=x,y"]}, "", "listy"),
        ({**PARROT, "out": "a,b"}, "", "parrot"),
        ({"backend_options": ["stages=3"]}, "parallel=data,layers,pipeline",
         "parallel data; parallel layers; parallel pipeline"),
    ],
)  # fmt: skip
def test_the_variants(values, compare, expected):
    found = variants_of("count", values, compare.split(), timed=False)
    assert [one.name for one in found] == expected.split("; ")
    if "stages=3" in values.get("backend_options", ()):  # which goes with two of them
        assert ["stages=3" in one.command for one in found] == [False, True, True]
        assert all(one.build(0) for one in found)


def test_a_variants_command_runs_it_by_itself():
    values = {"games": "5", "backend_options": ["seconds=0,1ms", "max_rows=8"]}
    _, made = variants_of("count", values, ["parrot"], timed=False)
    assert made.command == "gpuinfer count --games 5 -B max_rows=8 -B seconds=1ms --backend parrot"
    assert made.build(7).backend.options.seconds == pytest.approx(1e-3)
    assert made.build(7).backend.setup.seed == 7


def test_a_run_by_the_clock_has_more_to_do_than_it_can_and_its_command_has_not():
    (made,) = variants_of("count", AT_ONCE, [], timed=True)
    assert made.build(0).workload.options.games > 1e8
    assert "--games" not in made.command
    (made,) = variants_of("count", {**AT_ONCE, "games": "7"}, [], timed=True)
    assert made.build(0).workload.options.games == 7


@pytest.mark.parametrize(
    ("text", "found"), [("60s", 60), ("2m", 120), ("90", 90), ("1.5min", 90), ("500ms", 0.5), (" 2 s ", 2)]
)
def test_times(text, found):
    assert parse_seconds("--budget", text) == pytest.approx(found)


OWN = """# mine
seed = 3  # lucky

[count]
games = 9  # many
workers = 1

[backends.parrot]
max_rows = 8
"""


def test_applying_keeps_what_else_the_file_says_and_variables_that_beat_it_are_named(empty_folder, monkeypatch):
    (empty_folder / "gpuinfer.toml").write_text(OWN)
    flags = {**PARROT, "workers": "2", "backend_options": ["seconds=2ms"], "json": "-", "quiet": True}
    assert overruled("count", flags) == []
    path, written = apply_settings("count", flags)
    lines = (empty_folder / path).read_text().splitlines()
    assert written == ['backend = "parrot"', "count.workers = 2", "backends.parrot.seconds = 0.002"]
    for line in ("# mine", "seed = 3  # lucky", "games = 9  # many", "workers = 2", "max_rows = 8", "seconds = 0.002"):
        assert line in lines
    assert not any("json" in line for line in lines)
    for name in ("COUNT__WORKERS", "BACKENDS__PARROT__SECONDS", "COUNT__GAMES"):
        monkeypatch.setenv(f"GPUINFER_{name}", "9")
    assert overruled("count", flags) == ["GPUINFER_COUNT__WORKERS", "GPUINFER_BACKENDS__PARROT__SECONDS"]


def test_after_applying_the_bare_command_does_what_the_winner_did():
    flags = {**AT_ONCE, "order": "down", "resume": True, "workers": "none", "out": "x y"}
    (winner,) = variants_of("count", flags, [], timed=False)
    apply_settings("count", flags)
    (bare,) = variants_of("count", {}, [], timed=False)
    assert bare.build(0).settings == winner.build(0).settings
