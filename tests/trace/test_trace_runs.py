"""Any run records a trace, however it ends; batches are recorded where they are formed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import forking
import pytest
from helpers import AtOnce, Counting, Doubler, Spread
from playing import check_trace, record_little

from gpuinfer.api import Setup
from gpuinfer.cli import main
from gpuinfer.engine import trace_merge
from gpuinfer.engine.trace_reader import read
from gpuinfer.engine.trace_recorder import trace_parts
from gpuinfer.errors import UsageError
from gpuinfer.runtime.run import run

SELFPLAY = ["selfplay", "--games", "6", "--simulations", "5", "--model", "blobnet-small", "--no-roofline", "--quiet"]


def record(path, workload, backend=Doubler):
    """Run it; the trace, and its report."""
    seen = []
    report = run(workload, backend(Setup(trace=str(path))), AtOnce(), update_s=0.01, on_trace=seen.append)
    trace = read(path)
    assert [merged.requests for merged in seen] == [len(trace.arrivals)]
    assert trace_parts(path) == []
    check_trace(trace)
    return trace, report


def test_a_run_records_each_request_from_its_arrival_to_its_end(tmp_path):
    trace, report = record(tmp_path / "trace.jsonl", Counting(total=20))
    counts = [len(events) for events in (trace.arrivals, trace.cuts, trace.batches, trace.settles)]
    assert counts == [20, report["batches"]["count"], 20, 20]
    assert (trace.header.strategy, trace.header.engines, trace.header.limits.max_rows) == ("atonce", 1, 64)
    assert {one.outcome for one in trace.settles} == {"ok"}
    assert sum(one.rows for one in trace.cuts) == sum(one.rows for one in trace.arrivals)


def test_every_worker_process_is_an_engine_of_its_own(tmp_path):
    trace, _ = record(tmp_path / "trace.jsonl", Spread(workers=2, each=5))
    assert (trace.header.engines, trace.header.incomplete) == (2, 0)
    assert sorted(one.engine for one in trace.arrivals) == [0] * 5 + [1] * 5
    assert len(trace.settles) == 10


def test_a_killed_worker_is_said_to_be_missing_its_end(tmp_path):
    trace, _ = record(tmp_path / "trace.jsonl", Spread(workers=2, each=3, target="playing:ask_and_die"))
    assert (trace.header.engines, trace.header.incomplete) == (2, 2)
    assert 2 <= len(trace.arrivals) <= 6


def test_a_run_that_fails_has_its_trace_and_its_report(tmp_path):
    path = tmp_path / "trace.jsonl"
    with pytest.raises(UsageError) as failed:
        record(path, Counting(total=10, fail_at=3))
    assert failed.value.report["status"] == "failed"
    assert len(read(path).arrivals) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["inprocess", "central"])
def test_the_command_records_where_batches_are_formed(tmp_path, backend):
    words = [*SELFPLAY, "--workers", "2", "--backend", backend, "--trace", "trace.jsonl.gz", "--json", "-"]
    done = forking.run(["gpuinfer", *words], tmp_path, workers=True)
    assert done.returncode == 0, done.stderr
    trace, report = read(tmp_path / "trace.jsonl.gz"), json.loads(done.stdout)
    check_trace(trace)
    assert f"trace.jsonl.gz ({len(trace.arrivals)} requests)" in done.stderr
    assert (trace.header.engines, trace.header.strategy) == ({"inprocess": 2, "central": 1}[backend], "dynamic")
    assert len(trace.cuts) >= report["batches"]["count"] > 0  # the report begins when the workload has prepared
    assert len(trace.settles) == len(trace.arrivals)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.jsonl.gz"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SELFPLAY, "--trace", "."], "this is a folder"),
        ([*SELFPLAY, "--trace", "nowhere/trace.jsonl"], "mkdir -p"),
        ([*SELFPLAY, "--trace", "-"], "in a file"),
        ([*SELFPLAY, "--trace", "/dev/stdout"], "in a file"),
        ([*SELFPLAY, "--trace", "x.json", "--json", "./x.json"], "a file of its own"),
        (["bench", *SELFPLAY, "--trace", "trace.jsonl"], "a trace holds one"),
        (["tune", *SELFPLAY, "--trace", "trace.jsonl"], "a trace holds one"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_page_about_traces_reads_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    record_little(tmp_path / "trace.jsonl")
    trace_merge.merge_trace(tmp_path / "trace.jsonl")
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("dynamic [(0.0, 3, ")
    assert done.stderr == ""
