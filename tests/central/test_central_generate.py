"""`gpuinfer generate --backend central` as people run it."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from forking import Forked
from servers import until

pytestmark = pytest.mark.usefixtures("children_forked")

SCHEMA = json.loads(files("gpuinfer").joinpath("report.schema.json").read_text())

ROWS = [
    *({"id": number, "prompt": f"prompt {number}", "max_tokens": 3 + number % 5} for number in range(40)),
    {"id": "greedy", "prompt": "ab", "temperature": 0, "ignore_eos": True, "max_tokens": 12},
    {"id": "tokens", "prompt_token_ids": [65, 66, 67], "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1},
    {"id": "many", "prompt": "ab", "n": 6, "max_tokens": 4},
    {"id": "seeded", "prompt": "ab", "seed": 7, "top_p": 0.9, "top_k": 20, "max_tokens": 6},
    {"id": "choice", "prompt": "ab", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8},
    {"id": "schema", "prompt": "ab", "guided_json": {"enum": [1, None, "a"]}, "max_tokens": 8},
    {"id": "biased", "prompt": "ab", "logit_bias": {"65": 50}, "stop": ["AAA"], "max_tokens": 8},
    {"id": "bad", "prompt": "ab", "guided_regex": "(", "max_tokens": 8},
    {"id": "strange", "prompt_token_ids": [100_000], "max_tokens": 8},
]


def left_of(session):
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, theirs = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended in the meantime
            continue
        if int(theirs) == session and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def generated(*words, cwd):
    """Its report; fails when it leaves a process behind."""
    fixed = ["--model", "tiny", "-B", "slots=8", "-B", "threads=1", "--device", "cpu", "--input", "prompts.jsonl"]
    fixed += ["--quiet", "--json", "-", "--ordered", "--token-ids", "--deterministic"]
    command = ["gpuinfer", "generate", *fixed, *words]
    with Forked(command, cwd, stdin=subprocess.DEVNULL, text=True, workers=True) as process:
        out, err = process.communicate(timeout=120)
        until(lambda: not left_of(process.pid), "the end of all its processes")
    assert process.returncode == 0, err
    assert "Traceback" not in err, err
    return json.loads(out)


def answers_in(path):
    """The answers, without what depends on who came when: how many tokens of a prompt had been computed before."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    for answer in answers:
        answer.get("usage", {}).pop("cached_tokens", None)
    return answers


@pytest.mark.thorough
def test_the_answers_are_those_of_inprocess_and_the_batches_those_of_the_server(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    names = ("central", "inprocess")
    reports = {one: generated("--backend", one, "--output", f"{one}.jsonl", cwd=tmp_path) for one in names}
    answers = {name: answers_in(tmp_path / f"{name}.jsonl") for name in names}
    assert answers["central"] == answers["inprocess"]
    assert len(answers["central"]) == len(ROWS)
    for report in reports.values():
        jsonschema.validate(report, SCHEMA)
        assert 0 < report["first_token_s"]["p50"] <= report["latency_s"]["max"]
        assert 0 < report["between_tokens_s"]["p50"] <= report["latency_s"]["max"]
    central = reports["central"]
    assert (central["status"], central["backend"]) == ("done", "central")
    assert 1 < central["batches"]["rows_max"] <= central["batches"]["slots"] == 8
    assert central["time_s"]["forward"] > 0
    assert central["queue_wait_s"]["p50"] > 0
    assert central["errors"]["failed"] == reports["inprocess"]["errors"]["failed"] == 2
    for part in ("throughput", "model", "device"):
        assert set(central[part]) == set(reports["inprocess"][part])
