"""`benchmarks/gpu.sh` where there is no GPU: its clock, its table, what travels; each part leaves findings."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


gpu, gpu_probes, gpu_wheels = map(script, ("gpu", "gpu_probes", "gpu_wheels"))

BESIDE_TORCH = {"filelock", "fsspec", "networkx", "numpy", "setuptools", "sympy", "torch", "typing-extensions"}
OF_THE_MACHINE = {"numba", "llvmlite"}
NOT_LOADED = {"huggingface-hub"}  # tokenizers names it, and has no need of it here
OF_TESTS = ("pytest", "pytest-timeout", "hypothesis")
EXTRAS = ("nvml", "plots", "plugins", "schemas", "serve")  # that the GPU tests and benchmarks use
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


@pytest.fixture
def parts(monkeypatch):
    """Run these parts in the place of the real ones; a part is a function of the bench."""

    def run(it, shares, **functions):
        monkeypatch.setattr(gpu, "write", lambda it: None)
        monkeypatch.setattr(gpu, "PARTS", {name: (functions[name], share) for name, share in shares.items()})
        gpu.run(it, list(shares))
        return [(one.part, one.status, one.why) for one in it.found]

    return run


def test_parts_share_the_time_and_what_one_leaves_goes_to_the_others(bench, parts):
    now, allowed = Hand(), {}

    def part(name, takes):
        def taking(it):
            allowed[name] = it.clock.left - it.until
            now.time += takes

        return taking

    functions = {name: part(name, takes) for name, takes in (("a", 10), ("b", 30), ("c", 1))}
    parts(bench(100.0, now), {"a": 50.0, "b": 25.0, "c": 25.0}, **functions)
    assert allowed == {"a": pytest.approx(50.0), "b": pytest.approx(45.0), "c": pytest.approx(60.0)}


def test_when_the_time_is_up_the_rest_is_skipped_and_a_part_that_fails_costs_its_own_figures_alone(bench, parts):
    now = Hand()

    def slow(it):
        it.add("x", {"rows/s": 5.0})
        now.time += 99.0

    def broken(it):
        raise ZeroDivisionError("alas")

    found = parts(
        bench(100.0, now), dict.fromkeys(("broken", "slow", "late"), 1.0), broken=broken, slow=slow, late=None
    )
    late = ("late", "skipped", "no time left")
    assert found == [("broken", "failed", "ZeroDivisionError: alas"), ("slow", "done", ""), late]


def test_a_command_has_its_share_and_one_that_takes_too_long_is_asked_to_stop(bench, monkeypatch):
    now = Hand()
    it = bench(100.0, now)
    it.begin("part", 0.5)
    it.commands = 2
    assert it.allowed == 25.0
    it.commands = 5
    assert it.allowed == gpu.LEAST_S
    now.time += 50.0
    assert it.run("late", [sys.executable, "-c", "pass"]) is None
    assert (it.found[-1].status, it.found[-1].why) == ("skipped", "no time left")
    it = half_a_second(bench(100.0, Hand()), monkeypatch)
    says = "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: exit(3))\ntime.sleep(60)"
    assert it.run("slow", [sys.executable, "-c", says]) == "shortened"
    assert it.run("quick", [sys.executable, "-c", "pass"]) == "done"
    assert it.run("broken", [sys.executable, "-c", "print('no such thing'); exit(1)"]) == "failed"
    assert it.last("broken") == "no such thing"


def half_a_second(it, monkeypatch):
    """A bench whose next commands have so long."""
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    it.begin("part", 1.0)
    it.until = it.clock.left - gpu.STOPPING_S - 0.5
    return it


PROBES = """
import json, sys, time
with open(sys.argv[sys.argv.index("--file") + 1], "a") as file:
    for case in ("one", "two"):
        found = {"part": "part", "case": case, "figures": {"ms": 2.0}, "status": "done", "why": ""}
        print(json.dumps(found), file=file)
    print('{"part": "pa', end="", file=file, flush=True)
    {END}
