"""From a checkpoint's files to its language."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gpuinfer.errors import UsageError
from gpuinfer.text.language.chat import ChatTemplates
from gpuinfer.text.language.files import TokenizerSettings, read_settings
from gpuinfer.text.language.language import Language
from gpuinfer.text.language.subwords import Bytes, Characters, Subwords, open_subwords
from gpuinfer.text.shape import Shape

ENDS_BEGIN = ("gpt2", "nanogpt")  # families whose end token stood between texts, and so before each


class Files(Protocol):
    """Where a checkpoint's tokenizer is to be found: in a folder, as an alphabet, or nowhere: then tokens are bytes."""

    @property
    def folder(self) -> Path | None: ...
    @property
    def characters(self) -> tuple[str, ...] | None: ...
    @property
    def bytes(self) -> bool: ...
    @property
    def template(self) -> str | None: ...


def open_language(files: Files, shape: Shape) -> Language:
    """Raises `UsageError` when there is no tokenizer, or one that cannot be used."""
    if files.bytes:
        ends = shape.end_tokens
        return Language(Bytes(), shape.vocabulary, ends, _first(shape.beginning_token, *ends), _templates(files))
    if files.characters is not None:
        characters = Characters(files.characters)
        beginning = _first(shape.beginning_token, characters.token("\n"))  # as nanoGPT begins
        return Language(characters, shape.vocabulary, shape.end_tokens, beginning)
    if files.folder is None:
        raise UsageError("the model has no tokenizer. Give its alphabet with --meta, or a folder with tokenizer.json.")
    return _from_folder(files.folder, shape)


def has_chat_template(files: Files) -> bool:
    """Whether chats can be written out. Quicker than to open the language."""
    return _templates(files) is not None


def _templates(files: Files) -> ChatTemplates | None:
    settings = TokenizerSettings(template=files.template) if files.folder is None else read_settings(files.folder)
    return None if settings.template is None else ChatTemplates(settings)


def _from_folder(folder: Path, shape: Shape) -> Language:
    settings = read_settings(folder)
    codec = open_subwords(folder, shape.family, settings)
    ends = _end_tokens(codec, settings, shape)
    spare = ends if shape.family in ENDS_BEGIN else ()
    beginning = _first(shape.beginning_token, _token(codec, settings, "bos_token"), *spare)
    template = None if settings.template is None else ChatTemplates(settings)
    return Language(codec, shape.vocabulary, ends, beginning, template)


def _end_tokens(codec: Subwords, settings: TokenizerSettings, shape: Shape) -> tuple[int, ...]:
    """All that config.json, generation_config.json and the tokenizer call the end: any of them ends an answer."""
    own = _token(codec, settings, "eos_token")
    ends = [*shape.end_tokens, *settings.end_tokens, *([] if own is None else [own])]
    return tuple(dict.fromkeys(token for token in ends if token < shape.vocabulary))


def _token(codec: Subwords, settings: TokenizerSettings, name: str) -> int | None:
    text = settings.named.get(name)
    return None if text is None else codec.tokenizer.token_to_id(text)


def _first(*tokens: int | None) -> int | None:
    return next((token for token in tokens if token is not None), None)
