"""Small tokenizers of the kinds that real folders have, and folders around them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gpuinfer.text.checkpoint import LanguageFiles
from gpuinfer.text.language import Language, open_language
from gpuinfer.text.transformer import Shape

CORPUS = [
    'The quick brown fox said: "hello, world" and {"name": "Ann", "age": 42} was true, false or null.',
    "Ünïcode ist schön; 日本語のテキスト, emoji 😀😀 and 👩‍👩‍👧 too. Once upon a time, twice 1234567890 times.",
    "def function(value):\n    return [value, value * 2]\n\n",
] * 3


def shape(vocabulary: int, family: str = "llama", **more: Any) -> Shape:
    return Shape(family, vocabulary, 8, 1, 1, 1, 8, 8, 64, **more)


@cache
def byte_level() -> str:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer.to_str()


@cache
def byte_fallback(metaspace: bool = False) -> str:
    """BPE over characters with a mark for spaces, and bytes for what it does not know, as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁"]
    merges = [("▁", "▁")]
    pieces += [chr(one) for one in range(0x21, 0x7F)] + ["é", "日"]
    for pair in ("▁ t", "t h", "▁t h", "h e", "▁ {", "l o", ": ▁", "a ▁"):
        left, right = pair.split()
        if left in pieces:
            merges.append((left, right))
            pieces.append(left + right)
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=not metaspace, unk_token="<unk>"))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


@cache
def whole_words() -> str:
    """One token a word and no decoder, as people train for small worlds of their own."""
    words = ["[UNK]", "[END]", "e4", "e5", "Nf3", "Nc6"]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", "[END]"])
    return tokenizer.to_str()


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": lambda: byte_fallback(True),
    "whole words": whole_words,
}


def folder(path: Path, tokenizer: str | None = None, **files: Any) -> Path:
    """Write a folder. Keywords are its JSON files without the ending."""
    path.mkdir(exist_ok=True)
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer, "utf-8")
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return path


def language(
    path: Path, tokenizer: str | None = None, padded: int = 0, family: str = "llama", **files: Any
) -> Language:
    """Open a folder's language, for a model whose vocabulary is so much larger than the tokenizer's."""
    at = folder(path, tokenizer, **files)
    size = Tokenizer.from_str(tokenizer).get_vocab_size() if tokenizer is not None else 1000
    return open_language(LanguageFiles(at), shape(size + padded, family))
