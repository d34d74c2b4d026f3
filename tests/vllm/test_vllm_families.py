"""Models that our own reader refuses: vLLM reads their files, tokenizer and sizes. transformers is the oracle."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from tiny_families import FAMILIES, write_family, write_gptq
from vllm_held import Held

import gpuinfer
from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
SCORED = structs.replace(GREEDY, prompt_logprobs=0)
CHOSEN = Sampling(max_tokens=8, constraint=Constraint(regex="yes|no"))
TEXT = "The backend answers what transformers answers, for a prompt that is longer than the window"
CHAT = ({"role": "user", "content": "Which one?"},)
WRITTEN = "<|start|>user\nWhich one?<|end|>\n<|start|>assistant\n"
NEAR = 2e-3  # of log-probabilities in float32
SMALL = {"max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}


def tokens_of(folder: Path, text: str) -> list[int]:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def likelihoods(folder: Path, tokens: list[int]) -> np.ndarray:
    """Natural logarithms [tokens - 1, vocabulary] of what transformers thinks comes after each token."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1).numpy()


def check_answer(folder: Path, found: Generation, near: float) -> None:
    """The log-probabilities of TEXT and of its answer are transformers', and the likeliest tokens were taken, up to
    ties.
    """
    (answer,), prompt = found.completions, tokens_of(folder, TEXT)
    tokens = [*prompt, *answer.tokens]
    theirs, place = likelihoods(folder, tokens), np.arange(len(tokens) - 1)
    assert [one.chosen.token for one in found.prompt_logprobs[1:]] == prompt[1:]
    told = [one.chosen.logprob for one in (*found.prompt_logprobs[1:], *answer.logprobs)]
    chosen = theirs[place, tokens[1:]]
    assert np.abs(chosen - told).max() < near
    assert (theirs.max(1) - chosen)[-len(answer.tokens) :].max() < 2 * near


def asked_of(folder: Path, dtype: str = "float32") -> list[Generation]:
    """A scored text, a chat and a choice, each answered."""
    spec = ModelSpec(str(folder), kind="text", arguments={"context": 128})
    held = Held(Setup(spec, dtype=dtype), **SMALL)
    try:
        return held.asked(
            Prompt(text=TEXT, sampling=SCORED),
            Prompt(messages=CHAT, sampling=GREEDY),
            Prompt(text="Yes or no?", sampling=CHOSEN),
        )
    finally:
        held.close()


@pytest.mark.sample
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_our_decoders_do_not_read_answers_as_with_transformers(tmp_path, family):
    folder = write_family(tmp_path / family, family)
    text, chat, choice = asked_of(folder)
    check_answer(folder, text, NEAR)
    assert chat.prompt_tokens == len(tokens_of(folder, WRITTEN))
    assert choice.completions[0].text in ("yes", "no")


def test_an_engine_for_embeddings_has_those_of_transformers_and_no_answers(tmp_path):
    import torch
    import transformers

    folder, texts = write_family(tmp_path / "model", "olmo2"), ["A river is long", "A sea"]
    spec = ModelSpec(str(folder), kind="text", arguments={"context": 128})
    held = Held(Setup(spec, dtype="float32"), runner="pooling", **SMALL)
    try:
        found = held.asked(*(Prompt(text=text, sampling=Sampling(max_tokens=0), embed="model") for text in texts))
        with pytest.raises(BadPrompt, match="draws no answers"):
            held.asked(Prompt(text="Hi"))
    finally:
        held.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, one in zip(texts, found, strict=True):
        with torch.inference_mode():
            states = model.model(torch.tensor([tokens_of(folder, text)])).last_hidden_state[0]
        wanted = (states[-1] / states[-1].norm()).numpy()
        assert np.abs(wanted - np.frombuffer(one.embedding, "<f4")).max() < 1e-5


