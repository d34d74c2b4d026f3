"""`benchmarks/gpu.sh` where there is no GPU: its clock, its table, what it carries; each part leaves figures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SCRIPT = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
assert SCRIPT is not None
assert SCRIPT.loader is not None
gpu = sys.modules["gpu"] = importlib.util.module_from_spec(SCRIPT)  # where dataclasses look for it
SCRIPT.loader.exec_module(gpu)

BESIDE_TORCH = {"filelock", "fsspec", "networkx", "numpy", "setuptools", "sympy", "torch", "typing-extensions"}
NOT_LOADED = {"huggingface-hub"}  # tokenizers names it, and has no need of it here
OF_TESTS = ("pytest", "pytest-timeout", "hypothesis")
THERE = {**default_environment(), "python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}


class Hand:
    """A clock that goes on when it is told."""

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


@pytest.fixture
def bench(tmp_path):
    def made(seconds, now):
        clock = gpu.Clock(seconds, now)
        return gpu.Bench("cpu", "float32", gpu.ON_CPU, tmp_path, clock, "tiny", "tiny-llada")

    return made


def test_parts_share_the_time_and_what_one_leaves_goes_to_the_others(bench, monkeypatch):
    now, allowed = Hand(), {}
    monkeypatch.setattr(gpu, "write", lambda it: None)

    def part(name, takes):
        def taking(it):
            allowed[name] = it.clock.left - it.until
            now.time += takes

        return taking

    monkeypatch.setattr(
        gpu, "PARTS", {"a": (part("a", 10), 50.0), "b": (part("b", 30), 25.0), "c": (part("c", 1), 25.0)}
    )
    gpu.run(bench(100.0, now), ["a", "b", "c"])
    assert allowed == {"a": pytest.approx(50.0), "b": pytest.approx(45.0), "c": pytest.approx(60.0)}


def test_when_the_time_is_up_the_rest_is_skipped_and_said_to_be(bench, monkeypatch):
    now = Hand()
    it = bench(100.0, now)
    monkeypatch.setattr(gpu, "write", lambda it: None)

    def slow(it):
        now.time += 99.0

    def never(it):
        raise AssertionError

    monkeypatch.setattr(gpu, "PARTS", {"slow": (slow, 1.0), "late": (never, 1.0), "later": (never, 1.0)})
    gpu.run(it, ["slow", "late", "later"])
    assert [(one.part, one.status, one.why) for one in it.found] == [
        ("late", "skipped", "no time left"),
        ("later", "skipped", "no time left"),
    ]


def test_a_part_that_fails_costs_its_own_figures_alone(bench, monkeypatch):
    it = bench(100.0, Hand())

    def broken(it):
        raise ZeroDivisionError("alas")

    monkeypatch.setattr(gpu, "write", lambda it: None)
    monkeypatch.setattr(gpu, "PARTS", {"broken": (broken, 1.0), "well": (lambda it: it.add("x", {"rows/s": 5.0}), 1.0)})
    gpu.run(it, ["broken", "well"])
    assert [(one.part, one.status) for one in it.found] == [("broken", "failed"), ("well", "done")]
    assert it.found[0].why == "ZeroDivisionError: alas"


def test_a_command_that_takes_too_long_is_asked_to_stop_and_what_it_wrote_counts(bench, monkeypatch):
    it = bench(100.0, Hand())
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    it.begin("part", 1.0)
    it.until = it.clock.left - gpu.STOPPING_S - 0.5
    says = "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: exit(3))\ntime.sleep(60)"
    assert it.run("slow", [sys.executable, "-c", says]) == "shortened"
    assert it.run("quick", [sys.executable, "-c", "pass"]) == "done"
    assert it.run("broken", [sys.executable, "-c", "print('no such thing'); exit(1)"]) == "failed"
    assert it.last("broken") == "no such thing"


@pytest.mark.parametrize(
    ("does", "found"),
    [
        pytest.param("file.write_text('{}')", ({}, "done"), id="a report"),
        pytest.param("file.write_text('{}'); exit(4)", ({}, "done"), id="a report that says what failed"),
        pytest.param("print('alas'); exit(1)", ("failed", "alas"), id="last words"),
    ],
)
def test_what_a_command_leaves_counts_however_it_ends(bench, monkeypatch, does, found):
    it = bench(100.0, Hand())
    it.begin("part", 1.0)
    run = it.run

    def instead(case, words):
        script = f"import pathlib; file = pathlib.Path({str(words[-1])!r}); {does}"
        return run(case, [sys.executable, "-c", script])

    monkeypatch.setattr(it, "run", instead)
    left = it.gpuinfer("case", "bench")
    assert (left or (it.found[-1].status, it.found[-1].why)) == found


def test_the_table_says_what_it_is_of_and_what_is_missing():
    figures = [
        {
            "part": "a",
            "case": "b",
            "figures": {"rows/s": 12345.6, "ratio": 0.98765, "use": None},
            "status": "done",
            "why": "",
        },
        {"part": "a", "case": "c", "figures": {}, "status": "skipped", "why": "no time left"},
    ]
    document = {"device_name": "X", "budget_s": 600.0, "spent_s": 100.0, "tried_on_a_cpu": True, "figures": figures}
    lines = gpu.table(document).splitlines()
    assert lines[0].startswith("X, 100 s of 600 s. **The program was tried on a CPU")
    assert lines[4:] == ["| a | b | rows/s 12,346; ratio 0.988; use – |", "| a | c | **skipped** no time left |"]
    assert "CPU" not in gpu.table({**document, "tried_on_a_cpu": False})


def needed() -> dict[str, Requirement]:
    """All that gpuinfer and these tests load, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = [*project["optional-dependencies"]["dev"], *project["optional-dependencies"]["nvml"]]
    own = [Requirement(line) for line in project["dependencies"]]
    own += [one for one in map(Requirement, more) if one.name in (*OF_TESTS, "nvidia-ml-py")]
    found: dict[str, Requirement] = {}
    pending = [(one, True) for one in own]
    while pending:
        one, direct = pending.pop(0)
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in found or name in BESIDE_TORCH | NOT_LOADED:
            continue
        found[name] = one if direct else Requirement(name)
        try:
            below = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue
        pending += [(it, False) for it in below if it.marker is None or it.marker.evaluate(THERE)]
    return found


def test_the_packages_that_travel_are_all_that_is_needed():
    lines = (ROOT / "benchmarks" / "gpu-packages.txt").read_text().splitlines()
    listed = {one.name: one for line in lines if not line.startswith("#") for one in [Requirement(line)]}
    assert sorted(needed().keys() - listed.keys()) == []
    asked = {name: one.specifier for name, one in needed().items() if one.specifier}
    assert {name: listed[name].specifier for name in asked} == asked


@pytest.mark.soak  # ten minutes of many processes
@pytest.mark.timeout(600)
def test_all_of_it_on_a_cpu_leaves_figures_of_every_part(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", "DTYPE": "float32", "SECONDS_IN_ALL": "500"}
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    document = json.loads((tmp_path / "gpu.json").read_text())
    failed = [one for one in document["figures"] if one["status"] == "failed"]
    assert (done.returncode, failed) == (0, []), done.stderr
    assert document["tried_on_a_cpu"]
    found = {one["part"] for one in document["figures"] if one["figures"]}
    cut = {one["part"] for one in document["figures"] if one["status"] == "shortened"}  # on a busy machine
    assert found | cut == gpu.PARTS.keys() - {"tests", "fragmentation"}  # which need CUDA, and say so
    assert {"kernels", "selfplay", "memory"} <= found
    assert (tmp_path / "gpu.md").read_text() in done.stdout
