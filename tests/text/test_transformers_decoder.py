"""Models that transformers' own code computes, with our attention in it: against transformers by itself, and against
themselves in other company.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from text.oracle import peer
from text.tiny import END, copy_of, tiny_checkpoint
from text.tiny_families import DECODERS, tiny_family
from text.toy import run

from gpuinfer.api import BackendContext, ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import UsageError
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.generator import open_generator
from gpuinfer.text.text_options import TorchModelOptions

TEXTS = [
    "The quick brown fox",
    "def batch(rows):",
    "Zürich, naïve café, 東京; and a longer prompt that has to go through in chunks, beside others and before others",
    "x",
    "The quick brown fox jumps over the lazy dog, and then",
    "The quick brown fox jumps over the lazy dog, but not",
]
GREEDY = Sampling(temperature=0, max_tokens=16)


def opened(folder, *, dtype="float32", deterministic=False, **tuning):
    """Few slots and short steps: prompts are cut into chunks, and wait for one another."""
    setup = Setup(devices=("cpu",), dtype=dtype, deterministic=deterministic)
    options = TorchModelOptions(**{"slots": 4, "step_tokens": 24, "threads": 1, "decoder": "transformers", **tuning})
    return open_generator(ModelSpec(name=str(folder), kind="text", arguments={}), setup, options)


def tokens_of(generator, prompts):
    return [list(outcome.completions[0].tokens) for outcome in run(generator, prompts)]


def transformers_tokens(folder, generator, prompts):
    """What transformers' own `generate` answers, up to the end token."""
    found = []
    for prepared in generator.prepare(prompts):
        inputs = torch.tensor(prepared.tokens.tolist())[None]
        how = {"max_new_tokens": GREEDY.max_tokens, "do_sample": False, "attention_mask": torch.ones_like(inputs)}
        answer = peer(folder).generate(inputs, **how)[0, inputs.shape[1] :].tolist()
        found.append(answer[: answer.index(END)] if END in answer else answer)
    return found


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [(family, False) for family in DECODERS] + [("gemma3_text", True), ("gpt_oss", True), ("deepseek_v3", True)],
)
def test_greedy_tokens_are_those_of_transformers(family, deterministic):
    """In chunks and in company; the second time with prefixes that are in the cache."""
    folder = tiny_family(family)
    generator = opened(folder, deterministic=deterministic, decoder=None)
    prompts = [Prompt(text=text, sampling=GREEDY) for text in TEXTS]
    expected = transformers_tokens(folder, generator, prompts)
    assert max(len(set(tokens)) for tokens in expected) > 2, "answers that say little"
    for _ in range(2):
        found = [[one for one in tokens if one != END] for tokens in tokens_of(generator, prompts)]
        assert found == expected
    generator.close()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_native_families_have_the_same_tokens_in_transformers_code(family):
    folder = tiny_checkpoint(family)
    generators = [opened(folder, decoder=decoder) for decoder in ("native", "transformers")]
    prompts = [Prompt(text=text, sampling=GREEDY) for text in TEXTS]
    native, own = [tokens_of(generator, prompts) for generator in generators]
    assert native == own
    assert [generator.decoder.shape.decoder for generator in generators] == ["native", "transformers"]
    assert open_checkpoint(ModelSpec(str(folder), kind="text")).shape.decoder == "native"
    for generator in generators:
        generator.close()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "phi"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_answers_have_the_same_bits_in_any_company(family, dtype):
    sampling = Sampling(max_tokens=8, logprobs=2, ignore_eos=True)
    prompts = [Prompt(text=text, key=text, sampling=sampling) for text in TEXTS]
    generator = opened(tiny_family(family), dtype=dtype, deterministic=True)
    together = [outcome.completions for outcome in run(generator, prompts)]
    generator.close()
    generator = opened(tiny_family(family), dtype=dtype, deterministic=True, step_tokens=64, slots=1)
    alone = [outcome.completions for prompt in reversed(prompts) for outcome in run(generator, [prompt])]
    generator.close()
    assert together == alone[::-1]


def test_constraints_stop_strings_and_samples_work_as_ever():
    generator = opened(tiny_family("gemma3_text"))
    asked = [
        Prompt(text="The", sampling=Sampling(max_tokens=8, constraint=Constraint(regex="[ab]{4}"))),
        Prompt(text="The", samples=3, sampling=Sampling(max_tokens=6, top_p=0.9, ignore_eos=True)),
    ]
    constrained, sampled = run(generator, asked)
    generator.close()
    assert len(constrained.completions[0].text) == 4
    assert set(constrained.completions[0].text) <= set("ab")
    assert [len(one.tokens) for one in sampled.completions] == [6, 6, 6]


def test_embeddings_are_the_last_states_of_transformers():
    folder = tiny_family("gemma3_text")
    generator = opened(folder)
    (prepared,) = generator.prepare([Prompt(text=TEXTS[2])])
    (found,) = run(generator, [Prompt(text=TEXTS[2], embed="last")])
    generator.close()
    with torch.inference_mode():
        state = peer(folder).base_model(torch.tensor(prepared.tokens.tolist())[None]).last_hidden_state[0, -1]
    expected = state / state.norm()
    assert torch.allclose(torch.frombuffer(bytearray(found.embedding), dtype=torch.float32), expected, atol=1e-4)


