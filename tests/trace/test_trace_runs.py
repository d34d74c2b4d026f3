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
from gpuinfer.engine import trace_merge
from gpuinfer.engine.trace_reader import read
from gpuinfer.engine.trace_recorder import trace_parts
from gpuinfer.errors import UsageError
from gpuinfer.runtime.run import run

SELFPLAY = ["selfplay", "--games", "6", "--simulations", "5", "--model", "blobnet-small", "--no-roofline", "--quiet"]


@pytest.mark.parametrize(
    ("workload", "engines", "incomplete", "arrivals"),
    [
        pytest.param(Counting(total=20), 1, 0, [20], id="this process"),
        pytest.param(Spread(workers=2, each=5), 2, 0, [5, 5], id="an engine for each worker"),
        pytest.param(Spread(workers=2, each=3, target="playing:ask_and_die"), 2, 2, None, id="killed workers"),
        pytest.param(Counting(total=10, fail_at=3), 1, 0, [3], id="a run that fails"),
    ],
)
def test_a_run_records_each_request_from_its_arrival_to_its_end(tmp_path, workload, engines, incomplete, arrivals):
    path, seen = tmp_path / "trace.jsonl", []
    try:
        report = run(workload, Doubler(Setup(trace=str(path))), AtOnce(), update_s=0.01, on_trace=seen.append)
    except UsageError as error:
        report = error.report
        assert report["status"] == "failed"
    trace = read(path)
    check_trace(trace)
    assert [merged.requests for merged in seen] == [len(trace.arrivals)]
    assert trace_parts(path) == []
    header = trace.header
    assert (header.strategy, header.limits.max_rows) == ("atonce", 64)
    assert (header.engines, header.incomplete) == (engines, incomplete)
    if arrivals is not None:
        assert [sum(one.engine == number for one in trace.arrivals) for number in range(engines)] == arrivals
        assert len(trace.settles) == len(trace.arrivals)
        assert engines > 1 or len(trace.cuts) == report["batches"]["count"]


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
        ("selfplay --trace .", "this is a folder"),
        ("selfplay --trace nowhere/trace.jsonl", "mkdir -p"),
        ("selfplay --trace -", "in a file"),
        ("selfplay --trace /dev/stdout", "in a file"),
        ("selfplay --trace x.json --json ./x.json", "a file of its own"),
        ("bench selfplay --trace trace.jsonl", "a trace holds one"),
        ("tune selfplay --trace trace.jsonl", "a trace holds one"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_before_anything_starts(gpuinfer, empty_folder, words, said):
    code, _, err = gpuinfer(*words.split(), *SELFPLAY[1:])
    assert (code, said in err, list(empty_folder.iterdir())) == (2, True, [])


def test_the_page_about_traces_reads_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    record_little(tmp_path / "trace.jsonl")
    trace_merge.merge_trace(tmp_path / "trace.jsonl")
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("dynamic [(0.0, 3, ")
    assert done.stderr == ""
