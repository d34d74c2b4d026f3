"""Where the bare model was at its best, from run to run."""

import asyncio
import json
import os
import stat
import time
from dataclasses import asdict, replace

import pytest

from gpuinfer.api import ModelSpec, Roofline, Setup, TextRoofline
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BackendDied
from gpuinfer.host import machine
from gpuinfer.models import processor, roofline_process
from gpuinfer.models.roofline_process import (
    FAR,
    KEPT_S,
    KeptSearch,
    kept_path,
    recall,
    recall_text,
    remember,
)
from gpuinfer.runtime import run_roofline

FOUND = KeptSearch(1024, "2 forwards × 1 thread", 5e5, 300.0)
SPEC = ModelSpec("blobnet-small", inputs=16, arguments={"actions": 5, "seats": 2})
RUN = {"dtype": "float32", "compute": "auto", "cores": 2, "deterministic": False}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpuinfer"


def place(**changes):
    return kept_path(changes.pop("spec", SPEC), **{**RUN, **changes})


def test_what_was_found_is_found_again():
    assert recall(place()) is None
    remember(place(), FOUND)
    assert recall(place()) == FOUND
    assert stat.S_IMODE(place().stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dtype": "bfloat16"}, id="number format"),
        pytest.param({"compute": "float32"}, id="format of the arithmetic"),
        pytest.param({"cores": 1}, id="cores"),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"spec": replace(SPEC, name="blobnet")}, id="model"),
        pytest.param({"spec": replace(SPEC, inputs=17)}, id="features"),
        pytest.param({"spec": replace(SPEC, arguments={"actions": 6, "seats": 2})}, id="arguments"),
    ],
)
def test_of_another_run_nothing_is_known(changes):
    remember(place(), FOUND)
    assert recall(place(**changes)) is None


@pytest.mark.parametrize("changed", ["name", "flags", "told to leave them unused", "torch"])
def test_on_another_machine_nothing_is_known(changed, tmp_path, monkeypatch):
    lines = {"name": "model name : Acme 1", "flags": "flags : avx2 avx512f"}
    (tmp_path / "cpuinfo").write_text("\n".join(lines.values()))
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    remember(place(), FOUND)
    assert recall(place()) == FOUND
    if changed in lines:
        (tmp_path / "cpuinfo").write_text("\n".join({**lines, changed: lines[changed][:-1]}.values()))
    elif changed == "torch":
        monkeypatch.setattr(roofline_process, "version", lambda package: "9.9")
    else:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert recall(place()) is None


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\x00{", id="no text"),
        pytest.param(b"[" * 4096, id="too deep"),
        pytest.param(b"[1, 2]", id="another form"),
        pytest.param(
            b'{"at_rows": true, "arrangement": "a", "rows_per_s": 1.0, "peak_mb": 1.0}', id="no number of rows"
        ),
        pytest.param(b'{"at_rows": 0, "arrangement": "a", "rows_per_s": 1.0, "peak_mb": 1.0}', id="no rows"),
        pytest.param(b'{"at_rows": 64, "arrangement": 7, "rows_per_s": 1.0, "peak_mb": 1.0}', id="no arrangement"),
        pytest.param(b'{"at_rows": 64, "arrangement": "a", "rows_per_s": NaN, "peak_mb": 1.0}', id="no rate"),
        pytest.param(b'{"at_rows": 64, "arrangement": "a", "rows_per_s": 1.0}', id="no memory"),
    ],
)
def test_what_is_damaged_is_not_believed(content):
    place().write_bytes(content)
    assert recall(place()) is None
    remember(place(), FOUND)
    assert recall(place()) == FOUND


@pytest.mark.parametrize("age_s", [KEPT_S + 60, -3600.0])
def test_after_a_week_it_is_looked_for_again(age_s):
    remember(place(), FOUND)
    then = time.time() - age_s
    os.utime(place(), (then, then))
    assert recall(place()) is None


def test_where_others_could_write_nothing_is_believed(cache):
    remember(place(), FOUND)
    os.chmod(cache / "roofline", 0o777)
    assert place() is None


# What a run makes of it


