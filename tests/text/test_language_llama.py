"""Folders whose settings name LlamaTokenizer: spaces before words are treated as transformers treats them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from text.tiny import VOCABULARY, llama_tokenizer, tiny_checkpoint

from gpuinfer.text.language.tokenizer import Subwords, open_subwords, read_settings

TEXTS = [
    "The dog",
    " The dog",
    "  two spaces",
    "<s>The dog</s> <s> mind",
    "The <s>dog</s><s>",
    "東京 café 🙂",
    "a\n\nb\n",
    "▁marked",
    "x  y",
    " ",
]
SETTINGS = [
    pytest.param({}, id="no word on legacy"),
    pytest.param({"legacy": False}, id="not legacy"),
    pytest.param({"legacy": True}, id="legacy"),
    pytest.param({"legacy": None}, id="legacy null"),
    pytest.param({"add_prefix_space": False}, id="no space before the text"),
    pytest.param({"add_prefix_space": True, "legacy": True}, id="a space before each piece"),
    pytest.param({"tokenizer_class": "LlamaTokenizerFast", "legacy": False}, id="the fast class"),
    pytest.param({"tokenizer_class": "PreTrainedTokenizerFast"}, id="the file as it is"),
    pytest.param({"tokenizer_class": None}, id="no class"),
]


def both(folder: Path, family: str, settings: dict[str, Any]) -> tuple[Subwords, Any]:
    llama_tokenizer(folder, **settings)
    (folder / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": VOCABULARY}))
    return open_subwords(folder, family, read_settings(folder)), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_and_texts_are_those_of_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, family, settings)
    for special in (True, False):
        expected = [theirs(text, add_special_tokens=special)["input_ids"] for text in TEXTS]
        found = [tokens.tolist() for tokens in ours.encode(TEXTS, special)]
        assert found == expected
        assert [ours.decode(tokens) for tokens in found] == [
            theirs.decode(tokens, skip_special_tokens=True) for tokens in found
        ]


def test_a_vocabulary_of_bytes_is_read_as_its_file_says_whatever_class_it_names(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    before = open_subwords(tmp_path, "llama", read_settings(tmp_path)).encode(TEXTS, True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    after = open_subwords(tmp_path, "llama", read_settings(tmp_path))
    assert [tokens.tolist() for tokens in after.encode(TEXTS, True)] == [tokens.tolist() for tokens in before]
    assert after.decode(before[0].tolist()) == "The dog"
