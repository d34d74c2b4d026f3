"""/v1/embeddings asked by OpenAI's own client, and `LLM.embed`: equal to transformers' states, whatever is computed
beside them.
"""

from __future__ import annotations

import base64
import json
import threading
from functools import cache

import numpy as np
import pytest
import torch
from replica_servers import serving
from text.test_generator_models import opened as open_generator
from text.tiny import copy_of, tiny_checkpoint
from text.toy import add

import gpuinfer
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Prompt, Sampling

TEXTS = ["A river in France.", "Zürich", "def batch(rows):\n    return rows", "x " * 90]
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def with_pooling(folder, *modes, kind="Pooling"):
    """The folder as sentence-transformers writes one."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, "include_prompt": True, **dict.fromkeys(modes, True)})
    )
    (folder / "modules.json").write_text(json.dumps(MODULES).replace("models.Pooling", f"models.{kind}"))
    return folder


@cache
def states(folder, text):
    """What transformers' last norm gives of each token."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].numpy()


def expected(folder, text, pooling):
    found = states(folder, text)
    vector = {"last": found[-1], "mean": found.mean(axis=0), "first": found[0]}[pooling]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_embeddings_are_transformers_states(family):
    folder = tiny_checkpoint(family)
    with gpuinfer.LLM(folder, step_tokens=32) as llm:
        for pooling in ("mean", "last", "first"):
            found = llm.embed(TEXTS, pooling=pooling)
            assert found.shape == (len(TEXTS), 64)
            for text, vector in zip(TEXTS, found, strict=True):
                assert np.abs(vector - expected(folder, text, pooling)).max() < 2e-6
        assert np.array_equal(llm.embed(TEXTS), llm.embed(TEXTS, pooling="last"))
        alone = np.concatenate([llm.embed(text, pooling="mean") for text in TEXTS])
        assert np.array_equal(alone, llm.embed(TEXTS, pooling="mean")), "what shares a step must not show"


def test_torch_s_own_decoder_gives_the_same():
    folder = tiny_checkpoint("llama")
    with gpuinfer.LLM(folder, dtype="float16") as llm:
        found = llm.embed(TEXTS, pooling="mean")
    for text, vector in zip(TEXTS, found, strict=True):
        assert np.abs(vector - expected(folder, text, "mean")).max() < 2e-3


def test_answers_and_embeddings_at_once_are_as_each_alone():
    folder = tiny_checkpoint("llama")
    with gpuinfer.LLM(folder, step_tokens=32, batch_size=8) as llm:
        options = {"max_new_tokens": 40, "n": 2, "seed": 3}
        alone = [one.texts for one in llm.generate(TEXTS, **options)]
        vectors = llm.embed(TEXTS * 4, pooling="mean")
        found = {}
        asking = threading.Thread(target=lambda: found.update(vectors=llm.embed(TEXTS * 4, pooling="mean")))
        asking.start()
        assert [one.texts for one in llm.generate(TEXTS, **options)] == alone
        asking.join(60)
        assert np.array_equal(found["vectors"], vectors)