class Machine:
    """Stands in for the process that measures: does `rate` rows per second, best at 512 rows."""

    rate = 1e6
    asked: list

    def __init__(self, spec, **arguments):
        self.peak_mb = 300.0

    def start(self):
        pass

    def measure(self, budget_s, *, only=None, stopped=None):
        self.asked.append((budget_s, only and only.at_rows))
        return Roofline(self.rate, only.at_rows if only else 512, "2 forwards × 1 thread")

    def close(self):
        pass


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(run_roofline, "RooflineProcess", Machine)
    monkeypatch.setattr(Machine, "asked", [], raising=False)
    return Machine.asked


def measured(device="cpu"):
    return run_roofline.roofline_of(InProcess(Setup(model=SPEC, devices=(device,))))


def test_the_second_run_measures_what_the_first_has_found(asked):
    assert measured() == measured() == Roofline(1e6, 512, "2 forwards × 1 thread", (1e6,))
    assert asked == [(run_roofline.BEFORE_S, None), (run_roofline.KNOWN_S, 512)]


@pytest.mark.parametrize("factor", [0.9 / FAR, 1.1 * FAR])
def test_a_rate_that_is_far_from_what_it_was_is_looked_for_again(factor, asked, monkeypatch):
    measured()
    monkeypatch.setattr(Machine, "rate", factor * 1e6)
    assert measured().rows_per_s == factor * 1e6
    assert asked[1:] == [(run_roofline.KNOWN_S, 512), (run_roofline.BEFORE_S, None)]
    asked.clear()
    measured()
    assert asked == [(run_roofline.KNOWN_S, 512)], "and is remembered as it is now"


def test_a_cache_that_cannot_be_used_is_only_a_slower_start(asked, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measured() == measured()
    assert [budget for budget, _ in asked] == [run_roofline.BEFORE_S] * 2


def test_of_cuda_nothing_is_kept(asked, monkeypatch):
    """Which of several devices it would be is not known without asking torch."""

    async def all_is_there(self):
        pass

    monkeypatch.setattr(InProcess, "check", all_is_there)
    assert measured("cuda") == measured("cuda")
    assert [budget for budget, _ in asked] == [run_roofline.BEFORE_S] * 2


TEXT = ModelSpec("tiny", kind="text")
BEST = TextRoofline(1e11, 2e11, 2e10, 64, 256, 9e10)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({"flops_per_s": 0.0}, id="no rate"),
        pytest.param({"bytes_per_s": "fast"}, id="no number"),
        pytest.param({"at_rows": 0}, id="no rows"),
        pytest.param({"at_tokens": 2.5}, id="half a token"),
    ],
)
def test_a_damaged_roofline_of_text_is_measured_again(damage):
    place(spec=TEXT).write_text(json.dumps({**asdict(BEST), **damage}))
    assert recall_text(place(spec=TEXT)) is None


class Measured(InProcess):
    """A backend whose model is measured by what a test says."""

    asked: tuple[int, float] | None = None
    outcome: TextRoofline | Exception | None = BEST

    async def measure(self, rows, seconds):
        self.asked = rows, seconds
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_a_model_of_text_is_measured_after_its_run_for_a_tenth_of_its_time_and_remembered():
    backend = Measured(Setup(model=TEXT))
    assert asyncio.run(run_roofline.text_roofline(backend, 48, 12.0)) == BEST
    assert backend.asked == (48, pytest.approx(1.2))
    assert recall_text(run_roofline.place_of(backend, machine.cores())) == replace(BEST, remembered=True)


@pytest.mark.parametrize(
    ("rows", "wall_s", "outcome"),
    [
        pytest.param(48, 1.0, BEST, id="a run of a second"),
        pytest.param(0, 60.0, BEST, id="no rows"),
        pytest.param(48, 60.0, None, id="a backend that cannot"),
        pytest.param(48, 60.0, BackendDied("gone. Start it again."), id="a model that is gone"),
    ],
)
def test_a_run_goes_on_without_what_cannot_be_measured(rows, wall_s, outcome):
    backend = Measured(Setup(model=TEXT))
    backend.outcome = outcome
    assert asyncio.run(run_roofline.text_roofline(backend, rows, wall_s)) is None
