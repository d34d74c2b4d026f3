"""`gpuinfer bench generate` with generators: what is compared and told. The peers are small fakes."""

import importlib.util
import json
import stat
import sys
from pathlib import Path

import jsonschema
import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Unmasking
from gpuinfer.lab.bench import generators, generators_tables
from gpuinfer.lab.bench.bench_document import bench_document, bench_schema, variants_below
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.generators import METRIC, Contest, DrawnPrompts, FilePrompts, Generators, needed
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
def opened(tmp_path):
    """Starts a peer of this package by this command; it is ended with the test."""
    found = []

    def start(package: str, command: list[str]) -> PeerProcess:
        found.append(PeerProcess(package, command, tmp_path / "log"))
        return found[-1]

    yield start
    for one in found:
        one.close()


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        ('{"is": "error", "message": "out of memory"}', "peer: out of memory"),
        ('{"is": "done", "seconds": 1, "tokens": 3}', "made 3 tokens where 10"),
        ('"what?"', "said what is no answer"),
        ("sys.exit('I have fallen')", 'ended with exit code 1. Its last words.* "I have fallen"'),
    ],
)
def test_a_child_that_cannot_says_why(opened, fake, ran, said):
    one = opened("peer", [fake(ran=ran)])
    one.load(ORDER)
    with pytest.raises(PeerFailed, match=said):
        one.run([[1], [2]], 5)


def test_a_child_that_is_silent_is_given_up_and_ended(opened, fake):
    one = opened("peer", [fake(ran="__import__('threading').Event().wait()")])
    one.load(ORDER)
    with pytest.raises(PeerFailed, match=r"gave no answer within 0\.1 s"):
        one.run([[1]], 5, limit_s=0.1)
    with pytest.raises(PeerFailed, match="gave no answer"):  # what it might say later is no answer to this
        one.run([[1]], 5)


def test_a_package_that_is_missing_is_named(opened):
    absent = PROGRAMS["transformers"].command(sys.executable)
    absent[2] = absent[2].replace("; peer_child.", "; sys.modules['transformers'] = None; peer_child.")
    assert "None" in absent[2]
    with pytest.raises(PeerFailed, match="transformers is not installed for"):
        opened("transformers", absent).load({**ORDER, "device": "cpu", "dtype": "float32"}, limit_s=120)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_makes_the_tokens_that_ours_makes_as_many(opened, tmp_path):
    from gpuinfer.text.checkpoint import open_checkpoint, save_folder

    save_folder(open_checkpoint(ModelSpec("tiny", kind="text")), tmp_path / "model")
    one = opened("transformers", PROGRAMS["transformers"].command(sys.executable))
    one.load({"model": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"}, limit_s=240)
    ran = one.run([[1, 2, 3], [4]], 3, limit_s=240)
    assert (ran.tokens, ran.seconds > 0) == (6, True)


# The comparison

RATES = {
    "sequential": [100, 101, 99],
    "batched, batch size 1": [100, 101, 99],
    "vllm, batch size 1": [50, 51, 50],
    "batched, batch size 4": [300, 310, 305],
    "vllm, batch size 4": [200, 201, 200],
}


def work(**more) -> Contest:
    prompts, names = DrawnPrompts(100, (0,), seed=1), ["sequential", "batched", "vllm"]
    return Contest("m", names, [1, 4], 10, prompts, Setup(), Path("m"), **more)


@pytest.fixture
def document(tmp_path):
    """As if every cell had run at these rates, repeat by repeat."""
    given, plan = work(), SeriesPlan(3, None, None, roofline=False, parity=False)
    assert [cell.name for cell in given.cells()] == list(RATES)
    made = SeriesOutcome([generators.cell_variant(cell, given) for cell in given.cells()])
    for cell in given.cells():
        for repeat, rate in enumerate(RATES[cell.name]):
            ran = Ran(cell.prompts(None) * given.new_tokens / rate, cell.prompts(None) * given.new_tokens)
            made.runs.append(generators.measured_cell(cell, repeat, [[1, 2]] * cell.prompts(None), ran, given))
    done = Generators(given, plan, tmp_path)
    done.outcome, done.versions = made, dict.fromkeys(given.names, "1.2")
    built = bench_document("generate", made, compare_variants(made), plan, "2025-01-01T00:00:00+00:00")
    return generators_tables.generators_document(built, given, done)


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
    assert list(page.plots) == ["batch_sizes"]
    assert "Tokens per second by batch size" in page.html()
    assert "| batched ÷ vllm |" in page.markdown()
    assert variants_below(document, 1.5) == []  # one prompt alone need not be faster
    assert variants_below(document, 1.9) == ["batched ÷ vllm at batch size 4 (1.52)"]


def test_each_run_has_prompts_of_its_own_where_there_are_enough_and_only_ours_are_told_of_masks():
    sizes, repeats = (2, 8), 3
    given = FilePrompts([[number] for number in range(needed(max(sizes), repeats))])
    taken = [one for repeat in range(repeats + 1) for one in given.of(repeat, max(sizes))]
    assert sorted(taken) == list(given.tokens)
    drawn = DrawnPrompts(9, (0,), seed=1)
    assert drawn.of(0, 4) == drawn.of(0, 4) != drawn.of(1, 4)
    assert {token for one in drawn.of(2, 50) for token in one} == set(range(1, 9))
    masked = work(unmasking=Unmasking(decoder="threshold", threshold=0.5))
    assert masked.order("batched")["unmasking"]["threshold"] == 0.5
    assert masked.order("vllm")["unmasking"] is None


# The command

BENCH = ["bench", "generate", "--model", "tiny", "--repeats", "2", "--new-tokens", "4", "--batch-sizes", "1,2"]


def test_peers_are_compared_and_what_is_missing_is_left_out(gpuinfer, empty_folder, fake):
    Path("p.jsonl").write_text('{"prompt": "one"}\n{"prompt_token_ids": [1, 2]}\n')
    words = ["--python", f"transformers={fake()}", "--python", f"vllm={fake(loaded='{}', name='broken')}"]
    more = ["--prompts", "p.jsonl", "--json", "-", "--report", "out"]
    code, out, err = gpuinfer(*BENCH, "--compare", "transformers,vllm", *words, *more)
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
    assert (code, "batched ÷ transformers" in err) == (4, True), err
    found = {row["name"]: row["median"] for row in json.loads(out)["comparison"]}
    cells = {f"{name}, batch size {size}" for name in ("batched", "transformers") for size in (1, 2)}
    assert set(found) == {"sequential", *cells}
    assert min(found.values()) > 0


def test_backends_are_compared_as_for_any_workload(gpuinfer, empty_folder):
    Path("p.jsonl").write_text('{"prompt": "one"}\n' * 40)
    words = ["--compare", "inprocess", "--prompts", "p.jsonl", "--seconds", "30", "--warmup", "0", "--repeats", "1"]
    code, out, _ = gpuinfer("bench", "generate", "--model", "null", "--new-tokens", "4", *words, "--json", "-")
    document = json.loads(out)
    assert (code, document["comparison"][0]["metric"]) == (0, METRIC)
    assert document["runs"][0]["progress"]["done"] == 40