@pytest.mark.parametrize("decoder", ["native", "transformers"])
async def test_a_notice_says_how_far_deterministic_answers_are_exact(decoder):
    """Of a native decoder there is nothing to say."""
    setup = Setup(model=ModelSpec(str(tiny_checkpoint("llama")), kind="text"), devices=("cpu",), deterministic=True)
    backend = InProcess(setup, slots=2, decoder=decoder)
    await backend.start(BackendContext())
    notices = backend.notices
    await backend.close()
    assert [("--deterministic" in one, "-B decoder=native" in one) for one in notices] == (
        [] if decoder == "native" else [(True, True)]
    )


REFUSED_OPTIONS = {"compile": {"compile": True}, "parallel": {"parallel": "pipeline", "stages": 2}}


@pytest.mark.parametrize("option", REFUSED_OPTIONS)
def test_options_of_native_decoders_are_refused(option):
    with pytest.raises(UsageError, match=rf"-B\s{option}|transformers' own code"):
        opened(tiny_family("gemma"), **REFUSED_OPTIONS[option])


def test_new_weights_are_taken_over_and_others_are_refused(tmp_path):
    other = tiny_family("gemma3_text", seed=1)
    generator, there = opened(tiny_family("gemma3_text")), opened(other)
    prompts = [Prompt(text=text, sampling=GREEDY) for text in TEXTS]
    before, expected = tokens_of(generator, prompts), tokens_of(there, prompts)
    generator.update("1", generator.read_weights(str(other)))
    assert before != expected
    assert tokens_of(generator, prompts) == expected
    with pytest.raises(UsageError, match="not those of a gemma3_text model"):
        generator.read_weights(str(tiny_family("gemma", num_hidden_layers=1)))
    for one in (generator, there):
        one.close()


def changed(family, tmp_path, **values):
    folder = copy_of(tiny_family(family), tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def bare(tmp_path, **values):
    """A folder with a config.json alone."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


REFUSED = {
    "a state": (partial(bare, model_type="mamba"), "a mamba model keeps a state"),
    "a hybrid": (partial(bare, model_type="jamba"), "a jamba model keeps a state"),
    "layers of another kind": (partial(bare, model_type="qwen3_next"), "a qwen3_next model keeps a state"),
    "no interface": (partial(bare, model_type="falcon"), "a falcon model computes its attention in code of its own"),
    "biases of distance": (partial(bare, model_type="mpt"), "mpt model computes its attention in code of its own"),
    "an index": (partial(bare, model_type="deepseek_v32"), "has layers of kind indexed_attention"),
    "chunked attention": (partial(bare, model_type="llama4_text"), "llama4_text model .*(kind|masks)"),
    "an encoder": (partial(bare, model_type="bert"), "no backend of gpuinfer serves such models"),
    "an encoder with a decoder": (
        partial(bare, model_type="bart", is_encoder_decoder=True),
        "no backend of gpuinfer serves such models",
    ),
    "no text": (partial(bare, model_type="vit"), "writes no text from left to right"),
    "unknown": (partial(bare, model_type="nonsense"), "neither a native decoder nor transformers .* knows"),
    "code of its own": (
        partial(bare, model_type="nonsense", auto_map={"AutoModel": "x.Y"}),
        "asks to run code of its own",
    ),
    "settings that transformers rejects": (partial(bare, model_type="gemma", vocab_size="many"), "rejects it"),
    "no weights": (partial(bare, model_type="gemma"), "has neither model.safetensors nor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_run_is_refused_by_name(case, tmp_path):
    make, words = REFUSED[case]
    with pytest.raises(UsageError, match=words):
        open_checkpoint(ModelSpec(str(make(tmp_path)), kind="text"))


def test_the_choice_of_native_is_refused_where_the_family_is_not():
    with pytest.raises(UsageError, match="gemma3_text"):
        opened(tiny_family("gemma3_text"), decoder="native")


def test_weights_of_another_shape_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"not those of a gemma model of this config.*size"):
        opened(changed("gemma", tmp_path, intermediate_size=80))


LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}


def test_rotary_positions_that_grow_are_those_of_the_context_in_any_company():
    """Transformers takes the long ones when the longest row of a batch is long; a short row beside it must not care."""
    folder = tiny_family("phi3", **LONG_ROPE)
    texts = ["The quick", "x", TEXTS[2]]
    prompts = [Prompt(text=text, sampling=GREEDY) for text in texts]
    generator = opened(folder, context=256)
    together = tokens_of(generator, prompts)
    generator.close()
    generator = opened(folder, context=256, slots=1)
    alone = [tokens for prompt in reversed(prompts) for tokens in tokens_of(generator, [prompt])]
    generator.close()
    assert together == alone[::-1]
    generator = opened(folder, context=64)  # the model's original one: as transformers computes short rows
    found = [[one for one in tokens if one != END] for tokens in tokens_of(generator, prompts[:2])]
    assert found == transformers_tokens(folder, generator, prompts[:2])
    assert found != [[one for one in tokens if one != END] for tokens in together[:2]]
    generator.close()


def test_proposed_tokens_are_verified_with_the_same_answers():
    folder, prompts = tiny_family("gemma3_text"), [Prompt(text=text, sampling=GREEDY) for text in TEXTS]
    found = []
    for speculate in ("off", "lookup"):
        generator = opened(folder, speculate=speculate)
        found.append(tokens_of(generator, prompts))
        generator.close()
    assert found[0] == found[1]