def test_quantised_weights_answer_as_the_same_model_in_float32(tmp_path):
    folder, twin = tmp_path / "packed", tmp_path / "twin"
    write_gptq(folder, twin)
    text, _, choice = asked_of(folder, "float16")
    check_answer(twin, text, 0.05)
    assert choice.completions[0].text in ("yes", "no")


def test_programs_and_environments_read_the_tokenizer_that_transformers_finds(tmp_path):
    folder = write_family(tmp_path / "model", "olmo2")
    before, after = "The sea was", " calm"
    with gpuinfer.LLM(folder, backend="vllm", context=128, **SMALL) as llm:
        (chat,) = llm.generate([list(CHAT)], max_new_tokens=8, temperature=0)
        (score,) = llm.score(before, [after])
    assert chat.prompt_tokens == len(tokens_of(folder, WRITTEN))
    tokens, start = tokens_of(folder, before + after), len(tokens_of(folder, before))
    assert list(score.tokens) == tokens[start:]
    theirs = likelihoods(folder, tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.abs(theirs[start - 1 :] - score.logprobs).max() < NEAR
    play = ["rollouts", "--env", "arithmetic", "--backend", "vllm", "--model", str(folder), "--context", "256"]
    play += ["--groups", "1", "--samples-per-group", "2", "--max-new-tokens", "8", "--json", "-"]
    command = [sys.executable, "-m", "gpuinfer", *play]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rollouts"]["calls"] >= 2


OPEN = """
import sys
from gpuinfer.backends.vllm_engine import async_llm, engine_arguments as arguments
from gpuinfer.api import Setup
if __name__ == "__main__":
    async_llm.prepare_environment()
    for name in sys.argv[1:]:
        made = arguments.engine_arguments(arguments.EngineOptions(), Setup(), name, on_cpu=True, adapters=0)
        try:
            async_llm.VllmEngine.open(made, 64, async_llm.VllmCounters())
        except Exception as error:
            print(type(error).__name__, error, flush=True)
"""


def test_what_vllm_does_not_serve_is_refused_with_its_reason_before_an_engine_is_started(tmp_path):
    sound = write_family(tmp_path / "sound", "gemma")

    def changed(name: str, **settings: object) -> None:
        shutil.copytree(sound, tmp_path / name)
        config = json.loads((sound / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | settings))

    changed("unknown", model_type="nonesuch")
    changed("unwritten", architectures=["NonesuchForCausalLM"])
    changed("code", model_type="nonesuch", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    changed("encoder", model_type="bert", architectures=["BertModel"])
    changed("silent")
    for file in (tmp_path / "silent").glob("tokenizer*"):
        file.unlink()
    write_gptq(tmp_path / "packed", tmp_path / "twin")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    said = {
        "unknown": "vLLM does not serve 'unknown': The checkpoint you are trying to load has model type `nonesuch` but "
        "Transformers does not recognize this architecture.",
        "unwritten": "vLLM does not serve 'unwritten': Model architectures ['NonesuchForCausalLM'] are not supported",
        "code": "vLLM does not serve 'code': it needs code that comes with the checkpoint. Where you trust that, give "
        "--trust-remote-code.",
        "encoder": "vLLM does not serve 'encoder': Embedding models do not support `--runner generate`. "
        "Serve its embeddings: -B runner=pooling.",
        "silent": "'silent' has no tokenizer. Copy tokenizer.json",
        "packed": "vLLM does not take these engine arguments: torch.float32 is not supported",
        "model.gguf": "vLLM does not serve 'model.gguf': GGUF files are read by a plugin of vLLM's",
        "an-owner/gone": "vLLM does not serve 'an-owner/gone': there is no such folder, and it is not in the cache",
    }
    command = [sys.executable, "-c", OPEN, *said]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("UsageError ")]
    assert [line[: len("UsageError " + text)] for line, text in zip(lines, said.values(), strict=True)] == [
        f"UsageError {text}" for text in said.values()
    ], done.stderr
