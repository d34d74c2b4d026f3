"""Where the JSON report goes, and what must not be harmed there."""

from __future__ import annotations

import json
import os
import re
import shlex
import threading

import pytest

from gpuinfer.cli.output import Destination, refuse_shared
from gpuinfer.errors import WorkError

REPORT = {"schema": "gpuinfer.report/1"}


def test_a_report_replaces_a_file_and_what_a_link_leads_to_and_goes_down_a_pipe(tmp_path):
    target, link, pipe = tmp_path / "r.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    heard = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    for place in (target, target, link):
        Destination(str(place)).write(REPORT)
        assert json.loads(target.read_text()) == REPORT
        target.write_text("old")
    Destination(str(pipe)).write(REPORT)
    reader.join(30)
    assert (link.is_symlink(), pipe.is_fifo()) == (True, True)
    assert json.loads(heard[0]) == REPORT
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "link.json", "pipe"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_device_is_left_in_place_and_told_of():
    with pytest.raises(WorkError, match="Make room"):
        Destination("/dev/full").write(REPORT)
    assert not os.path.isfile("/dev/full")


INPUT = ["generate", "--model", "tiny", "--input", "in.jsonl"]
SELFPLAY = ["selfplay", "--game", "connect-four", "--model", "blobnet-small"]
SIMULATED = ["simulate", "--rate", "1", "--alpha", "1us", "--beta", "1ms"]
OWN_MODEL = ["generate", "--model", "folder", "--input", "in.jsonl"]
ROLLOUTS = ["rollouts", "--env", "arithmetic", "--model", "tiny"]
SAME = [
    ([*INPUT, "--json", "in.jsonl"], "--json and --input"),
    ([*INPUT, "--json", "symlink"], "--json and --input"),
    ([*INPUT, "--json", "hardlink"], "--json and --input"),
    ([*INPUT, "--trace", "hardlink"], "--trace and --input"),
    ([*INPUT, "--output", "o", "--json", "./o"], "--json and --output"),  # which is not there yet
    ([*INPUT, "--output", "o", "--json", "o.run.json"], "--json and --output"),  # what lies beside it
    ([*INPUT, "--json", "r", "--trace", "./r"], "--json and --trace"),
    ([*INPUT, "--json", "one", "--trace", "other"], "--json and --trace"),
    ([*INPUT, "--json", "other.toml", "--config", "other.toml"], "--json and --config"),
    ([*INPUT, "--json", "gpuinfer.toml"], "--json and --config"),  # that nobody named
    ([*INPUT, "--json-schema", "schema.json", "--json", "schema.json"], "--json and --json-schema"),
    ([*OWN_MODEL, "--json", "folder/config.json"], "--json folder/config.json is a file of --model folder"),
    ([*OWN_MODEL, "--json", "config-link"], "is a file of --model"),
    ([*INPUT, "--adapter", "a=folder", "--json", "folder/adapter_config.json"], "is a file of --adapter"),
    ([*INPUT, "--backend", "vllm", "-B", "log=v.log", "--json", "v.log"], "and -B log"),
    ([*SELFPLAY, "--weights", "w", "--json", "w"], "--json and --weights"),
    (["loop", "--out", "folder", "--json", "folder/manifest.json"], "--json and --out"),
    (["loop", "--out", "new", "--weights", "w", "--json", "w"], "--json and --weights"),
    ([*ROLLOUTS, "--steps", "s.jsonl", "--json", "s.jsonl"], "--json and --steps"),
    ([*SIMULATED, "--plot", "p.png", "--json", "p.png"], "--json and --plot"),
    (["serve", "--model", "tiny", "--api-key-file", "keys", "--ready-file", "keys"], "--ready-file and --api-key-file"),
]


@pytest.mark.parametrize(("words", "said"), SAME)
def test_a_file_that_a_command_names_twice_is_refused_and_stays_as_it_is(gpuinfer, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    files = ("folder/config.json", "folder/adapter_config.json")
    for name in (*files, "in.jsonl", "one", "schema.json", "v.log", "w", "keys"):
        (tmp_path / name).write_text('{"prompt": "ab"}\n')
    for name in ("other.toml", "gpuinfer.toml"):
        (tmp_path / name).write_text("seed = 1\n")
    (tmp_path / "symlink").symlink_to("in.jsonl")
    for name, of in (("hardlink", "in.jsonl"), ("other", "one"), ("config-link", "folder/config.json")):
        (tmp_path / name).hardlink_to(tmp_path / of)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, _, errors = gpuinfer(*words)
    assert (code, said in errors) == (2, True), errors
    assert errors.endswith("a file of its own.\n")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_null_device_and_a_report_in_the_folder_of_a_run_may_be_named(tmp_path):
    for _ in range(2):
        refuse_shared({"--json": tmp_path / "report.json"}, [("--out", tmp_path)])
        Destination(str(tmp_path / "report.json")).write(REPORT)
    refuse_shared({"--json": "/dev/null", "--trace": None}, [("--output", "/dev/null"), ("--input", "-")])


QUOTED = [
    [*INPUT, "--output", "aus gäbe/o"],
    [*INPUT, "--json", "aus gäbe/r.json"],
    [*INPUT, "--trace", "aus gäbe/t"],
    [*SIMULATED, "--plot", "aus gäbe/p.png"],
    ["serve", "--model", "tiny", "--api-key-file", "aus gäbe keys"],
    ["train", "--records", "aus gäbe", "--out", "new", "--model", "blobnet-small"],
]


@pytest.mark.parametrize("words", QUOTED)
def test_a_command_that_an_error_advises_can_be_pasted_whatever_the_name(gpuinfer, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab"}\n')
    (tmp_path / "aus gäbe keys").write_text("key\n")
    (tmp_path / "aus gäbe keys").chmod(0o644)
    code, _, errors = gpuinfer(*words)
    assert code == 2
    advised = re.search(r"(mkdir -p|chmod 600|gpuinfer selfplay --out) (.*?)(\)|`)?\.?$", errors.strip())
    (named,) = shlex.split(advised[2])
    assert os.path.basename(named).startswith("aus gäbe"), errors
