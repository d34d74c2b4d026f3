"""Fast generation from nanoGPT's checkpoints: words as tokens, thousands of matches in a folder, samples in parts."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import nanogpt_training
import pytest
from forking import Forked, own_environment
from nanogpt_training import END, OPENING, WORDS, Gpt, saved_matches
from serving.replica_servers import serving

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.lab.bench.ablation import Facts, OptimizationPart, ablation_document, optimization_parts
from gpuinfer.lab.bench.bench_document import bench_schema
from gpuinfer.lab.bench.generators import DrawnPrompts, GeneratorCell
from gpuinfer.lab.bench.series import SeriesOutcome
from gpuinfer.lab.peers import peer_child
from gpuinfer.models.model_options import torch_compile_mode
from gpuinfer.models.open_model import open_model
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.generator.setup import PARTS, SHARED_PREFIXES, open_generator
from gpuinfer.text.language import open_language

SECONDS = 240


@pytest.fixture(scope="session")
def nanogpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Gpt]:
    """A folder as that of nanoGPT: `out/ckpt.pt` and `data/chess/meta.pkl`; and its model."""
    folder = tmp_path_factory.mktemp("nanogpt")
    return folder, saved_matches(folder / "out", folder / "data" / "chess")


def generate(folder: Path, *words: object, into: str = "-") -> list[dict[str, Any]]:
    """The answers of a run that succeeds, by `--output`."""
    with Forked(
        ["gpuinfer", "generate", "--no-roofline", "--quiet", "--output", into, *words], folder, own_environment()
    ) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err.decode()
    return [json.loads(line) for line in out.splitlines()]


def until(condition: Callable[[], object], process: Forked) -> None:
    """Wait for something that a running process does."""
    while not condition():
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"it ended with {process.wait(0.005)} before")


def bench(folder: Path, *words: object) -> dict[str, Any]:
    """The document of `bench generate`, which succeeds and fits the schema."""
    command = ["gpuinfer", "bench", "generate", *words, "--json", "found.json", "--quiet"]
    with Forked(command, folder, own_environment()) as process:
        said = process.communicate(timeout=SECONDS)[1].decode()
    assert process.returncode == 0, said
    document: dict[str, Any] = json.loads((folder / "found.json").read_text())
    jsonschema.validate(document, bench_schema())
    return document


GREEDY = ("--temperature", 0, "--max-new-tokens", 9, "--ignore-eos")


def test_words_are_tokens_of_a_nanogpt_checkpoint_and_its_meta_is_found_where_nanogpt_has_it(nanogpt, tmp_path):
    folder, model = nanogpt
    prompt = f"{END} e4 e5"
    (folder / "prompt.txt").write_text(f"{END} e4 e5\n")
    ways = ("--prompt", prompt, "--prompt", "FILE:prompt.txt", "--prompt", "\n", "--prompt", "")
    rows = generate(folder, "--checkpoint", "out/ckpt.pt", *ways, *GREEDY, "--token-ids")
    for row, words in zip(rows, ([END, "e4", "e5"], [END, "e4", "e5", "\n"], ["\n"], [END]), strict=True):
        expected = model.likeliest([WORDS.index(word) for word in words], 9)
        assert row["token_ids"] == expected
        assert row["text"] == " ".join(WORDS[token] for token in expected if WORDS[token] != END)
    assert rows[0]["text"].split(" ")[:4] == OPENING[2:6]


def test_a_meta_file_says_whether_its_tokens_are_split_by_spaces_or_the_longest_match(nanogpt, tmp_path):
    """Tokens that hold their spaces, and a `separator` in the file, are read as they are written."""
    _, model = nanogpt
    spaced = [f" {word}" if word in OPENING else word for word in WORDS]
    texts = {
        "spaced": (spaced, {}, " e4 e5", ""),
        "joined": (WORDS, {"separator": "", "made_by": {"prepare.py": 1.0}}, "e4e5", ""),
        "commas": (WORDS, {"separator": ","}, "e4,e5", ","),
    }
    for name, (tokens, more, prompt, between) in texts.items():
        path = nanogpt_training.save_as_nanogpt(model, tokens, tmp_path / name, **more)
        checkpoint = open_checkpoint(ModelSpec(str(path), kind="text"))
        language = open_language(checkpoint.language, checkpoint.shape)
        (asked,) = language.encode([Prompt(text=prompt)])
        assert [tokens[token] for token in asked] == [tokens[WORDS.index(word)] for word in ("e4", "e5")]
        answer = model.likeliest(asked.tolist(), 9)
        assert language.decode(answer) == between.join(tokens[token] for token in answer if tokens[token] != END)
        assert language.encode([Prompt(text=language.decode(answer))])[0].tolist() == [
            token for token in answer if tokens[token] != END
        ]


def test_a_word_that_is_not_in_the_vocabulary_is_named_with_near_ones(nanogpt):
    folder, _ = nanogpt
    flags = ("--checkpoint", "out/ckpt.pt", "--prompt", "e4 e5 Nf4 Nc6", "--prompt", "e4e5 Nf3")
    with Forked(["gpuinfer", "generate", "--no-roofline", *flags], folder, own_environment()) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "lacks 'Nf4'. Did you mean" in " ".join(err.decode().split())
    unknown, together = (json.loads(line)["error"]["message"] for line in out.splitlines())
    assert "'Nf3'" in unknown.partition("Did you mean")[2]
    assert "lacks 'e4e5'." in together
    assert "It is several tokens: write ' ' between them" in together


def test_on_a_terminal_a_space_stands_between_the_words_of_a_prompt_and_its_answer(nanogpt):
    folder, _ = nanogpt
    screen, theirs = pty.openpty()
    command = ["gpuinfer", "generate", "--checkpoint", "out/ckpt.pt", "--prompt", "e4 e5", *GREEDY]
    with Forked(command, folder, own_environment(), stdout=theirs) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while more := os.read(screen, 1 << 16):
                said += more
        process.wait(SECONDS)
    os.close(screen)
    assert "e4 e5 Nf3 Nc6 Bb5" in re.sub(r"\x1b\[[\d;]*[mK]", "", said.decode())


MATCHES = 120


def test_an_object_of_matches_becomes_a_folder_of_files_and_a_killed_run_is_resumed(nanogpt, tmp_path):
    """Moves as a list, as a text, or in a row; what was whole stays as it is, and what was torn is generated again."""
    folder, _ = nanogpt
    forms: list[Any] = [["e4", "e5"], "d4 d5", {"prompt": "e4 e5 Nf3"}, []]
    matches = {f"match-{number}": forms[number % 4] for number in range(MATCHES)}
    (tmp_path / "matches.json").write_text(json.dumps(matches, indent=1))
    flags = ("--no-roofline", "--quiet", "--checkpoint", folder / "out/ckpt.pt", "--input", "matches.json")
    flags = (*flags, "--batch-size", 4, "--max-new-tokens", 40, "--ignore-eos", "--seed", 3)

    def begun(output: str, *more: str) -> Forked:
        return Forked(["gpuinfer", "generate", *flags, "--output", output, *more], tmp_path, own_environment())

    with begun("whole/") as process:
        assert process.wait(SECONDS) == 0
    with begun("killed/") as process:
        out = tmp_path / "killed"
        until(lambda: out.is_dir() and len(list(out.glob("[!.]*.json"))) >= MATCHES // 6, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)
    kept = {one.name: one.stat().st_mtime_ns for one in out.glob("[!.]*.json")}
    assert MATCHES // 6 <= len(kept) < MATCHES
    torn = sorted(kept)[0]
    content = (out / torn).read_bytes()
    (out / torn).write_bytes(content[: len(content) // 2])
    with begun("killed/", "--resume", "--json", "report.json") as process:
        assert process.wait(SECONDS) == 0
    assert json.loads((tmp_path / "report.json").read_text())["progress"]["before"] == len(kept) - 1
    files = {name: (out / name).read_bytes() for name in os.listdir(out)}
    assert files.keys() == {f"match-{number}.json" for number in range(MATCHES)}
    assert files == {name: (tmp_path / "whole" / name).read_bytes() for name in files}
    assert {name for name, written in kept.items() if (out / name).stat().st_mtime_ns != written} == {torn}
    assert json.loads(files["match-1.json"])["text"] != json.loads(files["match-5.json"])["text"]


def test_predict_answers_more_samples_than_slots_in_parts_as_generate_answers_them(nanogpt, tmp_path):
    folder, _ = nanogpt
    row = {"prompt": "e4 e5", "n": 10, "seed": 5, "max_tokens": 12}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    model = ("--checkpoint", folder / "out/ckpt.pt")
    (answer,) = generate(tmp_path, *model, "--input", "rows.jsonl", "--token-ids")
    with serving(*model, "-B", "slots=4", folder=tmp_path) as server:
        asked = {"prompt": "e4 e5", "num_samples": 10, "seed": 5, "max_new_tokens": 12}
        found = server.ask("/predict", asked)
        assert found.status == 200, found.body
        report = server.ask("/stats").json
        refused = server.ask("/v1/completions", {"prompt": "e4 e5", "n": 10, "max_tokens": 2})
    assert found.json["samples"] == [{"text": one["text"], "tokens": one["token_ids"]} for one in answer["samples"]]
    assert report["batches"]["rows_max"] <= 4
    assert refused.status == 400


@pytest.mark.parametrize(
    ("options", "deterministic", "said"),
    [
        pytest.param({"compile": "reduce-overhead"}, False, "a CPU has none. Use -B compile=default", id="no graphs"),
        pytest.param({"compile": "max-autotune"}, True, "chooses kernels by their time", id="no fixed bits"),
    ],
)
@pytest.mark.parametrize("model", [ModelSpec("blobnet-small", "random", 16), ModelSpec("tiny", kind="text")])
def test_a_mode_of_torch_compile_that_cannot_be_had_is_refused_with_its_cure(model, options, deterministic, said):
    setup = Setup(deterministic=deterministic, model=model)
    opened = open_generator if model.kind == "text" else open_model
    with pytest.raises(UsageError, match=said):
        opened(model, setup, InProcess.Options(**options))


@pytest.mark.parametrize(
    ("wanted", "device", "graphs", "mode"),
    [
        (False, "cuda", True, None),
        (True, "cpu", True, "default"),
        ("default", "cuda", False, "default"),
        ("reduce-overhead", "cuda", True, "default"),  # the graphs are ours
        ("max-autotune", "cuda", True, "max-autotune-no-cudagraphs"),
        ("max-autotune", "cpu", False, "max-autotune"),
    ],
)
def test_a_mode_of_torch_compile_reaches_it_without_graphs_of_its_own(wanted, device, graphs, mode):
    assert torch_compile_mode(wanted, device, graphs=graphs, deterministic=False) == mode
    if wanted == "reduce-overhead":
        with pytest.raises(UsageError, match="Leave one of them out"):
            torch_compile_mode(wanted, device, graphs=False, deterministic=False)


@pytest.mark.thorough  # torch's compiler takes ten seconds and more
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_a_mode_of_torch_compile_changes_no_answer_and_stands_in_the_report(nanogpt, tmp_path, mode):
    folder, _ = nanogpt
    flags = ("--checkpoint", folder / "out/ckpt.pt", "--prompt", "e4 e5", *GREEDY)
    (plain,) = generate(tmp_path, *flags)
    (compiled,) = generate(tmp_path, *flags, "-B", f"compile={mode}", "--json", "report.json")
    assert compiled["text"] == plain["text"]
    assert json.loads((tmp_path / "report.json").read_text())["environment"]["compile"] == mode


def test_num_sequences_are_the_prompts_of_a_run_in_all():
    for name, size in (("batched", 4), ("vllm", 4), ("sequential", 1)):
        cell = GeneratorCell(name, size)
        assert cell.prompts(10) == 10
        assert cell.prompts(None) == 4


@pytest.mark.thorough  # a child process that loads torch
def test_bench_generate_answers_num_sequences_with_a_batch_of_them_at_once(tmp_path):
    flags = ("--model", "tiny", "--compare", "batched", "--batch-sizes", 2, "--num-sequences", 5, "--new-tokens", 3)
    document = bench(tmp_path, *flags, "--repeats", 1)
    (run,) = document["runs"]
    assert (run["progress"]["done"], document["grid"]["num_sequences"]) == (5, 5)
    assert run["throughput"]["output_tokens_per_s"] * run["wall_s"] == pytest.approx(15)


FACTS = Facts(device="cpu", cores=2, kernels=True, dtype="float32", options={}, batch_size=8, alike=48)


@pytest.mark.parametrize(
    ("facts", "absent"),
    [
        pytest.param({}, {"graphs", "dtype"}, id="a CPU in float32"),
        pytest.param({"dtype": "bfloat16"}, {"graphs"}, id="a narrow format"),
        pytest.param({"options": {"weights": "int8"}}, {"graphs"}, id="rounded weights"),
        pytest.param({"cores": 1}, {"graphs", "dtype", "threads"}, id="one core"),
        pytest.param({"device": "cuda"}, {"dtype", "threads"}, id="CUDA"),
        pytest.param({"device": "cuda", "options": {"graphs": False}}, {"dtype", "threads", "graphs"}, id="eager"),
        pytest.param({"alike": 8, "batch_size": 1}, {"graphs", "dtype", "prefix cache", "batch"}, id="a lone row"),
        pytest.param({"kernels": False}, {"graphs", "dtype", "compile"}, id="a model that torch computes"),
    ],
)
def test_each_part_of_fast_generation_is_measured_or_has_a_reason(facts, absent):
    parts = optimization_parts(replace(FACTS, **facts))
    names = ["KV cache", "prefix cache", "batch", "compile", "graphs", "threads", "dtype", "sampling"]
    assert [part.name for part in parts] == names
    assert {part.name for part in parts if part.absent} == absent


def test_without_a_part_the_answers_are_the_same(nanogpt):
    """What the table compares is the same work: only its speed differs."""
    folder, _ = nanogpt
    spec = ModelSpec("matches", weights=str(folder / "out/ckpt.pt"), arguments={"slots": 3, "context": 64}, kind="text")
    setup = Setup(model=spec)
    sampling = Sampling(max_tokens=10, temperature=0.8, top_k=200, ignore_eos=True)
    words = [WORDS.index(word) for word in [END, *OPENING] * 3]
    prompts = [Prompt(tokens=(*words[:33], number), sampling=sampling, key=str(number)) for number in range(3)]
    found, cached = {}, {}
    for part in ((), *((one,) for one in PARTS)):
        generator = open_generator(spec, setup, InProcess.Options(), without=part)

        def answer(prompts: list[Prompt], generator: Any = generator, part: Any = part) -> list[tuple[int, ...]]:
            for ticket, prepared in enumerate(generator.prepare(prompts)):
                generator.add(ticket, prepared)
            done: dict[Any, Any] = {}
            while generator.busy:
                done.update(generator.step().finished)
            cached[part] = sum(done[ticket].cached_tokens for ticket in range(len(prompts)))
            return [done[ticket].completions[0].tokens for ticket in range(len(prompts))]

        found[part] = answer(prompts)
        if part == (SHARED_PREFIXES,):
            assert peer_child.recomputed(answer, prompts) == found[part]
        generator.close()
    assert len(set(map(str, found.values()))) == 1, found
    assert cached[()] >= 64
    assert cached[(SHARED_PREFIXES,)] == 0


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_ablation_of_one_run_says_that_the_noise_is_unknown(repeats):
    parts = [OptimizationPart("KV cache", "kept → computed anew"), OptimizationPart("batch", "8 → 1")]
    prompts = DrawnPrompts(100, (), 0)
    work: Any = SimpleNamespace(parts=parts, batch_size=8, sequences=8, new_tokens=4, prompts=prompts, command="")
    rates = {"whole": 100.0, "without KV cache": 50.0, "without batch": 80.0}
    runs = [
        SimpleNamespace(variant=name, repeat=repeat, rate=rate * (1 + repeat / 100))
        for name, rate in rates.items()
        for repeat in range(repeats)
    ]
    verdict = ablation_document({}, work, SeriesOutcome([], runs=runs))["verdict"]
    assert verdict.startswith("Alone, each")
    assert "KV cache 2.00×, batch 1.25×" in verdict
    assert ("one run of each tells nothing of the noise. Add --repeats 3." in verdict) == (repeats == 1)


@pytest.mark.thorough  # seven child processes that load torch
def test_ablate_prints_what_each_part_brings(tmp_path):
    document = bench(tmp_path, "--ablate", "--model", "tiny", "--batch-sizes", 2, "--new-tokens", 4, "--repeats", 2)
    found = {one["part"]: one for one in document["ablation"]["parts"]}
    assert found["graphs"]["why_not"] == "a CPU has no CUDA graphs"
    assert document["status"] == "done"
    for name in ("KV cache", "prefix cache", "batch", "compile", "sampling"):
        assert found[name]["brings"] > 0
        low, high = found[name]["ci95"]
        assert low <= found[name]["brings"] <= high
    assert len(document["samples"]) == 2 * (1 + sum(one["brings"] is not None for one in found.values()))
