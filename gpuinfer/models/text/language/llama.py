"""How Llama's tokenizers treat the spaces before words, as transformers from version 5 on reads their folders.

A tokenizer.json of the years of Llama 2 puts a "▁" before every piece of text, those after special tokens included.
transformers reads no more than vocabulary and merges out of it where the settings name the class LlamaTokenizer, and
makes the rest anew: by `legacy` a "▁" goes before each piece or before the text alone, and nowhere where
`add_prefix_space` is false. We follow it, as the prompts of transformers and of vLLM are the ones that people compare
with. A vocabulary of bytes (Llama 3) under the same class name is left as its file says: transformers' reading of it
drops spaces. docs/verify.md says how to see which of them a model has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

SPACE = "▁"
CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
OWN = (
    "mistral",
    "qwen2",
)  # families that transformers reads by the file, or by a class of their own, whatever it names


def respaced(tokenizer: Tokenizer, family: str, settings: Mapping[str, Any]) -> None:
    """Change the tokenizer in place, where it is one of those."""
    if settings.get("tokenizer_class") not in CLASSES or family in OWN or not _spaced(tokenizer):
        return
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)


def _spaced(tokenizer: Tokenizer) -> bool:
    """Whether pieces are merged from characters, with "▁" for a space."""
    if type(tokenizer.model).__name__ != "BPE":
        return False
    normalizer = [step["type"] for step in _steps(tokenizer.normalizer, "normalizers")]
    before = [step["type"] for step in _steps(tokenizer.pre_tokenizer, "pretokenizers")]
    return (normalizer, before) in ((["Prepend", "Replace"], []), (["Replace"], []), ([], ["Metaspace"]))


def _steps(part: Any, several: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state[several]) if state["type"] == "Sequence" else [state]
