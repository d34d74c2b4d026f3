"""`gpuinfer bench generate` with generators: what is compared, told and refused. The peers are small fakes."""

import importlib.util
import json
import stat
import sys
from pathlib import Path

import jsonschema
import pytest

from gpuinfer.api import Setup
from gpuinfer.generation import Unmasking
from gpuinfer.lab.bench import generators, generators_tables
from gpuinfer.lab.bench.bench_document import bench_document, bench_schema, variants_below
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.generators import (
    METRIC,
    Contest,
    DrawnPrompts,
    FilePrompts,
    Generators,
    needed,
)
from gpuinfer.lab.bench.series import SeriesOutcome, SeriesPlan
from gpuinfer.lab.peers.peer_process import PROGRAMS, PeerFailed, PeerProcess, Ran

PEER = f"""#!{sys.executable}
import json, os, sys
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "quit":
        break
    elif order["do"] == "load":
        print("noise that belongs to the log", file=sys.stderr, flush=True)
        answer = LOADED
    else:
        answer = RAN
    print(json.dumps(answer), flush=True)
"""
READY = '{"is": "ready", "version": "1.2"}'
DONE = '{"is": "done", "seconds": 0.5, "tokens": len(order["prompts"]) * order["new_tokens"]}'
ORDER = {"model": "m"}


@pytest.fixture
def fake(tmp_path):
    """A program that talks as a child does, whatever its arguments; `loaded` and `ran` are what it answers."""

    def make(loaded: str = READY, ran: str = DONE, name: str = "fake") -> str:
        path = tmp_path / name
        path.write_text(PEER.replace("LOADED", loaded).replace("RAN", ran))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


@pytest.fixture
def child(tmp_path, fake):
    opened = []

    def start(**answers: str) -> PeerProcess:
        opened.append(PeerProcess("peer", [fake(**answers)], tmp_path / "log"))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        pytest.param({"ran": '{"is": "error", "message": "out of memory"}'}, "peer: out of memory", id="an error"),
        pytest.param({"ran": '{"is": "done", "seconds": 1, "tokens": 3}'}, "made 3 tokens where 10", id="too little"),
        pytest.param({"ran": '"what?"'}, "said what is no answer", id="no answer"),
        pytest.param(
            {"ran": "sys.exit('I have fallen')"},
            'ended with exit code 1. Its last words.* "I have fallen"',
            id="an end",
        ),
    ],
)
def test_a_child_that_cannot_says_why(child, answers, said):
    one = child(**answers)
    one.load(ORDER)
    with pytest.raises(PeerFailed, match=said):
        one.run([[1], [2]], 5)


def test_a_child_that_is_silent_is_given_up_and_ended(child):
    one = child(ran="__import__('threading').Event().wait()")
    one.load(ORDER)
    with pytest.raises(PeerFailed, match=r"gave no answer within 0\.1 s"):
        one.run([[1]], 5, limit_s=0.1)
    with pytest.raises(PeerFailed, match="gave no answer"):  # what it might say later is no answer to this
        one.run([[1]], 5)


def test_a_package_that_is_missing_is_named(tmp_path):

    absent = generators.PROGRAMS["transformers"].command(sys.executable)
    absent[2] = absent[2].replace("; peer_child.", "; sys.modules['transformers'] = None; peer_child.")
    assert "None" in absent[2]
    one = PeerProcess("transformers", absent, tmp_path / "log")
    try:
        with pytest.raises(PeerFailed, match="transformers is not installed for"):
            one.load({**ORDER, "device": "cpu", "dtype": "float32"}, limit_s=120)
    finally:
        one.close()


# The comparison


def work(**more) -> Contest:
    values = {
        "model": "m",
        "names": ["sequential", "batched", "vllm"],
        "batch_sizes": [1, 4],
        "new_tokens": 10,
        "prompts": DrawnPrompts(100, (0,), seed=1),
        "setup": Setup(),
        "folder": Path("m"),
    }
    return Contest(**{**values, **more})


