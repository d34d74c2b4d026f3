"""Answers as Parquet and as a folder with a file a row: those of JSON Lines, however a run ends; and refusals."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from complaints import complaint
from counts import counts
from pyarrow import parquet
from run_generate import generate, names, prompts, rows_of, started, succeeded, until

ROWS = [
    {"id": 1, "prompt": "ab", "metadata": {"k": [1, None]}, "logprobs": 1},
    {"id": "two", "prompt": "cd", "n": 2},
    {"id": "b", "prompt": "bad"},
    {"id": "c", "prompt": 5},
    {"custom_id": "o", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ef", "max_tokens": 2}},
    {"custom_id": "p", "method": "GET", "url": "/v1/completions", "body": {"prompt": "ef"}},
    {"id": "last", "prompt": "broken"},
]
IN = ("--input", "in.jsonl", "--quiet")
MENDED = {"MENDED": "1"}


def table_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(folder / "out.parquet").to_pylist()
    return rows


def files_in(folder: Path) -> dict[str, dict[str, Any]]:
    return {one.name: json.loads(one.read_text()) for one in sorted((folder / "out").iterdir())}


def test_parquet_and_a_folder_hold_what_lines_hold(tmp_path):
    prompts(tmp_path, *ROWS)
    for name in ("out.jsonl", "out.parquet", "out/"):
        succeeded(*IN, "--output", name, "--token-ids", *(["--ordered"] if name != "out/" else []), cwd=tmp_path)
    notes = ["out.jsonl.run.json", "out.parquet.run.json", "out.run.json"]
    assert names(tmp_path) == sorted(["in.jsonl", "out", "out.jsonl", "out.parquet", *notes])
    lines, rows = rows_of(tmp_path), table_of(tmp_path)
    assert [row["id"] for row in rows] == ["1", "two", "b", "c", "o", "p", "last"]
    for line, row in zip(lines, rows, strict=True):
        assert row["digest"] == (line.get("digest") or line["id"].removeprefix("batch_req_"))
        assert (row["text"], row["token_ids"]) == (line.get("text"), line.get("token_ids"))
        assert (row["error"] is None) == (line.get("error") is None)
        assert row["response"] is None or json.loads(row["response"]) == line["response"]
    assert json.loads(rows[0]["metadata"]) == {"k": [1, None]}
    assert json.loads(rows[0]["logprobs"]) == lines[0]["logprobs"]
    assert (rows[0]["prompt_tokens"], rows[0]["completion_tokens"]) == (2, 4)
    assert [one["text"] for one in rows[1]["samples"]] == [one["text"] for one in lines[1]["samples"]]
    assert (rows[3]["error"]["type"], rows[3]["error"]["line"], rows[5]["error"]["type"]) == ("bad_row", 4, "bad_row")
    found = files_in(tmp_path)
    bad = [f"error-{rows[number]['digest']}.json" for number in (3, 5)]
    assert found == dict(
        zip(["1.json", "two.json", "b.json", bad[0], "o.json", bad[1], "last.json"], lines, strict=True)
    )


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_what_is_done_is_not_asked_again_and_errors_are_on_request(tmp_path, output):
    prompts(tmp_path, *ROWS[:2], ROWS[-1])
    words = [*IN, "--output", output, *(["--ordered"] if output == "out.parquet" else [])]

    def found() -> list[tuple[str, bool]]:
        rows = table_of(tmp_path) if output == "out.parquet" else files_in(tmp_path).values()
        return [(str(row["id"]), bool(row.get("error"))) for row in rows]

    succeeded(*words, cwd=tmp_path)
    assert sorted(found()) == [("1", False), ("last", True), ("two", False)]
    assert "Add --resume" in complaint(generate(*words, cwd=tmp_path))
    prompts(tmp_path, *ROWS[:3], ROWS[-1])
    report = ("--json", "r.json")
    for flags, before, failed in (((), 3, True), (("--retry-errors",), 2, False)):
        succeeded(*words, *report, "--resume", *flags, cwd=tmp_path, environment=MENDED if flags else None)
        assert json.loads((tmp_path / "r.json").read_text())["progress"]["before"] == before
        assert sorted(found()) == [("1", False), ("b", True), ("last", failed), ("two", False)]
    if output == "out.parquet":
        assert [id for id, _ in found()] == ["1", "two", "b", "last"]
    told = complaint(generate(*words, "--resume", "--max-new-tokens", "3", cwd=tmp_path))
    assert "was made with other settings (max_tokens: 128 there, 3 here)" in told
    assert sorted(found()) == [("1", False), ("b", True), ("last", False), ("two", False)]
    assert not list(tmp_path.glob("*.journal"))


COUNT = 1500


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
@pytest.mark.parametrize("times", counts(2, 20))
def test_a_killed_run_is_finished_by_the_next_without_loss_or_duplicates(tmp_path, output, times):
    prompts(tmp_path, count=COUNT)
    words, dice = [*IN, "--output", output, "-B", "delay=0.02"], random.Random(times)

    def done() -> int:
        if output == "out/":
            return len(list((tmp_path / "out").glob("[!.]*.json")))
        journal = tmp_path / "out.parquet.journal"
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    resume: list[str] = []
    for attempt in range(times):
        wanted = done() + dice.randrange(1, COUNT // times)
        with started(*words, *resume, cwd=tmp_path) as process:
            until(lambda wanted=wanted: done() >= wanted, process)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
        assert attempt or done() < COUNT  # else nothing was killed
        resume = ["--resume"]
    kept = done()
    succeeded(*words, "--resume", "--json", "r.json", cwd=tmp_path)
    assert json.loads((tmp_path / "r.json").read_text())["progress"]["before"] == kept
    rows = table_of(tmp_path) if output == "out.parquet" else list(files_in(tmp_path).values())
    assert sorted(row["id"] for row in rows) == sorted(f"r{number}" for number in range(COUNT))
    assert all(row["text"].startswith(f"prompt {row['id'][1:]}"[::-1]) for row in rows)
    assert not list(tmp_path.glob("*.journal")) + list(tmp_path.glob("out/.*"))


def test_a_journal_that_became_the_file_before_it_could_be_removed_changes_nothing(tmp_path):
    """What a kill between the two leaves: both, of which the journal counts."""
    prompts(tmp_path, count=20)
    succeeded(*IN, "--output", "out.parquet", cwd=tmp_path)
    rows = table_of(tmp_path)
    succeeded(*IN, "--output", "out.jsonl", cwd=tmp_path)
    (tmp_path / "out.jsonl").rename(tmp_path / "out.parquet.journal")
    succeeded(*IN, "--output", "out.parquet", "--resume", cwd=tmp_path)
    assert sorted(row["id"] for row in table_of(tmp_path)) == sorted(row["id"] for row in rows)
    assert not (tmp_path / "out.parquet.journal").exists()


@pytest.mark.parametrize(
    ("id", "why"),
    [
        ("../up", "it has '/'"),
        ("a\\b", "it has '\\\\'"),
        ("..", "begins or ends with a dot"),
        (".hidden", "begins or ends with a dot"),
        ("", "it is empty"),
        ("nul.txt", "Windows keeps that name"),
        ("x" * 201, "more than 200 bytes"),
        ("line\nbreak", "it has '\\n'"),
        ("Straße", "in case alone"),
        ("READY", "in case alone"),
    ],
)
def test_an_id_that_is_no_safe_name_fails_alone_and_leaves_the_folder_for_nothing(tmp_path, id, why):
    (folder := tmp_path / "within").mkdir()
    prompts(folder, {"id": "ready", "prompt": "ab"}, {"id": "STRASSE", "prompt": "x"}, {"id": id, "prompt": "cd"})
    for words in ([], ["--resume"]):
        succeeded(*IN, "--output", "out/", *words, cwd=folder)
        found = files_in(folder)
        (error,) = [name for name in found if name.startswith("error-")]
        assert sorted(found) == sorted(["STRASSE.json", error, "ready.json"])
        assert why in found[error]["error"]["message"]
        assert found[error]["error"]["message"].endswith("give --output a file.")
    assert names(tmp_path) == ["within"]


@pytest.mark.parametrize(
    ("output", "inside", "said"),
    [
        ("out/", {"notes.txt": "x"}, "holds other files than answers (notes.txt). Give a new or an empty folder."),
        ("out/", {"theirs.json": '{"a": 1}'}, "holds other files than answers (theirs.json)"),
        ("out", {}, "this is a folder. Write out/ for a file a row in it, or give a file"),
        ("in.jsonl/", {}, "there is a file of this name"),
        ("no/out/", {}, "mkdir -p no"),
        ("no/out.parquet", {}, "mkdir -p no"),
        ("theirs.parquet", {}, "does not hold answers that --resume can go on with"),
        ("out.CSV", {}, "as JSON Lines (out.jsonl), as Parquet (out.parquet), or each in a file of its own (out/)"),
        ("out/ --ordered", {}, "have no order. Leave it out."),
    ],
)
def test_an_output_that_cannot_be_is_refused_and_left_as_it_is(gpuinfer, tmp_path, monkeypatch, output, inside, said):
    monkeypatch.chdir(tmp_path)
    prompts(tmp_path, count=2)
    (tmp_path / "out").mkdir()
    for name, text in inside.items():
        (tmp_path / "out" / name).write_text(text)
    parquet.write_table(pa.table({"a": [1]}), "theirs.parquet")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = ["generate", "--model", "tiny", "--no-roofline", "--input", "in.jsonl", "--resume"]
    code, _, errors = gpuinfer(*given, "--output", *output.split())
    assert code == 2, errors
    assert said in " ".join(errors.split())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_where_no_row_was_right_nothing_is_left(tmp_path, output):
    prompts(tmp_path, {"text": "a"}, {"id": "../x", "text": "b"})
    assert generate(*IN, "--output", output, cwd=tmp_path).returncode == 1
    assert names(tmp_path) == ["in.jsonl"]


def test_without_pyarrow_an_output_of_parquet_is_refused(gpuinfer, tmp_path, monkeypatch):
    prompts(tmp_path, count=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, errors = gpuinfer("generate", "--model", "tiny", "--input", "in.jsonl", "--output", "o.parquet")
    assert (code, "pip install 'gpuinfer[parquet]'" in errors) == (2, True), errors
