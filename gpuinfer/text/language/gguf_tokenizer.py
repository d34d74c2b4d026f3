"""The tokenizer that the metadata of a GGUF file describes: byte-level merges ("gpt2"), or pieces of text that are
merged in the order of the vocabulary, with single bytes for what has no piece ("llama", SentencePiece's BPE: Kudo and
Richardson 2018). How a text is cut into words before bytes are merged has a name, `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.config_keys import key_set
from gpuinfer.text.checkpoint.gguf_file import GgufFile, damaged_gguf
from gpuinfer.text.language.tokenizer import (
    QWEN_WORDS,
    SPACE,
    Subwords,
    TokenizerSettings,
    open_subwords,
    read_settings,
)

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # types of tokens: special; matched in texts as a whole
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message: each ends an answer
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|endofturn|>")
TEMPLATE = "tokenizer.chat_template"

# How the released models' tokenizer.json cuts words: Llama 3 (Meta 2024), Mistral Nemo (Mistral AI 2024).
LLAMA3_WORDS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]"
TEKKEN_WORDS = (
    rf"{_WORD}*[{_LOWER}]+|{_WORD}+[{_LOWER}]*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN, DIGITS = "plain", "digits"  # as GPT-2 cuts; the same after each digit has been cut off
WORDS: Mapping[str, str] = {
    **dict.fromkeys(key_set("default gpt-2 phi-2 mpt olmo jais trillion mellum gigachat a.x-4.0"), PLAIN),
    **dict.fromkeys(key_set("smollm starcoder refact command-r codeshell exaone minerva-7b"), DIGITS),
    **dict.fromkeys(key_set("llama3 llama-v3 llama-bpe falcon3 pixtral lfm2 dbrx smaug-bpe"), LLAMA3_WORDS),
    **dict.fromkeys(key_set("qwen2 stablelm2 deepseek-r1-qwen megrez hunyuan"), QWEN_WORDS),
    "tekken": TEKKEN_WORDS,
}
WHOLE_FIRST = (LLAMA3_WORDS, TEKKEN_WORDS)  # a word that is a token is not merged from bytes; texts begin with a token


def open_gguf_tokenizer(file: GgufFile, family: str) -> tuple[Subwords, TokenizerSettings]:
    """The file's tokenizer and template; where it has none that is known here, those in tokenizer.json beside it.

    Raises `UsageError` if there is neither, or the metadata contradict themselves.
    """
    kind, words = file.metadata.get(f"{PREFIX}model"), file.metadata.get(f"{PREFIX}pre")
    if kind == "llama":
        return Subwords(_pieces_tokenizer(file)), gguf_settings(file)
    if kind == "gpt2" and (words is None or words in WORDS):
        return Subwords(_bytes_tokenizer(file)), gguf_settings(file)
    folder = file.path.parent
    if (folder / "tokenizer.json").is_file():
        settings = read_settings(folder)
        return open_subwords(folder, family, settings), settings
    if kind is None or kind == "none":
        what = "holds no tokenizer"
    elif kind != "gpt2":
        what = f"has a tokenizer of kind '{str(kind)[:40]}' (gpt2, llama are read)"
    else:
        what = f"has a tokenizer that cuts words in a way of its own, '{str(words)[:40]}'"
    raise UsageError(
        f"{file.path} {what}. Copy the original model's tokenizer.json and tokenizer_config.json beside it."
    )


def gguf_settings(file: GgufFile) -> TokenizerSettings:
    """Special tokens by name, the tokens that end an answer, and the templates. Raises `UsageError`."""
    tokens = _texts(file, "tokens")
    named = {}
    for name, key in NAMED.items():
        token = _token(file, key, len(tokens))
        if token is not None:
            named[name] = tokens[token]
    template, with_tools = (file.metadata.get(key) for key in (TEMPLATE, f"{TEMPLATE}.tool_use"))
    template = template if isinstance(template, str) and template.strip() else None
    ends = [token for key in ENDS if (token := _token(file, key, len(tokens))) is not None]
    if template is not None:
        spoken = [text for text in TURN_ENDS if text in template]
        ends += [tokens.index(text) for text in spoken if text in set(tokens)]
    return TokenizerSettings(
        named=named,
        special=tuple(dict.fromkeys(named.values())),
        end_tokens=tuple(dict.fromkeys(ends)),
        template=template,
        tool_template=with_tools if isinstance(with_tools, str) else None,
    )


def _bytes_tokenizer(file: GgufFile) -> Tokenizer:
    tokens, merges = _texts(file, "tokens"), []
    name = file.metadata.get(f"{PREFIX}pre")
    if name in (None, "default") and file.architecture.startswith("qwen"):
        name = "qwen2"
    words = WORDS[name or "default"]
    vocabulary = {text: token for token, text in enumerate(tokens)}
    for merge in _texts(file, "merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise damaged_gguf(file.path, f"its merge {merge[:40]!r} is not one of two tokens to a third")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words in WHOLE_FIRST))
    cuts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words in (PLAIN, DIGITS))]
    if words == DIGITS:
        cuts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif words != PLAIN:
        cuts.insert(0, pre_tokenizers.Split(Regex(words), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts) if len(cuts) > 1 else cuts[0]
    if words == QWEN_WORDS:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _mark_special(tokenizer, file, tokens)
    _surround(tokenizer, file, tokens, begins=words in WHOLE_FIRST)
    return tokenizer


def _pieces_tokenizer(file: GgufFile) -> Tokenizer:
    # files of Gemma have runs of spaces as they are, where a text has the character that stands for them
    tokens = [SPACE * len(one) if one and not one.strip(" ") else one for one in _texts(file, "tokens")]
    vocabulary = {text: token for token, text in enumerate(tokens)}
    unknown = _token(file, "unknown", len(tokens))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_implied_merges(vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.metadata.get(f"{PREFIX}add_space_prefix", True) is not False
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first" if prefix else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    _mark_special(tokenizer, file, tokens)
    _surround(tokenizer, file, tokens, begins=True)
    return tokenizer


def _implied_merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose texts joined are a token, in the order of that token: what SentencePiece merges."""
    found = []
    for text in vocabulary:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((left, right))
    return found