def outcome_of(rates, given: Contest) -> SeriesOutcome:
    """As if every cell had run at these rates, repeat by repeat."""
    made = SeriesOutcome([generators.cell_variant(cell, given) for cell in given.cells()])
    for cell in given.cells():
        for repeat, rate in enumerate(rates[cell.name]):
            ran = Ran(cell.prompts * given.new_tokens / rate, cell.prompts * given.new_tokens)
            made.runs.append(generators.measured_cell(cell, repeat, [[1, 2]] * cell.prompts, ran, given))
    return made


RATES = {
    "sequential": [100, 101, 99],
    "batched, batch size 1": [100, 101, 99],
    "batched, batch size 4": [300, 310, 305],
    "vllm, batch size 1": [50, 51, 50],
    "vllm, batch size 4": [200, 201, 200],
}


@pytest.fixture
def document(tmp_path):
    given = work()
    done = Generators(given, SeriesPlan(3, None, None), tmp_path)
    done.outcome, done.versions = outcome_of(RATES, given), dict.fromkeys(given.names, "1.2")
    series_plan = SeriesPlan(3, None, None, roofline=False, parity=False)
    built = bench_document(
        "generate", done.outcome, compare_variants(done.outcome), series_plan, "2025-01-01T00:00:00+00:00"
    )
    return generators_tables.generators_document(built, given, done)


def test_the_cells_of_a_batch_size_stand_side_by_side_and_one_at_a_time_is_measured_once():
    assert [cell.name for cell in work().cells()] == [
        "sequential", "batched, batch size 1", "vllm, batch size 1", "batched, batch size 4", "vllm, batch size 4",
    ]  # fmt: skip


def test_a_document_of_generators_fits_the_schema_and_is_told_as_a_grid(document):
    jsonschema.validate(json.loads(json.dumps(document)), bench_schema())
    page = bench_page(document)
    assert page.table.columns == ("tokens/s at batch size", "1", "4")
    cells = {row[0]: row[1:] for row in page.brief.rows}
    assert cells["vllm"] == ["50", "200"]
    assert cells["sequential"] == ["100", "100"]
    assert cells["batched ÷ vllm"] == ["1.98×", "1.52×"]
    assert cells["batched ÷ sequential"] == ["1.00× tie", "3.07×"]
    assert document["verdict"].startswith("At batch size 4 batched makes 3.07× sequential (")
    assert {sample["metric"] for sample in document["samples"]} == {METRIC}


def test_a_document_of_generators_has_a_page_and_one_plot(document):
    page = bench_page(document)
    assert list(page.plots) == ["batch_sizes"]
    assert "Tokens per second by batch size" in page.html()
    assert "| batched ÷ vllm |" in page.markdown()


@pytest.mark.parametrize(
    ("least", "slow"),
    [
        pytest.param(1.5, [], id="batched is that much faster everywhere, and need not be with one prompt alone"),
        pytest.param(1.9, ["batched ÷ vllm at batch size 4 (1.52)"], id="not beside one peer at one batch size"),
    ],
)
def test_what_is_too_slow_is_named_by_peer_and_batch_size(document, least, slow):
    assert variants_below(document, least) == slow


def test_runs_and_the_warm_up_have_given_prompts_of_their_own_where_there_are_enough():
    sizes, repeats = (2, 8), 3
    given = FilePrompts([[number] for number in range(needed(sizes, repeats))])
    taken = [one for repeat in range(repeats + 1) for one in given.of(repeat, max(sizes))]
    assert sorted(taken) == list(given.tokens)


# The command


BENCH = ["bench", "generate", "--model", "tiny", "--repeats", "2", "--new-tokens", "4", "--batch-sizes", "1,2"]


def test_peers_are_compared_and_what_is_missing_is_left_out(gpuinfer, empty_folder, fake):
    words = ["--python", f"transformers={fake()}", "--python", f"vllm={fake(loaded='{}', name='broken')}"]
    code, out, err = gpuinfer(*BENCH, "--compare", "transformers,vllm", *words, "--json", "-", "--report", "out")
    document = json.loads(out)
    jsonschema.validate(document, bench_schema())
    assert code == 0, err
    assert [row["median"] for row in document["comparison"]] == [8, 16]
    assert [one["name"] for one in document["skipped"]] == ["vllm"]
    assert "--python vllm=PATH" in document["skipped"][0]["reason"]
    assert "transformers, batch size 2 · repeat 2 of 2: 16 tokens/s" in err
    assert (Path("out") / "batch_sizes.png").read_bytes().startswith(b"\x89PNG")
    assert "noise" in (Path("out") / "logs" / "transformers.log").read_text()


