"""The command's flags, streams and refusals."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys

import pytest
from complaints import complaint
from run_generate import generate, prompts, rows_of, started


def test_it_reads_standard_input_and_writes_standard_output(tmp_path):
    done = generate("--input", "-", "--json", "report.json", cwd=tmp_path, given=b'"ab"\n{"prompt":"cd","id":1}\n')
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["text"][:2] for line in done.stdout.splitlines()} == {"ba", "dc"}
    assert "done in" in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["throughput"]["output_tokens_per_s"] > 0


def test_an_answer_comes_before_the_next_prompt_is_written(tmp_path):
    with started("--input", "-", "--quiet", cwd=tmp_path) as process:
        for word in ("first", "second"):
            process.stdin.write(json.dumps({"prompt": word}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"].startswith(word[::-1])
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_three_rows_are_tried_and_the_output_is_left_alone(tmp_path):
    prompts(tmp_path / "in.jsonl", 1000)
    done = generate("--input", "in.jsonl", "--output", "out.jsonl", "--test", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_flags_reach_the_model(tmp_path):
    prompts(tmp_path / "in.jsonl", 200)
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    words = [
        "--batch-size",
        4,
        "--json-schema",
        "schema.json",
        "--stop",
        "a,b",
        "--stop",
        "c",
        "--stop-token-ids",
        "1,2",
    ]
    done = generate("--input", "in.jsonl", "--output", "o.jsonl", *words, "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    noted = json.loads((tmp_path / "o.jsonl.run.json").read_text())["settings"]
    assert noted["constraint"]["json_schema"] == {"type": "object"}
    assert (noted["stop"], noted["stop_token_ids"]) == (["a,b", "c"], [1, 2])
    assert json.loads((tmp_path / "r.json").read_text())["batches"]["rows_max"] <= 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "o"], "needs prompts"),
        (["--input", "none.jsonl"], "there is no such file"),
        (["--input", "."], "is a folder"),
        (["--input", "in.jsonl", "--output", "in.jsonl"], "the same file"),
        (["--input", "in.jsonl", "--output", "old.jsonl"], "exists already. Add --resume"),
        (["--input", "in.jsonl", "--output", "no/o.jsonl"], "mkdir -p no"),
        (["--input", "in.jsonl", "--output", "."], "is a folder"),
        (["--input", "in.jsonl", "--resume"], "cannot be read"),
        (["--input", "in.jsonl", "--output", "/dev/null", "--resume"], "cannot be read"),
        (["--input", "in.jsonl", "--retry-errors"], "Add --resume"),
        (["--input", "in.jsonl", "--json", "-"], "both write to standard output"),
        (["--input", "in.jsonl", "--checkpoint", "in.jsonl"], "and not both"),
        (["--input", "in.jsonl", "--meta", "in.jsonl"], "belongs to a nanoGPT checkpoint"),
        (["--input", "in.jsonl", "--trust-remote-code"], "never run here. Leave the flag out"),
        (["--input", "in.jsonl", "--top-p", "2"], "Give 1 or less"),
        (["--input", "in.jsonl", "--presence-penalty", "9"], "Give 2 or less"),
        (["--input", "in.jsonl", "--frequency-penalty", "-3"], "Give -2 or more"),
        (["--input", "in.jsonl", "--repetition-penalty", "101"], "Give 100 or less"),
        (["--input", "in.jsonl", "--logprobs", "50"], "Give 20 or less"),
        (["--input", "in.jsonl", "--prompt-logprobs", "21"], "Give 20 or less"),
        (["--input", "in.jsonl", "--temperature", "1001"], "Give 1000 or less"),
        (["--input", "in.jsonl", "--chat-template-kwargs", "{a"], "is not JSON"),
        (["--input", "in.jsonl", "--chat-template-kwargs", "[1]"], "is no JSON object"),
        (["--input", "in.jsonl", "--regex", ""], "--regex is empty"),
        (["--input", "in.jsonl", "--json-schema", ""], "--json-schema is empty"),
        (["--input", "in.jsonl", "--grammar", ""], "--grammar is empty"),
        (["--input", "in.jsonl", "--min-tokens", "500"], "more than --max-new-tokens"),
        (["--input", "in.jsonl", "--regex", "a", "--choice", "b"], "--regex and --choice"),
        (["--input", "in.jsonl", "--json-schema", "in.jsonl"], "is not JSON"),
        (["--input", "in.jsonl", "--grammar", "absent"], "cannot be read"),
        (["--prompt", "a\udcff"], "--prompt is not UTF-8: it has byte 0xff. Write it in UTF-8."),
        (["--input", "in.jsonl", "--stop", "\udcff"], "--stop is not UTF-8: it has byte 0xff"),
        (["--input", "in.jsonl", "--stop", "a", "--stop", "\udcc3"], "--stop is not UTF-8: it has byte 0xc3"),
        (["--input", "in.jsonl", "--regex", "\udcff+"], "--regex is not UTF-8: it has byte 0xff"),
        (["--input", "in.jsonl", "--choice", "a", "--choice", "\udcff"], "--choice is not UTF-8: it has byte 0xff"),
        (["--input", "in.jsonl", "--model", "\udcff"], "--model is not UTF-8: it has byte 0xff"),
        (["--input", "in.jsonl", "--chat-template-kwargs", '{"a": "\\ud800"}'], "it has \\ud800, half of a character"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_done(gpuinfer, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    prompts(tmp_path / "in.jsonl", 2)
    (tmp_path / "old.jsonl").write_text("{}\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, errors = gpuinfer("generate", "--model", "tiny", "--no-roofline", *words)
    assert code == 2, errors
    assert said in errors
    assert errors.endswith(".\n")
    assert errors.count("\n") < 4
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_report_and_the_last_line_name_the_same_first_error(tmp_path):
    """Of a row that cannot be read, while another fails at the model."""
    rows = [{"prompt": "broken"}, {"prompt": "ab"}, {"prompt": "a", "temperatur": 1}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = generate("--input", "in.jsonl", "--output", "o.jsonl", "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    failures = json.loads((tmp_path / "r.json").read_text())["failures"]
    assert failures["count"] == 2
    (last,) = [line for line in done.stderr.splitlines() if "The first says: " in line]
    assert f"The first says: {failures['first']}" in last


def test_a_job_without_one_answer_has_failed(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "broken"}\n')
    done = generate("--input", "in.jsonl", "--output", "o.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "not one of 1 rows was answered" in complaint(done)
    assert len(rows_of(tmp_path / "o.jsonl")) == 1


ROWS = b'"ab"\n{"prompt": "cd"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said", "asked"),
    [
        pytest.param("p.csv", b"id,text\n1,ab\n2,cd\n", "a table with the columns id, text,", ["ab", "cd"], id="CSV"),
        pytest.param(
            "p.csv",
            '\ufeff"Prompt";"n"\n"a\nb";1\n"\u00e9";2\n'.encode(),
            "columns Prompt, n,",
            ["a\nb", "\u00e9"],
            id="CSV as Excel writes it",
        ),
        pytest.param(
            "a b.csv", "name\nSoup\u00e9\n".encode("cp1252"), "columns name,", ["Soup\u00e9"], id="CSV in Latin-1"
        ),
        pytest.param("table", b"question\tn\nwho?\t1\n", "columns question, n,", ["who?"], id="tabs"),
        pytest.param("it's.txt", b"ab, and\n\n cd\n", "is plain text,", ["ab, and", "cd"], id="text"),
        pytest.param("one", b"ab", "is plain text,", ["ab"], id="a word"),
        pytest.param("p.jsonl.gz", gzip.compress(ROWS), "compressed with gzip,", ["ab", "cd"], id="gzip"),
        pytest.param("p.bz2", bz2.compress(ROWS), "compressed with bzip2,", ["ab", "cd"], id="bzip2"),
        pytest.param("p.xz", lzma.compress(ROWS), "compressed with xz,", ["ab", "cd"], id="xz"),
        pytest.param("p.jsonl", ROWS.decode().encode("utf-16"), "text in UTF-16,", ["ab", "cd"], id="UTF-16"),
        pytest.param("p.parquet", None, "is a Parquet file,", ["ab", "cd"], id="Parquet"),
        pytest.param("p.xlsx", b"PK\x03\x04" + bytes(50), "an Excel workbook,", None, id="a workbook"),
        pytest.param("p.bin", bytes(range(256)), "is binary,", None, id="bytes"),
    ],
)
def test_a_file_of_another_form_is_named_and_the_command_that_is_shown_makes_prompts_of_it(
    tmp_path, name, content, said, asked
):
    if content is None:
        table = pytest.importorskip("pyarrow").table({"n": [1, 2], "prompt": ["ab", "cd"]})
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = generate("--input", name, "--output", "o.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert said in complaint(done)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    if asked is not None:
        command, _, rest = complaint(done).splitlines()[1].strip().rpartition(" | ")
        assert rest == "gpuinfer generate --input -"
        command = command.replace("python3", sys.executable)
        rows = subprocess.run(command, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, check=True, timeout=60).stdout
        done = generate("--input", "-", "--output", "o.jsonl", "--ordered", cwd=tmp_path, given=rows)
        assert done.returncode == 0, done.stderr
        assert [row["text"].rsplit(" ", 2)[0][::-1] for row in rows_of(tmp_path / "o.jsonl")] == asked
    else:
        assert complaint(done).endswith("Give a file of those.")


def test_an_object_over_several_lines_is_said_to_be_one(tmp_path):
    (tmp_path / "in.json").write_text(json.dumps({"prompt": "ab", "id": 1}, indent=2))
    assert "objects over several lines" in complaint(generate("--input", "in.json", cwd=tmp_path))
    assert "jq -c . in.json | gpuinfer generate --input -" in complaint(generate("--input", "in.json", cwd=tmp_path))


@pytest.mark.parametrize("content", [b"id,text\n1,ab\n2,cd\n", gzip.compress(ROWS)], ids=["csv", "gzip"])
def test_standard_input_of_another_form_ends_the_run_and_leaves_nothing(tmp_path, content):
    done = generate("--input", "-", "--output", "o.jsonl", cwd=tmp_path, given=content)
    assert done.returncode == 2
    assert "one JSON object a line" in complaint(done)
    assert "FILE | gpuinfer generate --input -" in complaint(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ['nope\n"ab"\n', '{"prompt": "ab"\n', '["ab"]', ' {"prompt": "ab"}\nid,text\n', '"' + "a" * 70_000 + '"']
)
def test_json_with_faults_is_no_other_form(tmp_path, text):
    (tmp_path / "in.csv").write_text(text)
    done = generate("--input", "in.csv", cwd=tmp_path)
    assert "prompts are read as one JSON object a line" not in done.stderr
    assert done.stdout


def test_where_no_row_was_right_no_output_is_left_and_a_file_that_was_there_stays(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"input": "b"}\n{"conversations": []}\n')
    for words in ([], ["--ordered"]):
        done = generate("--input", "in.jsonl", "--output", "o.jsonl", *words, cwd=tmp_path)
        assert done.returncode == 1
        assert "not one of 3 rows was answered, and no output is left." in complaint(done)
        assert "has `text` where `prompt` is read. Rename it to `prompt`." in complaint(done)
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert generate("--prompt", "a", "--output", "o.jsonl", cwd=tmp_path).returncode == 0
    kept = (tmp_path / "o.jsonl").read_bytes()
    assert generate("--input", "in.jsonl", "--output", "o.jsonl", "--ordered", "--resume", cwd=tmp_path).returncode == 1
    assert (tmp_path / "o.jsonl").read_bytes().startswith(kept)


@pytest.mark.parametrize("text", ["", "\n", "[]"])
def test_no_rows_are_no_failure_and_are_said(tmp_path, text):
    (tmp_path / "in.jsonl").write_text(text)
    done = generate("--input", "in.jsonl", "--output", "o.jsonl", "--quiet", cwd=tmp_path)
    assert done.returncode == 0
    assert "no prompts in in.jsonl: nothing was asked" in done.stderr
    assert (tmp_path / "o.jsonl").read_bytes() == b""


def test_a_reader_that_leaves_ends_the_run_with_one_line(tmp_path):
    prompts(tmp_path / "in.jsonl", 20_000)
    with started("--input", "in.jsonl", "--quiet", cwd=tmp_path) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(60)
    assert process.returncode == 1
    assert errors == (
        b"gpuinfer: standard output was closed before all was answered. To go on later, give --output a file.\n"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_others_is_refused(tmp_path):
    prompts(tmp_path / "in.jsonl", 2).chmod(0)
    assert "permission denied" in complaint(generate("--input", "in.jsonl", cwd=tmp_path))


@pytest.mark.parametrize(
    ("flag", "text", "why"),
    [
        ("--stop-token-ids", None, "names token 99999"),
        ("--regex", None, "unclosed group"),
        ("--json-schema", '{"type": "strang"}', "strang"),
        ("--json-schema", "false", "Give an object"),
        ("--grammar", "start: nowhere", "nowhere"),
    ],
)
def test_a_form_that_no_answer_can_have_is_refused_before_anything_is_asked(tmp_path, flag, text, why):
    prompts(tmp_path / "in.jsonl", 2)
    if text is not None:
        (tmp_path / "form").write_text(text)
    value = {"--regex": "(", "--stop-token-ids": "1,99999"}.get(flag, "form")
    done = generate("--input", "in.jsonl", "--output", "out.jsonl", flag, value, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert flag in complaint(done)
    assert why in complaint(done)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_the_help_promises_no_code_of_checkpoints(gpuinfer, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "240")
    code, out, _ = gpuinfer(command, "--help")
    [line] = [line for line in out.splitlines() if "--trust-remote-code" in line]
    assert code == 0
    assert "is never run here" in line