"""


@pytest.mark.parametrize(
    ("end", "rest"),
    [
        ("time.sleep(60)", [("the rest", "shortened", "no time left")]),
        ("exit('alas')", [("the rest", "failed", "alas")]),
        ("pass", []),
    ],
)
def test_what_probes_have_found_is_kept_however_they_end(bench, monkeypatch, tmp_path, end, rest):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gpu_probes.py").write_text(PROBES.replace("{END}", end))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    it = bench(100.0, Hand())
    it.begin("part", 1.0)
    if "sleep" in end:
        half_a_second(it, monkeypatch)
    it.probes()
    well = [("one", "done", ""), ("two", "done", "")]
    assert [(one.case, one.status, one.why) for one in it.found] == well + rest
    assert json.loads((tmp_path / "gpu.json").read_text())["figures"][0]["figures"] == {"ms": 2.0}


def test_tests_that_fail_are_named(bench, monkeypatch):
    it = bench(100.0, Hand())
    it.begin("tests", 1.0)
    said = [
        "..F",
        "FAILED tests/test_gpu.py::test_graphs[a case] - AssertionError: 3 - 4",
        "ERROR tests/text/test_x.py::test_it",
        "1 failed, 2 passed, 7 deselected, 1 error in 3.20s",
    ]

    def run(case, words, **more):
        it.file(case, "log").write_text("\n".join(said) + "\n")
        return "failed"

    monkeypatch.setattr(it, "run", run)
    gpu.tests(it)
    assert [(one.case, one.why, one.figures) for one in it.found] == [
        ("tests/test_gpu.py::test_graphs[a case]", "AssertionError: 3 - 4", {}),
        ("tests/text/test_x.py::test_it", "", {}),
        ("GPU tests", "", {"failed": 1.0, "passed": 2.0, "error": 1.0}),
    ]
    assert all(one.status == "failed" for one in it.found)


def test_what_a_command_leaves_counts_however_it_ends_and_the_table_says_what_is_missing(bench, monkeypatch):
    it = bench(100.0, Hand())
    it.begin("part", 1.0)
    run, left = it.run, iter(["file.write_text('{}')", "file.write_text('{}'); exit(4)", "print('alas'); exit(1)"])

    def instead(case, words):
        script = f"import pathlib; file = pathlib.Path({str(words[-1])!r}); {next(left)}"
        return run(case, [sys.executable, "-c", script])

    monkeypatch.setattr(it, "run", instead)
    assert [it.gpuinfer("case", "bench") for _ in range(2)] == [({}, "done")] * 2
    it.gpuinfer("other", "bench")
    assert (it.found[-1].status, it.found[-1].why) == ("failed", "alas")
    figures = [{"part": "a", "case": "b", "status": "done", "why": "", "figures": {"rows/s": 12345.6, "use": None}}]
    figures += [{"part": "a", "case": "c", "figures": {}, "status": "skipped", "why": "no time left"}]
    document = {"device_name": "X", "budget_s": 600.0, "spent_s": 100.0, "tried_on_a_cpu": True, "figures": figures}
    lines = gpu.table(document).splitlines()
    assert lines[0].startswith("X, 100 s of 600 s. **The program was tried on a CPU")
    assert lines[4:] == ["| a | b | rows/s 12,346; use – |", "| a | c | **skipped** no time left |"]
    assert "CPU" not in gpu.table({**document, "tried_on_a_cpu": False})


def needed() -> dict[str, Requirement]:
    """All that gpuinfer and these tests load, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    own = [Requirement(line) for line in project["dependencies"]]
    own += [Requirement(line) for extra in EXTRAS for line in optional[extra]]
    own += [one for one in map(Requirement, optional["dev"]) if one.name in OF_TESTS]
    found: dict[str, Requirement] = {}
    without = BESIDE_TORCH | OF_THE_MACHINE | NOT_LOADED
    pending = [(one, True) for one in own]
    while pending:
        one, direct = pending.pop(0)
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in found or name in without:
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


BARE = ("attention", "blobnet", "batcher", "text", "permuted", "prefixes")  # the script below has versions


