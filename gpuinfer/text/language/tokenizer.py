"""Tokenizers: of Hugging Face folders, through the `tokenizers` library and with the folder's settings; and of bytes,
for the built-in models. Vocabularies that are lists of texts: vocabulary.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.text.checkpoint.config_keys import read_json
from gpuinfer.text.language.detokenizer import Encoded, Spelling, bad_unicode, spelling_of
from gpuinfer.text.language.vocabulary import END_OF_TEXT

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, WITH_TOOLS = "default", "tool_use"  # templates by the names that transformers has for them
LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class TokenizerSettings:
    """tokenizer_config.json, special_tokens_map.json, generation_config.json and the template files of one folder."""

    config: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)  # "bos_token" → "<s>", …: what a template may print
    special: tuple[str, ...] = ()  # all special tokens that the settings name
    end_tokens: tuple[int, ...] = ()  # of generation_config.json
    template: str | None = None
    tool_template: str | None = None  # for chats with tools, if it differs


def read_settings(folder: Path) -> TokenizerSettings:
    """The settings of a folder; absent files are no error. Raises `UsageError` for a damaged file."""
    config = read_object(folder / "tokenizer_config.json")
    merged = {**read_object(folder / "special_tokens_map.json"), **config}
    named = {name: text for name in NAMED_TOKENS if (text := _content(merged.get(name))) is not None}
    lists = [list(one.values()) if isinstance(one, Mapping) else one for one in map(merged.get, LISTS)]
    items = [item for some in lists if isinstance(some, list) for item in some]
    listed = [text for item in items if (text := _content(item)) is not None]
    end = read_object(folder / "generation_config.json").get("eos_token_id")
    ends = [one for one in (end if isinstance(end, list) else [end]) if isinstance(one, int)]
    return TokenizerSettings(
        config=config,
        named=named,
        special=tuple(dict.fromkeys([*named.values(), *listed])),
        end_tokens=tuple(one for one in ends if not isinstance(one, bool) and one >= 0),
        template=_template(folder, config, DEFAULT),
        tool_template=_template(folder, config, WITH_TOOLS),
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} when there is no such file."""
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """A token's text, which is stored alone or in an object with its flags."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(folder: Path, config: Mapping[str, Any], name: str) -> str | None:
    """The template of this name; a single template is the default. A separate file goes before the settings, as in
    transformers.
    """
    file = "chat_template.jinja" if name == DEFAULT else f"additional_chat_templates/{name}.jinja"
    if (own := folder / file).is_file():
        try:
            return own.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{own} cannot be read: {error}. Copy it again from where it came.") from None
    for settings in (config, read_object(folder / "chat_template.json")):
        templates = settings.get("chat_template")
        if isinstance(templates, list):
            pairs = [one for one in templates if isinstance(one, Mapping)]
            templates = {one.get("name"): one.get("template") for one in pairs}
        if isinstance(templates, Mapping):
            only = next(iter(templates.values())) if len(templates) == 1 and name == DEFAULT else None
            found = templates.get(name, only)
        else:
            found = templates if name == DEFAULT else None
        if isinstance(found, str):
            return found
    return None


SPACE = "▁"
CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
OWN = ("mistral", "qwen2")  # families for which transformers ignores the named class


def respaced(tokenizer: Tokenizer, family: str, settings: Mapping[str, Any]) -> None:
    """Give a Llama tokenizer, in place, the spaces that transformers' LlamaTokenizer gives it: a BPE of characters with
    "▁" for a space.
    """
    if settings.get("tokenizer_class") not in CLASSES or family in OWN or type(tokenizer.model).__name__ != "BPE":
        return

    def kinds(part: Any, several: str) -> list[str]:
        state: dict[str, Any] = {"type": "Sequence", several: []}
        if part is not None:
            state = json.loads(part.__getstate__())
        return [step["type"] for step in (state[several] if state["type"] == "Sequence" else [state])]

    found = kinds(tokenizer.normalizer, "normalizers"), kinds(tokenizer.pre_tokenizer, "pretokenizers")
    if found not in ((["Prepend", "Replace"], []), (["Replace"], []), ([], ["Metaspace"])):
        return
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)


# How Qwen2 cuts a text into words before it merges bytes (Qwen team 2024, tokenizer.json of the released models).
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = ("qwen2", "qwen3", "dream", "sdar")  # families that have its vocabulary


class Subwords:
    """A tokenizer of the `tokenizers` library, without padding and truncation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self.size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        added = tokenizer.get_added_tokens_decoder()
        self.hidden = frozenset(token for token, entry in added.items() if entry.special)

        def literal(token: int) -> str | None:
            return None if token < 0 else tokenizer.id_to_token(token)

        self.literal = spelling_of(tokenizer.decoder, literal)
        self.spelling = spelling_of(tokenizer.decoder, lambda token: None if token in self.hidden else literal(token))

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        def alone(text: str) -> Encoded:
            try:
                text.encode()
                return np.array(self.tokenizer.encode(text, add_special_tokens=special_tokens).ids, np.int32)
            except UnicodeEncodeError as error:
                return bad_unicode(error)
            except Exception as error:  # noqa: BLE001 - as below
                return BadPrompt(f"the tokenizer refuses this text: {error}. Give its tokens instead.")

        try:
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        except Exception:  # noqa: BLE001 - the library raises its own and Python's: one of the texts is bad
            return list(map(alone, texts))
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        plain = tokens if isinstance(tokens, list | tuple) else list(tokens)
        return str(self.tokenizer.decode(plain, skip_special_tokens=not special_tokens))


