"""What people see: words and numbers, the live view at every size, the final panel."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpuinfer import units
from gpuinfer.api import Progress, Roofline
from gpuinfer.cli.screen import final_panel, live_view
from gpuinfer.cli.screen.display import frame, result_panel, svg
from gpuinfer.runtime.run import RunUpdate
from gpuinfer.stats import Histogram, Snapshot

LANES = (
    {"name": "worker 0", "stations": {"search": 3.0, "idle": 1.0}},
    {"name": "forward 0", "stations": {"forward": 3.5, "reply": 0.001, "idle": 0.5}},
)


def update(at: float = 4.0, **parts: Any) -> RunUpdate:
    """Half way through 200 games, `at` seconds into the run."""
    values = {
        "progress": Progress(100, 200, "games", {"evaluations": 9e4, "games": 100, "simulations": 2.7e5}),
        "snapshot": Snapshot(rows=90_000, requests=200, batches={300: 100, 600: 100}, waiting=384, lanes=LANES),
        "elapsed_s": at,
        "setup_s": 1.0,
        "phase": "running",
        "roofline": Roofline(25_000.0, 512, "2 forwards × 1 thread"),
    }
    return RunUpdate(**{**values, **parts})


EMPTY = update(0.0, progress=Progress(0), snapshot=Snapshot(), setup_s=0.0, phase="", roofline=None)
RATES = {"games": 8.0, "rows": 2e4, "evaluations": 2e4}


def drawn(renderable: Any, width: int = 100, **console: Any) -> str:
    screen = Console(width=width, file=io.StringIO(), **console)
    screen.print(renderable)
    return screen.file.getvalue()


def view(moment: RunUpdate, width: int = 100, height: int = 30, rates: Mapping[str, float] = RATES) -> str:
    return drawn(frame(moment, rates, "selfplay · inprocess · dynamic", width, height), width)


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        (units.number, {0: "0", 7: "7", 1.5: "1.50", 512: "512", 999.4: "999", 999.6: "1.00 k", 45_210: "45.2 k"}),
        (units.number, {1.234e6: "1.23 M", 9.99e11: "999 G", 5e15: "5000 T", -1500: "-1.50 k", float("nan"): "–"}),
        (
            units.duration,
            {0: "0 s", 59.4: "59 s", 59.6: "1 min 00 s", 250: "4 min 10 s", 7500: "2 h 05 min", -1: "0 s"},
        ),
        (units.short, {0: "0 s", 3.5e-4: "350 µs", 1.2e-3: "1.20 ms", 3.4: "3.40 s"}),
    ],
)
def test_numbers_and_times_have_three_digits_and_a_magnitude(said, texts):
    assert {value: said(value) for value in texts} == texts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s left"),
        (40, "40 s left"),
        (725, "about 12 min left, until 23:12"),
        (3590, "about 1 h left, until 23:59"),
        (7900, "about 2 h 10 min left, until 01:11"),
        (11 * 3600, "about 11 h left, until 10:00"),
        (75 * 3600, "about 3 days left, until Sun 29 Nov, 02:00"),
        (1e15, "about 11574074074 days left"),
    ],
)
def test_the_time_left_is_an_estimate_and_says_when_that_will_be(seconds, text):
    assert units.left_until(seconds, datetime(2026, 11, 25, 23, 0)) == text


@given(st.floats(-1, 2), st.integers(1, 60))
def test_a_bar_fills_its_columns_exactly(share, width):
    assert len(units.bar(share, width)) == width


def test_rates_are_those_of_the_last_seconds_and_tokens_count_as_they_are_drawn():
    pace = live_view.ProgressPace()
    for second in range(20):
        games = second if second < 10 else 10 + (second - 10) * 5
        pace.add(update(second + 1.0, progress=Progress(games, 100, "games", {"games": games})))
    assert pace.rates()["games"] == pytest.approx(5.0)
    pace = live_view.ProgressPace()
    for second in range(6):
        tokens = {"input": 100.0, "output": 300.0 * second}
        shown = Snapshot(batches={60: 100}, slots=64, device={"tokens": tokens})
        progress = Progress(0, 200, "rows", {"input_tokens": 0, "output_tokens": 0})
        pace.add(last := update(second + 1, snapshot=shown, progress=progress))
    assert pace.rates()["output_tokens"] == pytest.approx(300.0)
    chart = live_view.batch_chart(last.snapshot, 5)
    assert (chart.title, chart.remark) == ("rows in a step", "mean 60 of 64 slots")
    assert "60 of 64 slots in use" in live_view.ViewLines().due(last, {})


TEXT_RATES = {"output_tokens": 1e3, "input_tokens": 200.0, "cached_tokens": 0.0, "sequences": 8.0}


@pytest.mark.parametrize(
    ("rates", "texts"),
    [
        ({"games": 8.0, "evaluations": 2e4, "rows": 2e4}, ["480 games/min", "20.0 k evaluations/s"]),
        ({"rows": 50.0}, ["50 rows/s"]),
        ({"games": 1.0, "rows": 0.0}, ["60 games/min"]),
        (TEXT_RATES, ["1.00 k output tokens/s", "200 input tokens/s", "8 sequences/s"]),
        ({}, []),
    ],
)
def test_rates_say_what_there_is_to_say(rates, texts):
    assert live_view.rates_of(rates) == texts


def test_the_time_left_is_told_once_it_can_be_and_narrow_views_leave_out_until_when():
    progress = {(50, 200): "12 s left", (0, 200): "", (50, None): "", (200, 200): "0 s left"}
    assert {one: live_view.left_of(update(4.0, progress=Progress(*one))) for one in progress} == progress
    moment = update(3600.0, progress=Progress(50, 200, "games"))
    assert re.search(r" · about 3 h left, until \d\d:\d\d$", live_view.ViewLines().due(moment, {}))
    assert re.search(r"about 3 h left, until \d\d:\d\d ", view(moment))
    narrow = view(moment, 60)
    assert ("about 3 h left" in narrow, "until" in narrow) == (True, False)


def test_plain_lines_come_every_few_seconds_and_at_each_new_phase():
    lines = live_view.ViewLines()
    setup = Progress(0, 200, "games", note="compiling", setup=True)
    moments = [EMPTY, *[update(0.0, progress=setup, phase="compiling the search kernels (first run)")] * 3]
    moments += [update(second / 2) for second in range(1, 20)]
    said = [line for moment in moments if (line := lines.due(moment, {"games": 8.0}))]
    assert said[0] == "compiling the search kernels (first run) …"
    assert [line.partition(" · ")[0] for line in said[1:]] == ["0 s", "6 s"]
    assert "100 of 200 games · 480 games/min · 450 rows a batch" in said[1]


@pytest.mark.parametrize("width", [40, 60, 80, 110, 200])
@pytest.mark.parametrize("moment", [update(), EMPTY, update(snapshot=Snapshot())], ids=["busy", "nothing", "no rows"])
def test_the_live_view_fits_any_terminal(width, moment):
    for height in (16, 24, 50):
        lines = view(moment, width, height).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) < max(height, 18)


@pytest.mark.parametrize(("width", "shown"), [(60, 2), (80, 3), (92, 4), (140, 4)])
def test_the_live_view_shows_as_many_rates_as_fit_and_each_whole(width, shown):
    rates = {"output_tokens": 1120.0, "input_tokens": 918.0, "cached_tokens": 796.0, "sequences": 40.5}
    units = ["output tokens/s", "input tokens/s", "cached tokens/s", "sequences/s"]
    said = view(update(), width, rates=rates)
    assert [unit for unit in units if unit in said] == units[:shown]
    assert "…" not in said


def timed(*seconds: float) -> dict[str, Any]:
    histogram = Histogram()
    for each in seconds:
        histogram.add(each)
    return histogram.to_wire()


FIRST = Snapshot(lanes=LANES, first_token=timed(0.25))
BUSY = "100 of 200 games|50%|480 games/min|≤ 512|forward|384 rows waiting|80% of the roofline"


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (update(), BUSY),
        (update(snapshot=Snapshot(errors={"failed": 3})), "3 failed"),
        (update(snapshot=Snapshot(errors={"failed": 1, "expired": 2}), progress=Progress(9, failed=4)),
         "4 failed, 2 expired"),
        (update(phase="stopping"), "stopping"),
        (update(0.0, phase="measuring the roofline"), "measuring the roofline …"),
        (update(snapshot=Snapshot(device={"name": "H200", "utilisation": 0.97})), "H200 97% busy"),
        (update(snapshot=FIRST), "first token after 250 ms"),
        (update(snapshot=replace(FIRST, between_tokens=timed(0.012))),
         "first token after 250 ms, then every 12.0 ms"),
    ],
)  # fmt: skip
def test_the_live_view_tells(moment, words):
    shown = view(moment)
    assert [word for word in words.split("|") if word not in shown] == []


def test_trifles_are_left_out_and_so_are_colours_when_nobody_wants_them(monkeypatch):
    chart = live_view.time_chart(update(snapshot=Snapshot(lanes=LANES)), rows=10)
    assert [label for label, _, _ in chart.bars] == ["forward", "search", "idle"]
    picture = svg(frame(update(), {}, "selfplay", 80, 24), "gpuinfer selfplay")
    assert "url(" not in picture.replace("url(#", ""), "a font of another host, which a reader's browser would ask for"
    assert picture.startswith("<svg")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in drawn(frame(update(), {}, "selfplay", 80, 24), force_terminal=True)


BATCHES = {"count": 12_345, "rows_mean": 401.2, "rows_p50": 384, "rows_max": 512, "reasons": {"full": 3, "free": 1}}
ADVICE = {
    "class": "device-saturated",
    "why": "forward is busy 98% of the time",
    "advice": "Use bfloat16.",
    "command": "gpuinfer selfplay --dtype bfloat16",
}
REPORT: Mapping[str, Any] = {
    "workload": "selfplay",
    "status": "done",
    "wall_s": 250.0,
    "progress": {"done": 200, "total": 200, "unit": "games"},
    "throughput": {"rows_per_s": 5.0, "evaluations_per_s": 45_210.0, "games_per_min": 512.0},
    "batches": BATCHES,
    "latency_s": {"mean": 0.012, "max": 0.1},
    "time_s": {"forward": 70.0, "search": 29.9, "reply": 0.1},
    "roofline": {"rows_per_s": 48_000.0, "at_rows": 512, "arrangement": "2 forwards × 1 thread", "efficiency": 0.94},
    "bottleneck": ADVICE,
    "errors": {"failed": 2, "retried": 0},
    "memory": {"rss_peak_mb": 812.0, "device_peak_mb": None},
    "device": {"name": "AMD EPYC", "utilisation": None},
    "settings": {"selfplay": {"out": "games[1]"}},
}
SHORT_OF_PAGES = {"waited_rows": 58, "preempted_rows": 49, "recomputed_tokens": 1024}
SPECULATION = {
    "proposed_tokens": 1300.0, "accepted_tokens": 806.0, "acceptance": 0.62, "tokens_per_step": 2.61, "gain": 2.2
}  # fmt: skip
GAIN = {"low": 1.3, "high": 1.7, "expected": 1.5}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "done in 4 min 10 s|200 of 200 games|512 games/min|45.2 k evaluations/s|12,345, rows: mean 401"),
        ({}, "full 75%, free 25%|mean 12 ms|forward 70%, search 30%|94% of 48.0 k rows/s at 512 rows|2 failed|851 MB"),
        ({}, "device-saturated: forward is busy 98%|gpuinfer selfplay --dtype bfloat16|games[1]"),
        ({"pages": SHORT_OF_PAGES}, "ran short: 58 rows waited for some, 49"),
        ({"speculation": SPECULATION}, "62% of 1,300 proposed|2.61 tokens of a row in a step|2.20 times as fast"),
        ({"bottleneck": {**ADVICE, "gain": GAIN}}, "Predicted, not tried: 1.5 times as fast (1.3 to 1.7)."),
        ({"bottleneck": {**ADVICE, "gain": {"low": 1.0, "high": 2.0, "expected": None}}},
         "Predicted, not tried: at most 2.0 times as fast."),
        ({"bottleneck": {**ADVICE, "gain": {"low": 1.0, "high": 1.0, "expected": None}}}, "Use bfloat16. "),
    ],
)  # fmt: skip
def test_the_final_panel_says(more, words):
    shown = drawn(result_panel({**REPORT, **more}), 160)
    assert [word for word in words.split("|") if word not in shown] == []
    assert ("ran short" in shown) == ("pages" in more)


@pytest.mark.parametrize("missing", sorted(REPORT))
def test_the_final_panel_does_without_any_part(missing):
    assert "gpuinfer" in drawn(result_panel({key: value for key, value in REPORT.items() if key != missing}))
    assert [row.text for row in final_panel.panel_rows({})] == ["nothing was finished"]


MODEL = {"model": "tiny", "slots": 64, "context": 2048}
MODEL |= {"estimated_bytes": 870e6, "estimated_weights_bytes": 21e6, "measured_bytes": 850e6}
GENERATED: Mapping[str, Any] = {
    "workload": "generate",
    "status": "partial",
    "wall_s": 250.0,
    "progress": {"done": 150, "total": 200, "unit": "rows"},
    "throughput": {"rows_per_s": 5.0, "requests_per_s": 5.0, "input_tokens_per_s": 90.0, "output_tokens_per_s": 640.0},
    "batches": {**BATCHES, "count": 1300, "rows_mean": 60.0, "rows_p50": 64, "rows_max": 64, "slots": 64,
                "occupancy": 60 / 64},
    "model": MODEL,
    "memory": {"rss_peak_mb": 812.0, "device_peak_mb": None},
    "settings": {"generate": {"output": "out.jsonl", "resume": False}},
}  # fmt: skip


def test_the_final_panel_of_text_says_tokens_steps_and_what_the_model_takes():
    cure = "The same command with --resume goes on."
    assert [(row.name, row.text) for row in final_panel.panel_rows(GENERATED)] == [
        ("finished", "150 of 200 rows"),
        ("throughput", "640 output tokens/s\n90 input tokens/s\n5 sequences/s"),
        ("steps", "1,300, rows: mean 60, median 64, most 64, 94% of 64 slots in use"),
        ("model", "tiny, 64 slots of 2,048 tokens"),
        ("memory", "851 MB at most; the model: 870 MB estimated (21.0 MB of weights), 850 MB measured"),
        ("answers", "out.jsonl"),
        ("", f"Stopped with work left. {cure}"),
    ]
    report = {**GENERATED, "errors": {"failed": 1, "cancelled": 28}}  # what is still to do is no error
    said = {row.name: row.text for row in final_panel.panel_rows(report)}
    assert said["errors"] == "1 failed"
    assert said[""] == f"Stopped with work left: 28 requests under way or waiting. {cure}"
    done = {row.name: row.text for row in final_panel.panel_rows({**report, "status": "done"})}
    assert done["errors"] == "1 failed, 28 cancelled"
