"""The command's flags, streams and refusals."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shlex
import subprocess
import sys

import pytest
from complaints import complaint
from run_generate import generate, names, prompts, rows_of, started, succeeded

FILES = ("--input", "in.jsonl", "--output", "out.jsonl")


def test_answers_go_to_standard_output_or_a_file_as_flags_say(tmp_path):
    done = succeeded("--input", "-", "--json", "report.json", cwd=tmp_path, given=b'"ab"\n{"prompt":"cd","id":1}\n')
    assert {json.loads(line)["text"][:2] for line in done.stdout.splitlines()} == {"ba", "dc"}
    assert "done in" in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["throughput"]["output_tokens_per_s"] > 0
    prompts(tmp_path, count=200)
    assert len(succeeded(*FILES, "--test", cwd=tmp_path).stdout.splitlines()) == 3
    assert names(tmp_path) == ["in.jsonl", "report.json"]
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    words = "--batch-size 4 --json-schema schema.json --stop a,b --stop c --stop-token-ids 1,2 --json report.json"
    succeeded(*FILES, *words.split(), cwd=tmp_path)
    noted = json.loads((tmp_path / "out.jsonl.run.json").read_text())["settings"]
    assert noted["constraint"]["json_schema"] == {"type": "object"}
    assert (noted["stop"], noted["stop_token_ids"]) == (["a,b", "c"], [1, 2])
    assert json.loads((tmp_path / "report.json").read_text())["batches"]["rows_max"] <= 4


def test_an_answer_comes_before_the_next_prompt_is_written(tmp_path):
    with started("--input", "-", "--quiet", cwd=tmp_path) as process:
        for word in ("first", "second"):
            process.stdin.write(json.dumps({"prompt": word}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"].startswith(word[::-1])
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--output o", "needs prompts"),
        ("--input none.jsonl", "there is no such file"),
        ("--input .", "is a folder"),
        ("--output in.jsonl", "the same file"),
        ("--output old.jsonl", "exists already. Add --resume"),
        ("--output no/o.jsonl", "mkdir -p no"),
        ("--output .", "is a folder"),
        ("--resume", "cannot be read"),
        ("--output /dev/null --resume", "cannot be read"),
        ("--retry-errors", "Add --resume"),
        ("--json -", "both write to standard output"),
        ("--checkpoint in.jsonl", "and not both"),
        ("--meta in.jsonl", "belongs to a nanoGPT checkpoint"),
        ("--trust-remote-code", "never run here. Leave the flag out"),
        ("--top-p 2", "Give 1 or less"),
        ("--frequency-penalty -3", "Give -2 or more"),
        ("--repetition-penalty 101", "Give 100 or less"),
        ("--prompt-logprobs 21", "Give 20 or less"),
        ("--chat-template-kwargs {a", "is not JSON"),
        ("--chat-template-kwargs [1]", "is no JSON object"),
        ("""--chat-template-kwargs '{"a": "\\ud800"}'""", "it has \\ud800, half of a character"),
        ("--regex ''", "--regex is empty"),
        ("--json-schema ''", "--json-schema is empty"),
        ("--grammar ''", "--grammar is empty"),
        ("--min-tokens 500", "more than --max-new-tokens"),
        ("--regex a --choice b", "--regex and --choice"),
        ("--json-schema in.jsonl", "is not JSON"),
        ("--grammar absent", "cannot be read"),
        ("--prompt a\udcff", "--prompt is not UTF-8: it has byte 0xff. Write it in UTF-8."),
        ("--stop a --stop \udcc3", "--stop is not UTF-8: it has byte 0xc3"),
        ("--regex \udcff+", "--regex is not UTF-8: it has byte 0xff"),
        ("--choice a --choice \udcff", "--choice is not UTF-8: it has byte 0xff"),
        ("--model \udcff", "--model is not UTF-8: it has byte 0xff"),
        ("--regex (", "unclosed group"),
        ("--stop-token-ids 1,99999", "names token 99999"),
        ("--json-schema strange", "strang"),
        ("--json-schema never", "Give an object"),
        ("--grammar lost", "nowhere"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_done(gpuinfer, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    prompts(tmp_path, count=2)
    texts = {"old.jsonl": "{}\n", "strange": '{"type": "strang"}', "never": "false", "lost": "start: nowhere"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    before = names(tmp_path)
    given = [] if {"--input", "--prompt", "o"} & {*words.split()} else ["--input", "in.jsonl"]
    code, _, errors = gpuinfer("generate", "--model", "tiny", "--no-roofline", *given, *shlex.split(words))
    assert code == 2, errors
    assert said in errors
    assert errors.endswith(".\n")
    assert errors.count("\n") < 4
    assert names(tmp_path) == before


def test_the_report_and_the_last_line_name_the_same_first_error_and_no_answer_is_a_failure(tmp_path):
    """A row that cannot be read, while another fails at the model."""
    prompts(tmp_path, {"prompt": "broken"}, {"prompt": "ab"}, {"prompt": "a", "temperatur": 1})
    done = succeeded(*FILES, "--json", "r.json", cwd=tmp_path)
    failures = json.loads((tmp_path / "r.json").read_text())["failures"]
    assert failures["count"] == 2
    (last,) = [line for line in done.stderr.splitlines() if "The first says: " in line]
    assert f"The first says: {failures['first']}" in last
    prompts(tmp_path, {"prompt": "broken"})
    done = generate("--input", "in.jsonl", "--output", "none", cwd=tmp_path)
    assert done.returncode == 1
    assert "not one of 1 rows was answered" in complaint(done)
    assert len((tmp_path / "none").read_text().splitlines()) == 1


ROWS = b'"ab"\n{"prompt": "cd"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said", "asked"),
    [
        ("it's a", b"ab, and\n\n cd\n", "is plain text,", ["ab, and", "cd"]),
        ("old.txt", "ab\n\n Soupé\n".encode("cp1252"), "is plain text,", ["ab", "Soupé"]),
        ("one", b"ab", "is plain text,", ["ab"]),
        ("p.jsonl.gz", gzip.compress(ROWS, mtime=0), "compressed with gzip,", ["ab", "cd"]),
        ("p.bz2", bz2.compress(ROWS), "compressed with bzip2,", ["ab", "cd"]),
        ("p.xz", lzma.compress(ROWS), "compressed with xz,", ["ab", "cd"]),
        ("p.jsonl", ROWS.decode().encode("utf-16"), "text in UTF-16,", ["ab", "cd"]),
        ("p.xlsx", b"PK\x03\x04" + bytes(50), "an Excel workbook,", None),
        ("p.bin", bytes(range(256)), "is binary,", None),
        ("p.parquet", b"PAR", "is no Parquet file, for all its name", None),
    ],
    ids=str,
)
def test_a_file_of_another_form_is_named_with_a_command_that_makes_prompts_of_it(tmp_path, name, content, said, asked):
    (tmp_path / name).write_bytes(content)
    done = generate("--input", name, "--output", "out.jsonl", cwd=tmp_path)
    told = complaint(done)
    assert (done.returncode, names(tmp_path)) == (2, [name])
    assert said in told
    if asked is None:
        assert told.endswith("Give a file of those.")
        return
    command, _, rest = told.splitlines()[1].strip().rpartition(" | ")
    assert rest == "gpuinfer generate --input -"
    command = command.replace("python3", sys.executable)
    rows = subprocess.run(command, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    succeeded("--input", "-", "--output", "out.jsonl", "--ordered", cwd=tmp_path, given=rows)
    assert [row["text"].rsplit(" ", 2)[0][::-1] for row in rows_of(tmp_path)] == asked


def test_an_object_over_several_lines_is_said_to_be_one(tmp_path):
    (tmp_path / "in.json").write_text(json.dumps({"prompt": "ab", "id": 1}, indent=2))
    told = complaint(generate("--input", "in.json", cwd=tmp_path))
    assert "objects over several lines" in told
    assert "jq -c . in.json | gpuinfer generate --input -" in told


@pytest.mark.parametrize("content", [b"plain\ntext\n", gzip.compress(ROWS, mtime=0)], ids=["text", "gzip"])
def test_standard_input_of_another_form_ends_the_run_and_leaves_nothing(tmp_path, content):
    done = generate("--input", "-", "--output", "o.jsonl", cwd=tmp_path, given=content)
    assert (done.returncode, names(tmp_path)) == (2, [])
    assert "FILE | gpuinfer generate --input -" in complaint(done)


@pytest.mark.parametrize(
    "text", ['nope\n"ab"\n', '{"prompt": "ab"\n', '["ab"]', ' {"prompt": "ab"}\nid,text\n', '"' + "a" * 70_000 + '"']
)
def test_json_with_faults_is_no_other_form(tmp_path, text):
    (tmp_path / "in").write_text(text)
    done = generate("--input", "in", cwd=tmp_path)
    assert "prompts are read from" not in done.stderr
    assert done.stdout


def test_where_no_row_was_right_no_output_is_left_and_a_file_that_was_there_stays(tmp_path):
    prompts(tmp_path, {"text": "a"}, {"input": "b"}, {"conversations": []})
    for words in ([], ["--ordered"]):
        done = generate(*FILES, *words, cwd=tmp_path)
        assert (done.returncode, names(tmp_path)) == (1, ["in.jsonl"])
        assert "not one of 3 rows was answered, and no output is left." in complaint(done)
        assert "has `text` where `prompt` is read. Rename it to `prompt`." in complaint(done)
    succeeded("--prompt", "a", "--output", "out.jsonl", cwd=tmp_path)
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert generate(*FILES, "--ordered", "--resume", cwd=tmp_path).returncode == 1
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept)


@pytest.mark.parametrize("text", ["", "\n", "[]"])
def test_no_rows_are_no_failure_and_are_said(tmp_path, text):
    (tmp_path / "in.jsonl").write_text(text)
    assert "no prompts in in.jsonl: nothing was asked" in succeeded(*FILES, "--quiet", cwd=tmp_path).stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_reader_that_leaves_ends_the_run_with_one_line(tmp_path):
    prompts(tmp_path, count=20_000)
    with started("--input", "in.jsonl", "--quiet", cwd=tmp_path) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(60)
    assert process.returncode == 1
    why = b"standard output was closed before all was answered. To go on later, give --output a file."
    assert errors == b"gpuinfer: " + why + b"\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_others_is_refused(tmp_path):
    prompts(tmp_path, count=2)
    (tmp_path / "in.jsonl").chmod(0)
    assert "permission denied" in complaint(generate("--input", "in.jsonl", cwd=tmp_path))


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_the_help_promises_no_code_of_checkpoints(gpuinfer, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "240")
    code, out, _ = gpuinfer(command, "--help")
    [line] = [line for line in out.splitlines() if "--trust-remote-code" in line]
    assert code == 0
    assert "may run in vLLM, with --backend vllm; none else does" in line
