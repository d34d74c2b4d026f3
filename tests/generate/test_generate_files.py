"""Prompts as they come: CSV, Parquet, a JSON object of id → row, lines of text, several files; and faults in them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from complaints import complaint
from pyarrow import parquet
from run_generate import generate, infer_of, rows_of, run_all, succeeded

from gpuinfer.api import Setup
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.generation import Prompt
from gpuinfer.library.text_prompts import PromptReader
from gpuinfer.serving.openai.requests import PromptDefaults
from gpuinfer.workloads.generate.workload import Generate

CHAT = [{"role": "user", "content": "hi"}]


def as_table(**columns: Any) -> Callable[[Path], Any]:
    return lambda path: parquet.write_table(pa.table(columns), path, row_group_size=2)


def written(path: Path, content: Any) -> Path:
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def prompts_of_python(path: Any, column: str | None = None) -> list[Any]:
    """What `LLM.generate` asks of a file: id, prompt, metadata, line; or the error of the row."""
    return list(PromptReader(path, PromptDefaults(), column))


def run_file(path: str, output: Path, **options: Any) -> list[dict[str, Any]]:
    made = Generate(Setup(), model="tiny", input=path, output=str(output / "out.jsonl"), ordered=True, **options)
    last = asyncio.run(run_all(made, infer_of()))
    assert last.done == last.total
    return rows_of(output)


def shown(prompt: Prompt) -> Any:
    return prompt.text if prompt.text is not None else list(prompt.tokens or ()) or list(prompt.messages or ())


NAMED_CHAT = [{"role": "user", "content": "b", "name": "x"}]
CHAT_CELL = json.dumps(CHAT).replace('"', '""')
OF_DICTIONARY = pa.array(["a", "b", "a"]).dictionary_encode()
LISTS = {"k": [[1], None, []]}
FORMS: dict[str, tuple[str, Any, str | None, list[Any], list[Any]]] = {
    "CSV with ids": ("p.csv", "id,prompt\n7,ab\n8,cd\n", None, [("7", "ab"), ("8", "cd")], [None, None]),
    "quotes, a BOM, semicolons, CR LF, a blank line, a line break in a cell": (
        "p.csv",
        '\ufeffText;topic\r\n"a\nb ""c""";x\r\n\r\ncd;\r\n',
        None,
        ['a\nb "c"', "cd"],
        [{"topic": "x"}, {"topic": ""}],
    ),
    "TSV": ("p.tsv", "prompt\tnote\na, b\t1\n", None, ["a, b"], [{"note": "1"}]),
    "a table by its column": ("table", "question,prompt\nwho?,ab\n", "question", ["who?"], [{"prompt": "ab"}]),
    "one column of what looks like JSON": ("p.csv", 'prompt\n"{""a"": 1}"\n"x"', None, ['{"a": 1}', "x"], [None, None]),
    "chats in CSV": ("p.csv", f'messages,max_tokens\n"{CHAT_CELL}",\n', None, [CHAT], [None]),
    "an object of id → row": (
        "p.json",
        '{"a": "ab", "b": {"prompt": "cd", "metadata": {"k": 1}}}',
        None,
        [("a", "ab"), ("b", "cd")],
        [None, {"k": 1}],
    ),
    "an object over many lines": (
        "p.json",
        json.dumps({"7": "ab", "8": CHAT, "9": [1, 2]}, indent=1),
        None,
        [("7", "ab"), ("8", CHAT), ("9", [1, 2])],
        [None] * 3,
    ),
    "JSONL of another field": (
        "p.jsonl",
        '{"question": "ab", "level": 3}\n{"question": "cd"}\n',
        "question",
        ["ab", "cd"],
        [{"level": 3}, None],
    ),
    "lines of text": ("p.txt", "ab\n\n  cd \n", None, ["ab", "cd"], [None, None]),
    "Parquet": (
        "p.parquet",
        as_table(prompt=["ab", "cd", "ef"], id=[1, 2, 3], **LISTS),
        None,
        [(1, "ab"), (2, "cd"), (3, "ef")],
        [{"k": [1]}, {"k": None}, {"k": []}],
    ),
    "chats in Parquet": (
        "p.parquet",
        as_table(messages=[CHAT, NAMED_CHAT], image=[b"1", b"2"]),
        None,
        [CHAT, NAMED_CHAT],
        [None, None],
    ),
    "words in Parquet": ("p.parquet", as_table(moves=[["ab", "cd"], ["e"]]), "moves", ["ab cd", "e"], [None, None]),
    "an object of lists of words": (
        "p.json",
        '{"m1": ["ab", "cd"], "m2": ["e"]}',
        None,
        [("m1", "ab cd"), ("m2", "e")],
        [None, None],
    ),
    "a field that holds lists of words": (
        "p.json",
        '{"m1": {"moves": ["ab", "cd"], "won": true}, "m2": {"moves": []}}',
        "moves",
        [("m1", "ab cd"), ("m2", [])],
        [{"won": True}, None],
    ),
    "tokens in Parquet": ("p.parquet", as_table(t=[[1, 2], [3]], n=[1, 2]), "t", [[1, 2], [3]], [None, None]),
    "a column of few words": ("p.parquet", as_table(text=OF_DICTIONARY), None, ["a", "b", "a"], [None] * 3),
}


