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


def test_a_file_is_replaced_as_a_whole(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("old")
    Destination(str(target)).write(REPORT)
    assert json.loads(target.read_text()) == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    target, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(target)
    Destination(str(link)).write(REPORT)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == REPORT


def test_a_pipe_stays_one_and_its_reader_gets_the_report(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    Destination(str(pipe)).write(REPORT)
    reader.join(30)
    assert pipe.is_fifo()
    assert json.loads(heard[0]) == REPORT


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_device_is_left_in_place_and_told_of():
    with pytest.raises(WorkError, match="Make room"):
        Destination("/dev/full").write(REPORT)
    assert not os.path.isfile("/dev/full")


INPUT = ["generate", "--model", "tiny", "--input", "in.jsonl"]
SAME = {
    "the input": ([*INPUT, "--json", "in.jsonl"], "--json and --input"),
    "the input, by a symbolic link": ([*INPUT, "--json", "symlink"], "--json and --input"),
    "the input, by a hard link": ([*INPUT, "--json", "hardlink"], "--json and --input"),
    "the input, as a trace": ([*INPUT, "--trace", "hardlink"], "--trace and --input"),
    "an output that is not there yet": ([*INPUT, "--output", "o", "--json", "./o"], "--json and --output"),
    "what lies beside the output": ([*INPUT, "--output", "o", "--json", "o.run.json"], "--json and --output"),
    "report and trace": ([*INPUT, "--json", "r", "--trace", "./r"], "--json and --trace"),
    "report and trace, by a hard link": ([*INPUT, "--json", "one", "--trace", "other"], "--json and --trace"),
    "the settings": ([*INPUT, "--json", "other.toml", "--config", "other.toml"], "--json and --config"),
    "the settings that nobody named": ([*INPUT, "--json", "gpuinfer.toml"], "--json and --config"),
    "the schema of answers": (
        [*INPUT, "--json-schema", "schema.json", "--json", "schema.json"],
        "--json and --json-schema",
    ),
    "a file of the model": (
        ["generate", "--model", "folder", "--input", "in.jsonl", "--json", "folder/config.json"],
        "--json folder/config.json is a file of --model folder",
    ),
    "a file of the model, by a hard link": (
        ["generate", "--model", "folder", "--input", "in.jsonl", "--json", "config-link"],
        "is a file of --model",
    ),
    "a file of an adapter": (
        [*INPUT, "--adapter", "a=folder", "--json", "folder/adapter_config.json"],
        "is a file of --adapter",
    ),
    "an option of the backend": ([*INPUT, "--backend", "vllm", "-B", "log=v.log", "--json", "v.log"], "and -B log"),
    "the weights of self-play": (
        ["selfplay", "--game", "connect-four", "--model", "blobnet-small", "--weights", "w", "--json", "w"],
        "--json and --weights",
    ),
    "the manifest of a loop": (["loop", "--out", "folder", "--json", "folder/manifest.json"], "--json and --out"),
    "the weights of a loop": (["loop", "--out", "new", "--weights", "w", "--json", "w"], "--json and --weights"),
    "the steps of rollouts": (
        ["rollouts", "--env", "arithmetic", "--model", "tiny", "--steps", "s.jsonl", "--json", "s.jsonl"],
        "--json and --steps",
    ),
    "a plot": (
        ["simulate", "--rate", "1", "--alpha", "1us", "--beta", "1ms", "--plot", "p.png", "--json", "p.png"],
        "--json and --plot",
    ),
    "the keys of a server": (
        ["serve", "--model", "tiny", "--api-key-file", "keys", "--ready-file", "keys"],
        "--ready-file and --api-key-file",
    ),
}


@pytest.mark.parametrize(("words", "said"), SAME.values(), ids=SAME)
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


def test_a_report_in_the_folder_of_a_run_is_replaced_by_that_of_the_next_one(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    target = folder / "report.json"
    refuse_shared({"--json": target}, [("--out", folder)])
    Destination(str(target)).write(REPORT)
    refuse_shared({"--json": target}, [("--out", folder)])


def test_the_null_device_may_be_named_for_everything():
    refuse_shared({"--json": "/dev/null", "--trace": None}, [("--output", "/dev/null"), ("--input", "-")])


QUOTED = {
    "an output": [*INPUT, "--output", "aus gäbe/o"],
    "a report": [*INPUT, "--json", "aus gäbe/r.json"],
    "a trace": [*INPUT, "--trace", "aus gäbe/t"],
    "a plot": ["simulate", "--rate", "1", "--alpha", "1us", "--beta", "1ms", "--plot", "aus gäbe/p.png"],
    "keys that others read": ["serve", "--model", "tiny", "--api-key-file", "aus gäbe keys"],
    "records that are not there": ["train", "--records", "aus gäbe", "--out", "new", "--model", "blobnet-small"],
}


@pytest.mark.parametrize("words", QUOTED.values(), ids=QUOTED)
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