@pytest.mark.parametrize("part", BARE)
def test_each_part_of_probes_leaves_findings_on_a_cpu(part, tmp_path):
    file = tmp_path / "findings"
    assert gpu_probes.main([part, "--file", str(file), "--device", "cpu", "--dtype", "float32"]) == 0
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one for one in found if one["status"] == "failed"] == []
    assert {one["why"] for one in found if one["status"] == "skipped"} <= {gpu_probes.NO_DEVICE}
    measured = [one for one in found if one["status"] == "done"]
    assert len(measured) >= 4
    assert all(one["figures"] or one["why"] for one in measured)
    if part == "permuted":
        assert all(one["figures"]["share of the same bits"] == 1.0 for one in measured)


@pytest.fixture
def probes(tmp_path, monkeypatch):
    """Probes on a CPU that stands in for a device with streams, waits and captures."""
    for name in ("Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace())
    return gpu_probes.Probes("part", torch.device("cpu"), torch.float32, gpu_probes.ON_CPU, tmp_path / "findings")


def refusing(*_):
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


def capturing(monkeypatch, *ends):
    """Captures, of which each ends as the next of these functions does; set once the first is over."""
    over, left = threading.Event(), iter(ends)

    @contextlib.contextmanager
    def captured(stream, pool):
        yield
        over.set()
        next(left)()

    monkeypatch.setattr(gpu_probes, "captured", captured)
    return over


def nothing(*_):
    pass


@pytest.mark.parametrize(
    ("act", "ends", "said"),
    [
        (nothing, nothing, "allowed; the capture survived"),
        (refusing, nothing, "refused: operation not permitted; the capture survived"),
        (nothing, refusing, "allowed; the capture broke: operation not permitted"),
    ],
)
def test_what_becomes_of_a_capture_is_told(probes, monkeypatch, act, ends, said):
    seen, over = [], capturing(monkeypatch, ends)

    def acts(it):
        seen.append(over.wait(0.2))  # the capture waits for what is done meanwhile
        act(it)

    assert gpu_probes.during_a_capture(probes, acts) == said
    assert seen == [False]


def test_after_a_capture_that_fails_memory_and_captures_are_tried(probes, monkeypatch):
    emptied: list[bool] = []
    capturing(monkeypatch, refusing, nothing, refusing, nothing)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0 if emptied else 256 << 20)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    said = "fails (operation not permitted); 256 of 256 MiB given back; another capture: works"
    assert gpu_probes.after_a_failed_capture(probes) == said
    monkeypatch.setattr(torch.cuda, "empty_cache", refusing)
    assert "empty_cache fails: operation not permitted" in gpu_probes.after_a_failed_capture(probes)


def test_a_probe_that_fails_is_a_finding_and_the_others_go_on(probes):
    def lacks():
        raise gpu_probes.NotHere("it is not here")

    probes.attempt("broken", refusing)
    probes.attempt("lacking", lacks)
    probes.attempt("of CUDA", refusing, cuda=True)
    probes.attempt("well", lambda: {"ms": 1.0})
    probes.seconds = 0.0
    probes.attempt("late", lambda: {"ms": 1.0})
    found = [json.loads(line) for line in probes.file.read_text().splitlines()]
    assert [(one["case"], one["status"], one["why"]) for one in found] == [
        ("broken", "failed", "RuntimeError: operation not permitted"),
        ("lacking", "skipped", "it is not here"),
        ("of CUDA", "skipped", "no CUDA device"),
        ("well", "done", ""),
        ("late", "skipped", "no time left"),
    ]


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        head = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in needs)]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "Metadata-Version: 2.1\n" + "\n".join(head) + "\n\n")
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}-{version}.data/purelib/{name}_more.py", "")


