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
from gpuinfer.models.roofline_process import FAR, KEPT_S, KeptSearch, kept_path, recall, recall_text, remember
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


def test_what_was_found_is_found_again_by_the_same_run_alone():
    assert recall(place()) is None
    remember(place(), FOUND)
    assert recall(place()) == FOUND
    assert stat.S_IMODE(place().stat().st_mode) == 0o600
    for changes in (
        {"dtype": "bfloat16"},
        {"compute": "float32"},
        {"cores": 1},
        {"deterministic": True},
        {"spec": replace(SPEC, name="blobnet")},
        {"spec": replace(SPEC, inputs=17)},
        {"spec": replace(SPEC, arguments={"actions": 6, "seats": 2})},
    ):
        assert recall(place(**changes)) is None, changes


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
        b"",
        b"\xff\x00{",
        b"[" * 4096,
        b"[1, 2]",
        b'{"at_rows": true, "arrangement": "a", "rows_per_s": 1.0, "peak_mb": 1.0}',
        b'{"at_rows": 0, "arrangement": "a", "rows_per_s": 1.0, "peak_mb": 1.0}',
        b'{"at_rows": 64, "arrangement": 7, "rows_per_s": 1.0, "peak_mb": 1.0}',
        b'{"at_rows": 64, "arrangement": "a", "rows_per_s": NaN, "peak_mb": 1.0}',
        b'{"at_rows": 64, "arrangement": "a", "rows_per_s": 1.0}',
    ],
)
def test_what_is_damaged_is_not_believed(content):
    place().write_bytes(content)
    assert recall(place()) is None
    remember(place(), FOUND)
    assert recall(place()) == FOUND


def test_after_a_week_and_where_others_could_write_nothing_is_believed(cache):
    for age_s in (KEPT_S + 60, -3600.0):
        remember(place(), FOUND)
        os.utime(place(), (time.time() - age_s,) * 2)
        assert recall(place()) is None
    os.chmod(cache / "roofline", 0o777)
    assert place() is None


# What a run makes of it


@pytest.fixture
def asked(monkeypatch):
    """For how long the process that measures was asked to, and at how many rows; it does `rate` rows per second."""

    class Machine:
        asked, rate, peak_mb = [], 1e6, 300.0

        def __init__(self, spec, **arguments):
            pass

        def start(self):
            pass

        def measure(self, budget_s, *, only=None, stopped=None):
            self.asked.append((budget_s, only and only.at_rows))
            return Roofline(self.rate, only.at_rows if only else 512, "2 forwards × 1 thread")

        close = start

    monkeypatch.setattr(run_roofline, "RooflineProcess", Machine)
    return Machine


def measured(device="cpu"):
    return run_roofline.roofline_of(InProcess(Setup(model=SPEC, devices=(device,))))


@pytest.mark.parametrize("factor", [1, 0.9 / FAR, 1.1 * FAR])
def test_the_second_run_measures_what_the_first_has_found_unless_the_rate_is_far_from_what_it_was(factor, asked):
    assert measured() == Roofline(1e6, 512, "2 forwards × 1 thread", (1e6,))
    asked.rate = factor * 1e6
    assert measured().rows_per_s == factor * 1e6
    searched, known = (run_roofline.BEFORE_S, None), (run_roofline.KNOWN_S, 512)
    assert asked.asked == [searched, known, *([] if factor == 1 else [searched])]
    asked.asked.clear()
    measured()
    assert asked.asked == [known], "and is remembered as it is now"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_that_cannot_be_used_is_only_a_slower_start_and_of_cuda_nothing_is_kept(
    device, asked, tmp_path, monkeypatch
):
    """Which of several devices it would be is not known without asking torch."""

    async def all_is_there(self):
        pass

    if device == "cpu":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(InProcess, "check", all_is_there)
    assert measured(device) == measured(device)
    assert [budget for budget, _ in asked.asked] == [run_roofline.BEFORE_S] * 2


TEXT = ModelSpec("tiny", kind="text")
BEST = TextRoofline(1e11, 2e11, 2e10, 64, 256, 9e10)


@pytest.mark.parametrize("damage", [{"flops_per_s": 0.0}, {"bytes_per_s": "fast"}, {"at_rows": 0}, {"at_tokens": 2.5}])
def test_a_damaged_roofline_of_text_is_measured_again(damage):
    place(spec=TEXT).write_text(json.dumps({**asdict(BEST), **damage}))
    assert recall_text(place(spec=TEXT)) is None


@pytest.mark.parametrize(
    ("rows", "wall_s", "outcome"),
    [
        (48, 12.0, BEST),
        (48, 1.0, BEST),  # a run of a second
        (0, 60.0, BEST),
        (48, 60.0, None),  # a backend that cannot
        (48, 60.0, BackendDied("gone. Start it again.")),
    ],
)
def test_a_model_of_text_is_measured_after_its_run_for_a_tenth_of_its_time_and_remembered(rows, wall_s, outcome):
    asked = []

    class Measured(InProcess):
        async def measure(self, rows, seconds):
            asked.append((rows, seconds))
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    backend = Measured(Setup(model=TEXT))
    found = asyncio.run(run_roofline.text_roofline(backend, rows, wall_s))
    kept = recall_text(run_roofline.place_of(backend, machine.cores()))
    if wall_s == 12.0:
        assert (found, kept) == (BEST, replace(BEST, remembered=True))
        assert asked == [(48, pytest.approx(1.2))]
    else:
        assert (found, kept) == (None, None)