@pytest.mark.thorough
def test_ours_is_measured_beside_a_peer(gpuinfer, empty_folder, fake):
    words = ["--compare", "sequential,batched,transformers", "--python", f"transformers={fake()}", "--repeats", "1"]
    code, out, err = gpuinfer(*BENCH, *words, "--fail-under", "1e9", "--json", "-")
    assert code == 4, err
    assert "batched ÷ transformers" in err
    found = {row["name"]: row["median"] for row in json.loads(out)["comparison"]}
    assert set(found) == {
        "sequential", "batched, batch size 1", "batched, batch size 2",
        "transformers, batch size 1", "transformers, batch size 2",
    }  # fmt: skip
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--temperature", "1"], "--temperature is no part of a comparison of generators", id="sampling"),
        pytest.param(["--seconds", "3"], "--seconds is no part of a comparison of generators", id="a time"),
        pytest.param(["--batch-sizes", "1,x"], "--batch-sizes 1,x: not whole numbers", id="sizes"),
        pytest.param(["--new-tokens", "100000"], "Take a smaller --new-tokens", id="more than the model's positions"),
        pytest.param(["--prompts", "none.jsonl"], "--prompts none.jsonl cannot be read", id="no prompts"),
        pytest.param(["--python", "vllm"], "Write --python vllm=/path/to/python", id="no path"),
        pytest.param(["--python", "vllm=/nowhere"], "/nowhere is no program", id="no program"),
        pytest.param(["--python", "vlm=/bin/true"], "no peer named 'vlm'. Did you mean 'vllm'?", id="no peer"),
        pytest.param(["--model", "nothing"], "nothing", id="no model"),
    ],
)
def test_bad_usage_is_told_before_anything_is_started(gpuinfer, empty_folder, words, said):
    code, out, err = gpuinfer(*BENCH, "--compare", "batched,vllm", *words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


def test_a_file_of_prompts_is_understood_as_generate_does(gpuinfer, empty_folder, fake):
    Path("p.jsonl").write_text('{"prompt": "one"}\n{"prompt_token_ids": [1, 2]}\n')
    words = ["--compare", "transformers", "--python", f"transformers={fake()}"]
    assert gpuinfer(*BENCH, *words, "--prompts", "p.jsonl")[0] == 0
    Path("p.jsonl").write_text('{"prompt": "one"}\n{"promt": "two"}\n')
    code, _, err = gpuinfer(*BENCH, *words, "--prompts", "p.jsonl")
    assert code == 2
    assert "--prompts p.jsonl, row 2:" in err


def test_backends_are_compared_as_for_any_workload(gpuinfer, empty_folder):
    Path("p.jsonl").write_text('{"prompt": "one"}\n' * 40)
    words = ["--compare", "inprocess", "--prompts", "p.jsonl", "--seconds", "30", "--warmup", "0", "--repeats", "1"]
    code, out, _ = gpuinfer("bench", "generate", "--model", "null", "--new-tokens", "4", *words, "--json", "-")
    document = json.loads(out)
    assert code == 0
    assert document["comparison"][0]["metric"] == METRIC
    assert document["runs"][0]["progress"]["done"] == 40


# The peers themselves


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_makes_the_tokens_that_ours_makes_as_many(tmp_path):
    from gpuinfer.api import ModelSpec
    from gpuinfer.text.checkpoint import open_checkpoint, save_folder

    save_folder(open_checkpoint(ModelSpec("tiny", kind="text")), tmp_path / "model")
    one = PeerProcess("transformers", PROGRAMS["transformers"].command(sys.executable), tmp_path / "log")
    try:
        one.load({"model": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"}, limit_s=240)
        ran = one.run([[1, 2, 3], [4]], 3, limit_s=240)
        assert ran.tokens == 6
        assert ran.seconds > 0
    finally:
        one.close()


def test_our_own_are_told_how_masks_are_filled_in_and_others_are_not():
    given = work(unmasking=Unmasking(decoder="threshold", threshold=0.5))
    assert given.order("batched")["unmasking"]["threshold"] == 0.5
    assert given.order("vllm")["unmasking"] is None