@pytest.mark.parametrize(
    ("here", "taken"),
    [
        ({}, ["a", "core"]),
        ({"a": "2.1", "core": "1.0"}, []),
        ({"a": "1.0", "core": "1.0"}, ["a", "core"]),  # too old, and what a newer one needs
        ({"a": "2.1"}, ["core"]),
    ],
)
def test_what_the_machine_has_is_preferred(monkeypatch, tmp_path, here, taken):
    for one in ("wheels", "site"):
        (tmp_path / one).mkdir()
    wheel(tmp_path / "wheels", "a", "2.3", "core==1.5", "numpy>=2", "extra; extra == 'more'")
    wheel(tmp_path / "wheels", "core", "1.5")
    wheel(tmp_path / "wheels", "numba", "0.65")  # never: the machine's own
    (tmp_path / "listed").write_text("# a comment\na>=2\ncore\nnumba>=0.62\n")
    monkeypatch.setattr(gpu_wheels, "LISTED", tmp_path / "listed")
    monkeypatch.setattr(gpu_wheels, "installed", lambda: here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert gpu_wheels.main(["unpack", str(tmp_path / "wheels"), str(tmp_path / "site")]) == 0
    site = tmp_path / "site"
    assert sorted(one.name for one in site.iterdir() if (one / "__init__.py").exists()) == taken
    assert sorted(one.name for one in site.glob("*_more.py")) == [f"{name}_more.py" for name in taken]


def test_more_than_may_travel_is_refused_with_its_size(capsys):
    mib = 1 << 20
    assert gpu_wheels.said(40 * mib, 10 * mib, 45) == 0
    assert "45 wheels of 40.0 MiB and a repository of 10.0 MiB, 50.0 MiB in all" in capsys.readouterr().out
    assert gpu_wheels.said(60 * mib, 10 * mib, 46) == 1
    assert "too much: 46 wheels of 60.0 MiB" in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_repository_leaves_room_for_the_packages():
    assert 1 << 20 < gpu_wheels.tree(ROOT / "nowhere") < 20 << 20


def started(folder: Path, seconds: int, **more: str) -> subprocess.Popen[str]:
    given = {"PYTHON": sys.executable, "DEVICE": "cpu", "DTYPE": "float32", "SECONDS_IN_ALL": str(seconds), **more}
    command = [ROOT / "benchmarks" / "gpu.sh", folder]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **given}, text=True, **pipes)


@pytest.mark.thorough
def test_the_script_leaves_a_table_and_few_files(tmp_path):
    process = started(tmp_path / "results", 240, PARTS="versions")
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert {one.name for one in (tmp_path / "results").iterdir()} == {"gpu.md", "gpu.json", "commands.tar.gz"}
    with tarfile.open(tmp_path / "results" / "commands.tar.gz") as packed:
        assert "commands/versions-probes.log" in packed.getnames()
    assert (tmp_path / "results" / "gpu.md").read_text() in out
    assert "The program was tried on a CPU" in out
    figures = json.loads((tmp_path / "results" / "gpu.json").read_text())["figures"]
    found = {one["case"]: (one["status"], one["why"]) for one in figures}
    assert found["torch"] == ("done", torch.__version__)
    assert found["numba compiles"][0] == "done"
    assert found["varlen_attn"] == ("skipped", "this torch has none") or "cu_seq_q" in found["varlen_attn"][1]
    assert found["after a capture that fails"] == ("skipped", "no CUDA device")
    assert not any(status == "failed" for status, _ in found.values())


def test_there_is_no_part_of_another_name(tmp_path):
    process = started(tmp_path, 60, PARTS="versions,blobnets")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "no part blobnets. There are versions, attention" in err


@pytest.mark.soak  # minutes of many processes; each part has a test of its own
@pytest.mark.timeout(900)
def test_all_of_it_on_a_cpu_leaves_figures_of_every_part(tmp_path):
    process = started(tmp_path, 600)
    out, err = process.communicate(timeout=700)
    document = json.loads((tmp_path / "gpu.json").read_text())
    failed = [one for one in document["figures"] if one["status"] == "failed"]
    assert (process.returncode, failed) == (0, []), err
    assert document["tried_on_a_cpu"]
    assert document["spent_s"] < 600
    found = {one["part"] for one in document["figures"] if one["figures"]}
    cut = {one["part"] for one in document["figures"] if one["status"] == "shortened"}  # on a busy machine
    assert found | cut == gpu.PARTS.keys()
    assert {"attention", "blobnet", "text", "permuted", "memory"} <= found
    assert (tmp_path / "gpu.md").read_text() in out
