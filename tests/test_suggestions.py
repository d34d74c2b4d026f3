"""What is said to people who use the words of another program, or write a name where a flag belongs."""

from __future__ import annotations

import pytest

from gpuinfer.config import foreign_names, registry
from gpuinfer.config.options import fields_of

GENERATE = ["generate", "--model", "tiny", "--prompt", "a"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["serve", "--max-model-len", "4096"], "Did you mean '--context'?", id="vLLM's context"),
        pytest.param(["serve", "--quantization", "awq"], "Quantised weights are not read.", id="quantised weights"),
        pytest.param(["serve", "--max-num-seqs", "8"], "Did you mean '-B slots=N'?", id="an option of the backend"),
        pytest.param(["serve", "--num-replicas", "3"], "Did you mean '--replicas'?", id="Ray's replicas"),
        pytest.param([*GENERATE, "-c", "99"], "Did you mean '--context'?", id="llama.cpp's context"),
        pytest.param(
            [*GENERATE, "-ngl", "99"], "no flag '-ngl'. Did you mean '--device cuda'?", id="llama.cpp's layers"
        ),
        pytest.param([*GENERATE, "--n_predict", "9"], "Did you mean '--max-new-tokens'?", id="an underscore"),
        pytest.param([*GENERATE, "--max_new_tokens", "9"], "Did you mean '--max-new-tokens'?", id="ours, with one"),
        pytest.param([*GENERATE, "-B", "max_num_seqs=4"], "Did you mean 'slots'?", id="an option by its name in vLLM"),
        pytest.param(["selfplay", "--uct_c", "2"], "Did you mean '--exploration'?", id="OpenSpiel's c"),
        pytest.param(["selfplay", "--sim", "2"], "Did you mean '--simulations'?", id="how a flag begins"),
        pytest.param(["train", "--tensorboard", "runs"], "writes loss.jsonl and a picture", id="TensorBoard"),
        pytest.param(["doctor", "--max-model-len", "9"], "Other commands have it as '--context'.", id="not here"),
        pytest.param(["doctor", "--xyzzy"], "no flag '--xyzzy'. See gpuinfer doctor --help.", id="nobody's word"),
        pytest.param(["run-batch", "x"], "Did you mean 'gpuinfer generate'?", id="vLLM's command"),
        pytest.param(["pull", "m/llama"], "hf download OWNER/NAME --local-dir NAME", id="a command that fetches"),
        pytest.param(["serve", "m/llama"], "Did you mean --model m/llama?", id="a model without its flag"),
        pytest.param(["selfplay", "connect-four"], "Did you mean --game connect-four?", id="a game without its flag"),
        pytest.param([*GENERATE, "two words"], "Did you mean --prompt ", id="a prompt without its flag"),
        pytest.param(["generate", "here.jsonl"], "Did you mean --input here.jsonl?", id="a file without its flag"),
        pytest.param(["selfplay", "--game", "gomoku"], "Give --game gomoku:Gomoku.", id="a game that lies here"),
        pytest.param(["selfplay", "--game", "gomoku.py"], "Give --game gomoku:Gomoku.", id="a game by its file"),
        pytest.param(["selfplay", "--game", "here"], "no game named 'here'.", id="a file without a game"),
        *(
            pytest.param([*words, "--model", "m/llama"], "hf download m/llama --local-dir llama, then --model llama.")
            for words in (["serve"], ["generate", "--prompt", "a", "--output", "o.jsonl"], ["memory"])
        ),
    ],
)
def test_a_word_of_another_program_is_answered_with_ours(gpuinfer, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gomoku.py").write_text("import a.b\nclass Board: pass\nclass Gomoku(a.b.PythonGame): pass\n")
    (tmp_path / "here.py").write_text("class Other: pass\n")
    (tmp_path / "here.jsonl").write_text('"a"\n')
    code, out, errors = gpuinfer(*words)
    assert (code, out) == (2, ""), errors
    assert said in " ".join(errors.split())
    assert len(errors.partition("gpuinfer: ")[2].splitlines()) <= 3


@pytest.fixture
def commands(monkeypatch):
    """Every command of ours."""
    monkeypatch.setenv(registry.DISABLED, "")  # listing them switches others' plugins off: that ends with the test
    from tools import tree

    return tree.commands()


def test_each_word_of_ours_that_is_suggested_is_one(commands):
    flags = {flag for command in commands for one in command.parameters for flag in one.flags}
    keys = set(fields_of(registry.load("backends", "inprocess").Options))
    wrong = []
    for theirs, several in foreign_names.FLAGS.items():
        for ours in several:
            first, _, rest = ours.partition(" ")
            known = rest.partition("=")[0] in keys if first == "-B" else first in flags
            if not known and not ours.endswith("."):
                wrong.append((theirs, ours))
    assert wrong == []


def test_each_command_that_is_suggested_is_one(commands):
    known = {command.name.removeprefix("gpuinfer ") for command in commands} | {"--version"}
    meant = {ours.partition(" --")[0] for ours in foreign_names.COMMANDS.values() if not ours.endswith(".")}
    assert meant - known == set()


def test_only_what_is_spelled_nearly_alike_is_taken_for_it():
    assert foreign_names.flag_hint("--gamse", ["--games", "--workers"]) == "Did you mean '--games'?"
    assert foreign_names.flag_hint("--quantise", ["--actions", "--quiet"]) == ""
    assert foreign_names.option_hint("max_wiat", ["max_wait", "max_rows"]) == "Did you mean 'max_wait'?"
    assert foreign_names.hub_hint("a/b/c") == foreign_names.hub_hint("./b") == foreign_names.hub_hint("b") == ""