@pytest.mark.parametrize(("name", "content", "column", "asked", "metadata"), FORMS.values(), ids=FORMS)
def test_each_form_gives_its_rows_to_the_command_and_to_python_alike(tmp_path, name, content, column, asked, metadata):
    path = written(tmp_path / name, content)
    found = prompts_of_python(path, column)
    assert [row.error for row in found] == [None] * len(found)
    told = [(row.id, shown(row.prompt)) if isinstance(asked[0], tuple) else shown(row.prompt) for row in found]
    assert told == asked
    assert [row.metadata for row in found] == metadata
    answers = run_file(str(path), tmp_path, prompt_column=column)
    assert [row["id"] for row in answers] == [row.id for row in found]
    assert [row.get("metadata") for row in answers] == metadata


def test_fields_of_a_table_are_those_of_a_row_and_the_same_row_has_the_same_answer_in_each_form(tmp_path):
    rows = [{"id": f"r{n}", "prompt": f"p{n}", "max_tokens": 2, "temperature": 0.5, "stop": ["x"]} for n in range(5)]
    cells = "".join(f'r{n},p{n},2,0.5,"[""x""]"\n' for n in range(5))
    files = {
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "a.csv": "id,prompt,max_tokens,temperature,stop\n" + cells,
        "a.parquet": lambda path: parquet.write_table(pa.Table.from_pylist(rows), path),
        "a.json": json.dumps({row["id"]: {key: row[key] for key in row if key != "id"} for row in rows}),
    }
    found = []
    for name, content in files.items():
        (folder := tmp_path / name.partition(".")[2]).mkdir()
        found.append(run_file(str(written(folder / name, content)), folder))
    assert len(found[0][0]["text"].split()) == 3
    assert all(one == found[0] for one in found)


def test_a_column_of_an_ordinary_name_that_sets_a_field_is_told_once(tmp_path, caplog):
    path = written(tmp_path / "a.csv", "id,prompt,n,temperature,topic\na,ab,1,0.5,water\nb,cd,1,0.5,fire\n")
    for _ in range(2):
        assert [row.metadata for row in prompts_of_python(path)] == [{"topic": "water"}, {"topic": "fire"}]
    (told,) = [record.getMessage() for record in caplog.records if "sets that field" in record.getMessage()]
    assert told.startswith(f"prompts {path}: the column n sets that field of each row. Rename it (to my_n)")


def test_files_of_a_pattern_are_read_in_the_order_of_their_names_and_an_error_names_its_own(tmp_path):
    written(tmp_path / "p1.csv", "id,prompt,n\na,ab,1\n")
    written(tmp_path / "p2.csv", "id,prompt,n\nb,cd,many\n")
    written(tmp_path / "p3.jsonl", '{"id": "c", "prompt": "ef"}\n')
    written(tmp_path / "p4.parquet", as_table(prompt=["gh", None], id=["d", "a"]))
    found = run_file(str(tmp_path / "p*"), tmp_path)
    assert [row["id"] for row in found] == ["a", "b", "c", "d", "a"]
    assert ["error" in row for row in found] == [False, True, False, False, True]
    error, last = found[1]["error"], found[4]["error"]
    assert (error["row"], error["line"], error["file"]) == (2, 2, str(tmp_path / "p2.csv"))
    assert "$.n" in error["message"]
    assert (last["row"], last["line"], last["file"]) == (5, 2, str(tmp_path / "p4.parquet"))
    assert [row.id for row in prompts_of_python(tmp_path / "p*")] == ["a", "b", "c", "d", "a"]
    assert [row.id for row in prompts_of_python([tmp_path / "p3.jsonl", tmp_path / "p1.csv"])] == ["c", "a"]


@pytest.mark.parametrize(
    ("content", "why", "line"),
    [
        ("prompt,n\nab,1\na,b,c\n", "has 3 cells, and the table 2 columns", 3),
        ('prompt,n\n"a"b,1\nab,2\n', "write each quote twice", 2),
        ("prompt,n\n\n\nab,one\nab,2\n", "$.n", 4),
        ("id,prompt\n1,ab\n1,cd\n", "the id '1' has come before", 3),
        (b"prompt,n\n" + b"a,1\n" * 30_000 + b"caf\xe9,1\n", "the row is not UTF-8", 30_002),
    ],
)
def test_a_bad_row_of_a_table_is_an_error_of_its_line_and_the_others_are_answered(tmp_path, content, why, line):
    found = run_file(str(written(tmp_path / "in.csv", content)), tmp_path)
    (error,) = [row["error"] for row in found if "error" in row]
    assert why in error["message"]
    assert (error["type"], error["line"]) == ("bad_row", line)