def test_a_short_text_does_not_wait_for_a_long_one():
    """It goes in the next step, and of several long ones the first gets half of each step."""
    generator = open_generator(tiny_checkpoint("llama"), slots=2, step_tokens=32)
    lengths = (200, 180, 170, 5)
    add(generator, *(Prompt(tokens=(7,) * n, sampling=Sampling(max_tokens=0), embed="mean") for n in lengths))
    order, steps = [], []
    while generator.busy:
        stepped = generator.step()
        steps.append(stepped.tokens)
        order += [(ticket, len(steps)) for ticket, _ in stepped.finished]
    generator.close()
    assert order[0] == (3, 1)
    assert [ticket for ticket, _ in order[1:]] == [0, 2, 1]
    assert max(steps) == 32
    assert len(steps) == -(-sum(lengths) // 32)


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    """A server of a folder that pools by the mean."""
    room = tmp_path_factory.mktemp("pooled")
    folder = with_pooling(copy_of(tiny_checkpoint("llama"), room / "model"), "pooling_mode_mean_tokens")
    with serving("--model", folder, "-B", "slots=4", "-B", "step_tokens=64", folder=room) as running:
        running.folder = folder
        yield running


def test_the_client_of_openai(pooled):
    ask = pooled.openai.embeddings.create
    told = ask(model="model", input=TEXTS)  # which asks for base64
    assert [one.index for one in told.data] == list(range(len(TEXTS)))
    assert told.usage.total_tokens == told.usage.prompt_tokens == sum(len(states(pooled.folder, one)) for one in TEXTS)
    for text, one in zip(TEXTS, told.data, strict=True):
        assert np.abs(np.array(one.embedding) - expected(pooled.folder, text, "mean")).max() < 2e-6
    plain = ask(model="model", input=TEXTS[0], encoding_format="float").data[0].embedding
    assert plain == told.data[0].embedding
    few = np.array(ask(model="model", input=TEXTS[0], dimensions=8).data[0].embedding)
    assert np.allclose(few, np.array(plain[:8]) / np.linalg.norm(plain[:8]), atol=1e-7)
    tokens = pooled.ask("/tokenize", {"prompt": TEXTS[0]}).json["tokens"]
    assert ask(model="model", input=tokens).data[0].embedding == plain
    assert ask(model="model", input=[tokens, tokens]).data[1].embedding == plain


def test_base64_is_float32(pooled):
    told = pooled.ask("/v1/embeddings", {"input": "Hi", "encoding_format": "base64"}).json
    assert len(base64.b64decode(told["data"][0]["embedding"])) == 4 * 64


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"input": ""}, "`input` is empty", "input"),
        ({"input": []}, "`input` is empty", "input"),
        ({"input": ["a", ""]}, "`input[1]` is empty", "input[1]"),
        ({"input": ["a", 5]}, "`input[1]` is neither a text nor", "input[1]"),
        ({"input": ["a"] * 2049}, "2,048 are the most", "input"),
        ({"input": "a", "dimensions": 65}, "this model's embeddings have 64", "dimensions"),
        ({"input": "a", "dimensions": 0}, ">= 1", None),
        ({"input": "a", "encoding_format": "int8"}, "Choose from float, base64", None),
        ({"input": "a b " * 400}, "the context", None),
        ({"input": [1 << 20]}, "not in the model's vocabulary", None),
        ({"input": "a", "pooling": "mean"}, "no field `pooling`", "pooling"),
        ({}, "missing required field `input`", None),
    ],
)
def test_refusals(pooled, body, says, param):
    answer = pooled.ask("/v1/embeddings", body)
    assert answer.status == 400
    assert says in answer.error["message"]
    assert answer.error["param"] == param


def test_a_long_text_can_be_cut(pooled):
    told = pooled.ask("/v1/embeddings", {"input": "a b " * 400, "truncate": "right"}).json
    assert told["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [("tiny-llada", {}, "a diffusion model"), ("null", {}, "computes nothing")],
)
def test_a_model_that_has_none(model, options, says):
    with gpuinfer.LLM(model, **options) as llm, pytest.raises(BadPrompt, match=says):
        llm.embed("Hi")


@pytest.mark.parametrize(
    ("modes", "kind", "says"),
    [
        (["pooling_mode_max_tokens"], "Pooling", "max_tokens"),
        (["pooling_mode_mean_tokens", "pooling_mode_cls_token"], "Pooling", "mean_tokens and cls_token"),
        (["pooling_mode_mean_tokens"], "Dense", "Dense"),
    ],
)
def test_pooling_that_is_not_computed_here(modes, kind, says, tmp_path):
    folder = with_pooling(copy_of(tiny_checkpoint("llama"), tmp_path / "model"), *modes, kind=kind)
    with gpuinfer.LLM(folder) as llm:
        with pytest.raises(BadPrompt, match=says):
            llm.embed("Hi")
        assert llm.embed("Hi", pooling="mean").shape == (1, 64)
        assert llm.answer("Hi", max_new_tokens=1).result().text is not None


def test_the_face_in_a_program_refuses(tmp_path):
    with gpuinfer.LLM("tiny") as llm:
        for given, options, says in (
            ("Hi", {"pooling": "max"}, "Choose from model, mean"),
            (["Hi", 7], {}, "text 1: 7"),
            (7, {}, "7 cannot be"),
            ("Hi", {"dimensions": 10_000}, "these embeddings have"),
        ):
            with pytest.raises((UsageError, BadPrompt), match=says):
                llm.embed(given, **options)
        assert llm.embed([]).shape == (0, 0)


@pytest.mark.parametrize("words", [("--backend", "central")])
def test_another_process_computes(words, tmp_path):
    with serving("--model", "tiny", "-B", "slots=4", *words, folder=tmp_path) as server:
        there = server.openai.embeddings.create(model="tiny", input=TEXTS)
    with gpuinfer.LLM("tiny") as llm:
        here = llm.embed(TEXTS)
    assert np.array_equal(np.array([one.embedding for one in there.data], np.float32), here)