def _mark_special(tokenizer: Tokenizer, file: GgufFile, tokens: Sequence[str]) -> None:
    kinds = file.metadata.get(f"{PREFIX}token_type")
    if kinds is None:
        return
    if len(kinds) != len(tokens):
        raise damaged_gguf(file.path, f"it has {len(tokens):,} tokens, and the types of {len(kinds):,}")
    each = [(tokens[token], kind) for token, kind in enumerate(kinds.tolist()) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text, kind in each if kind == CONTROL]
    )
    whole = [text for text, kind in each if kind == USER_DEFINED and text.strip(SPACE)]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])


def _surround(tokenizer: Tokenizer, file: GgufFile, tokens: Sequence[str], *, begins: bool) -> None:
    """Tokens at the beginning and the end of each text. `begins`: with one at the beginning unless the file says."""
    first, last = (_token(file, key, len(tokens)) for key in ("bos", "eos"))
    pieces, special = ["$A"], []
    if first is not None and file.metadata.get(f"{PREFIX}add_bos_token", begins) is True:
        pieces, special = [f"{tokens[first]}", *pieces], [(tokens[first], first)]
    if last is not None and file.metadata.get(f"{PREFIX}add_eos_token", False) is True:
        pieces, special = [*pieces, tokens[last]], [*special, (tokens[last], last)]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _texts(file: GgufFile, key: str) -> list[str]:
    found = file.metadata.get(PREFIX + key)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise damaged_gguf(file.path, f"its tokenizer has no '{PREFIX}{key}'")
    return found


def _token(file: GgufFile, key: str, count: int) -> int | None:
    """The number of a special token; None: there is none."""
    found = file.metadata.get(f"{PREFIX}{key}_token_id")
    if found is None:
        return None
    if not isinstance(found, int) or found < 0:
        raise damaged_gguf(file.path, f"'{PREFIX}{key}_token_id' is {str(found)[:40]}, no token")
    return found if found < count else None