def open_subwords(folder: Path, family: str, settings: TokenizerSettings) -> Subwords:
    """The tokenizer of a folder. Raises `UsageError` if there is none, or it cannot be used."""
    whole, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if whole.is_file():
            tokenizer = Tokenizer.from_file(str(whole))
            respaced(tokenizer, family, settings.config)
        elif vocabulary.is_file() and merges.is_file():
            tokenizer = _merging(models.BPE.from_file(str(vocabulary), str(merges)), family, settings)
        else:
            tokenizer = None
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise UsageError(f"the tokenizer in {folder} cannot be read: {error}. Copy it again.") from None
    if tokenizer is None and (folder / "tokenizer.model").is_file():
        raise UsageError(
            f"{folder} has its tokenizer as tokenizer.model alone, and tokenizer.json is needed. Make it with\n"
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), with sentencepiece installed."
        )
    if tokenizer is None:
        raise UsageError(f"{folder} has no tokenizer. Copy tokenizer.json (or vocab.json and merges.txt) into it.")
    _add_tokens(tokenizer, settings)
    return Subwords(tokenizer)


def _merging(model: models.BPE, family: str, settings: TokenizerSettings) -> Tokenizer:
    """Byte-level BPE as it was published: the pieces and the order of their merges (Radford et al. 2019)."""
    tokenizer = Tokenizer(model)
    space = bool(settings.config.get("add_prefix_space", False))
    if family in QWEN:
        tokenizer.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytewise])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    beginning = settings.named.get("bos_token", END_OF_TEXT)
    token = tokenizer.token_to_id(beginning)
    if settings.config.get("add_bos_token") is True and token is not None:  # tokenizer.json says so itself
        template = [(beginning, token)]
        tokenizer.post_processor = processors.TemplateProcessing(f"{beginning} $A", special_tokens=template)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, settings: TokenizerSettings) -> None:
    """Tokens that the settings know and the tokenizer does not, or not as special ones."""
    entries = settings.config.get("added_tokens_decoder")
    good = (
        []
        if not isinstance(entries, dict)
        else [
            (int(token), entry)
            for token, entry in entries.items()
            if token.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
        ]
    )
    for token, entry in sorted(good, key=lambda pair: pair[0]):
        if tokenizer.id_to_token(token) is None and token == tokenizer.get_vocab_size():
            switches = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
            added = AddedToken(str(entry["content"]), normalized=bool(entry.get("normalized", True)), **switches)
            tokenizer.add_tokens([added])
    known = {entry.content for entry in tokenizer.get_added_tokens_decoder().values()}
    special = [one for one in settings.special if one not in known and tokenizer.token_to_id(one) is not None]
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])


class Bytes:
    """Token i is byte i; higher tokens are special."""

    size = 256

    def __init__(self) -> None:
        self.spelling = self.literal = Spelling(True, lambda token: bytes([token]) if 0 <= token < 256 else None)
        self.hidden: frozenset[int] = frozenset()

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        found: list[Encoded] = []
        for text in texts:
            try:
                found.append(np.frombuffer(text.encode(), np.uint8).astype(np.int32))
            except UnicodeEncodeError as error:
                found.append(bad_unicode(error))
        return found

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        return bytes([token for token in tokens if 0 <= token < 256]).decode("utf-8", "replace")
