"""/v1/score and /rerank: log-probabilities in the forms of vLLM, Jina and Cohere."""

from __future__ import annotations

import math

import pytest
from text.tiny import tiny_checkpoint

import gpuinfer
from gpuinfer.errors import BadPrompt

DOCUMENTS = ["The Seine flows through Paris.", {"text": "Rust is red.", "title": "passed over"}, "Wide, grey, calm."]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_a_score_is_the_mean_probability_of_what_follows(tiny, path):
    after = [" Paris", " Rome and more"]
    told = tiny.ask(path, {"text_1": "The capital is", "text_2": after}).json
    with gpuinfer.LLM("tiny") as llm:
        expected = llm.score("The capital is", after)
    for index, (one, score) in enumerate(zip(told["data"], expected, strict=True)):
        assert (one["index"], one["object"]) == (index, "score")
        assert math.isclose(one["score"], math.exp(score.logprob / len(score.tokens)), rel_tol=1e-6)
    assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] == len("The capital is" * 2 + "".join(after))
    pairs = tiny.ask(path, {"text_1": ["The capital is"] * 2, "text_2": after}).json
    assert [one["score"] for one in pairs["data"]] == [one["score"] for one in told["data"]]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_query(tiny, path):
    asked = {"query": "Which river?", "documents": DOCUMENTS}
    told = tiny.ask(path, asked).json
    scores = [one["relevance_score"] for one in told["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(one["index"] for one in told["results"]) == [0, 1, 2]
    texts = [one if isinstance(one, str) else one["text"] for one in DOCUMENTS]
    assert all(one["document"] == {"text": texts[one["index"]]} for one in told["results"])
    first = tiny.ask(path, {**asked, "top_n": 1, "return_documents": False}).json["results"]
    assert first == [{name: value for name, value in told["results"][0].items() if name != "document"}]
    both = tiny.ask("/v1/score", {"queries": asked["query"], "documents": texts}).json["data"]
    assert {one["index"]: one["score"] for one in both} == {
        one["index"]: one["relevance_score"] for one in told["results"]
    }


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/score", {"text_1": "a"}, None, "two sides are scored"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c", "documents": "d"}, None, "two sides"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "has 2 texts and `text_2` 3"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "empty"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "is empty"),
        ("/rerank", {"query": " ", "documents": ["a"]}, "query", "is empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "is empty"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "2,048 are the most"),
        ("/rerank", {"query": "a", "documents": ["b", "c " * 9000]}, "documents[1]", "the context"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, None, "`text`"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, None, ">= 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields", "no field"),
    ],
)
def test_refusals(tiny, path, body, param, says):
    answer = tiny.ask(path, body)
    assert answer.status == 400
    assert says in answer.error["message"]
    assert answer.error["param"] == param


def test_texts_whose_letters_become_one_token_are_refused_with_the_cure():
    with gpuinfer.LLM(tiny_checkpoint("gpt2")) as llm:
        with pytest.raises(BadPrompt, match=r"one token spans .* Begin it with a space"):
            llm.score("e", "r")
        assert llm.score("e", " r")[0].tokens