def cut(path: Path) -> None:
    as_table(prompt=["ab"] * 100)(path)
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("name", "content", "column", "said"),
    [
        ("p.csv", "question,answer\na,b\n", None, "It has question, answer. Call that of the prompts prompt, or name"),
        ("p.csv", "question,answer\na,b\n", "questions", "Did you mean 'question'? It has question, answer."),
        ("p.csv", "text,text\na,b\n", None, "two columns 'text'. Give each a name of its own."),
        ("p.csv", "text,n\nSoupé,1\n".encode("cp1252"), None, "iconv -f CP1252 -t UTF-8"),
        ("p.parquet", as_table(question=["a"], n=[1]), None, "It has question, n. Call that of the prompts prompt"),
        ("p.parquet", as_table(prompt=[1, 2]), None, "the column 'prompt' holds int64, and a prompt is text"),
        ("p.parquet", cut, None, "is no whole Parquet file"),
        ("none*.csv", None, None, "no file has a name of this pattern. Give one that is there."),
        ("p.json", '{\n "prompt": "a"\n}', None, "JSON with objects over several lines"),
    ],
)
def test_a_table_without_prompts_is_refused_before_anything_is_done_with_what_it_has(
    gpuinfer, tmp_path, name, content, column, said
):
    if content is not None:
        written(tmp_path / name, content)
    words = [] if column is None else ["--prompt-column", column]
    code, _, errors = gpuinfer("generate", "--model", "tiny", "--input", str(tmp_path / name), *words)
    assert code == 2, errors
    assert said in " ".join(errors.split())
    assert "Traceback" not in errors
    with pytest.raises(UsageError) as caught:
        prompts_of_python(tmp_path / name, column)
    assert "--" not in str(caught.value).replace("--input -", "").partition("iconv")[0]


def test_what_hides_the_rest_of_a_file_ends_the_run_and_keeps_what_was_answered(tmp_path):
    (tmp_path / "in.csv").write_text('prompt,n\nab,1\n"cd,1\nef,1\n')
    done = generate("--input", "in.csv", "--output", "out.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "a quote in the row that begins on line 3 is not closed" in complaint(done)
    (tmp_path / "in.csv").write_text('prompt,n\nab,1\n"cd",1\nef,1\n')
    succeeded("--input", "in.csv", "--output", "out.jsonl", "--resume", cwd=tmp_path)
    assert sorted(row["text"][:2] for row in rows_of(tmp_path)) == ["ba", "dc", "fe"]


def test_a_table_comes_through_a_pipe_row_by_row_and_parquet_does_not(tmp_path):
    done = succeeded("--input", "-", "--prompt-column", "q", cwd=tmp_path, given=b"q\nab\n")
    assert json.loads(done.stdout)["text"].startswith("ba")
    as_table(prompt=["ab"])(tmp_path / "p.parquet")
    done = generate("--input", "-", cwd=tmp_path, given=(tmp_path / "p.parquet").read_bytes())
    assert "a Parquet file in a pipe" in complaint(done)


def test_without_pyarrow_the_error_says_what_to_install(gpuinfer, tmp_path, monkeypatch):
    as_table(prompt=["ab"])(tmp_path / "p.parquet")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, errors = gpuinfer("generate", "--model", "tiny", "--input", str(tmp_path / "p.parquet"))
    assert (code, "pip install 'gpuinfer[parquet]'" in errors) == (2, True), errors


def test_a_large_row_group_is_streamed(tmp_path):
    """A block of rows at a time is decoded, not the 32 MB of the group."""
    path, rows = tmp_path / "p.parquet", 8000
    parquet.write_table(pa.table({"prompt": [f"{number} " + "x" * 4000 for number in range(rows)]}), path)
    before = pa.total_allocated_bytes()
    most = count = 0
    for count, row in enumerate(PromptReader(path, PromptDefaults()), 1):
        most = max(most, pa.total_allocated_bytes() - before) if count % 500 == 1 else most
        assert row.error is None
    assert count == rows
    assert most < 12 << 20


def test_python_names_a_wrong_column_and_prompts_that_are_no_file(tmp_path):
    for given, column in (("a text", "q"), (["a"], "q"), (tmp_path / "p.csv", 7)):
        with pytest.raises(GpuinferError, match="prompt_column="):
            prompts_of_python(given, column)
