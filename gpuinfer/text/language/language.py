"""A model's tokenizer, chat template and constraints behind one interface, opened from a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Candidate, Constraint, Logprob, Prompt, Rendering
from gpuinfer.text.language.chat_template import ChatTemplates
from gpuinfer.text.language.detokenizer import Codec, Encoded, IncrementalDetokenizer
from gpuinfer.text.language.gguf_tokenizer import gguf_settings, open_gguf_tokenizer
from gpuinfer.text.language.grammar import GrammarMatcher, GrammarMatchers
from gpuinfer.text.language.tokenizer import (
    Bytes,
    TokenizerSettings,
    open_subwords,
    read_settings,
)
from gpuinfer.text.language.vocabulary import END_OF_TEXT, Vocabulary
from gpuinfer.text.transformer import Shape

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import LanguageFiles
    from gpuinfer.text.language.list_trie import Tries
    from gpuinfer.text.language.list_walks import ListedMatcher

LONGEST_TEXT = 16 * 2**20  # characters of one prompt


class Language:
    """Threads may share one. `vocabulary`: the model's; its tokenizer may know fewer tokens."""

    def __init__(
        self,
        codec: Codec,
        vocabulary: int,
        end_tokens: Sequence[int] = (),
        beginning: int | None = None,
        template: ChatTemplates | None = None,
    ) -> None:
        self._codec, self._beginning, self._template = codec, beginning, template
        self.vocabulary = vocabulary
        self.end_tokens = tuple(end_tokens)
        self._matchers = GrammarMatchers(codec, vocabulary, self.end_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The text of the chat template, with that for tools where it is another; "" without one."""
        return "" if self._template is None else self._template.source

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return self._template is not None and self._template.reads_tools

    def special_token(self, text: str) -> int | None:
        """The special token that this text is alone; None: it is none."""
        (found,) = self._codec.encode([text], False)
        if isinstance(found, BadPrompt) or len(found) != 1:
            return None
        return int(found[0]) if int(found[0]) in self._codec.hidden else None

    def encode(self, prompts: Sequence[Prompt]) -> list[NDArray[np.int32] | BadPrompt]:
        """The tokens of each prompt, int32, at least one, or its error. All texts are encoded in one call."""
        results: list[Encoded | None] = [None] * len(prompts)
        texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}  # by whether special tokens are added
        for number, prompt in enumerate(prompts):
            try:
                if (prompt.text is not None) + (prompt.tokens is not None) + (prompt.messages is not None) != 1:
                    raise BadPrompt("a prompt is a text, tokens or messages. Give exactly one of them.")
                if prompt.tokens is not None:
                    results[number] = self._checked(_array(prompt.tokens))
                    continue
                text = prompt.text if prompt.messages is None else self.render_chat(prompt.messages, prompt.rendering)
                if not isinstance(text, str):
                    raise BadPrompt(f"the text of a prompt is a {type(text).__name__}. Write a string.")
                if len(text) > LONGEST_TEXT:
                    raise BadPrompt(f"the prompt has {len(text)} characters. Give at most {LONGEST_TEXT}.")
                texts[prompt.messages is None and prompt.special_tokens].append((number, text))
            except BadPrompt as error:
                results[number] = error
        known = self._codec.size <= self.vocabulary
        for special_tokens, some in texts.items():
            encoded = self._codec.encode([text for _, text in some], special_tokens) if some else []
            for (number, _), result in zip(some, encoded, strict=True):
                results[number] = self._checked(result, known)
        return [result for result in results if result is not None]

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """The text of an answer; special tokens are left out unless `special_tokens`."""
        return self._codec.decode(tokens, special_tokens)

    def first_difference(self, other: Language) -> int | None:
        """The lowest token that is another one there, or that only one of both has; None: their tokens are the same."""
        own, others = self._codec, other._codec
        size = min(own.size, others.size)
        for token in range(size):
            if own.literal.piece(token) != others.literal.piece(token):
                return token
        return None if own.size == others.size else size

    def spell_out(self, found: Logprob, special_tokens: bool = False) -> Logprob:
        """The log-probabilities with their tokens' bytes. `special_tokens`: they are part of the text."""

        def named(one: Candidate) -> Candidate:
            piece = self._codec.literal.piece(one.token)
            name = piece.encode() if isinstance(piece, str) else piece
            hidden = not special_tokens and one.token in self._codec.hidden
            return Candidate(one.token, one.logprob, one.rank, name, hidden)

        return Logprob(named(found.chosen), tuple(map(named, found.likeliest)))

    def detokenizer(
        self, stop: Sequence[str] = (), special_tokens: bool = False, incremental: bool = True
    ) -> IncrementalDetokenizer:
        """For the text of one answer, which may end with a stop string. `incremental`: parts of the text are wanted."""
        return IncrementalDetokenizer(
            self._codec.literal if special_tokens else self._codec.spelling, stop, incremental=incremental
        )

    def matcher(self, constraint: Constraint) -> GrammarMatcher | ListedMatcher:
        """A matcher of a constraint, compiled within limits and cached. Threads may call it. Raises `BadPrompt`."""
        return self._matchers.matcher(constraint)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        """The text of a chat, as the model's template writes it. Raises `BadPrompt`."""
        if self._template is None:
            raise BadPrompt("the model has no chat template: it is no chat model. Give a prompt instead of messages.")
        return self._template.render(messages, rendering)

    def tries(self) -> Tries:
        """The compiler of lists, for `list_support`. Threads may call it."""
        return self._matchers.tries()

    def _checked(self, tokens: Any, known: bool = False) -> Encoded:
        """The tokens, at least one, if all are in the vocabulary, which `known` spares checking; else the error."""
        if isinstance(tokens, BadPrompt):
            return tokens
        if not len(tokens):
            if self._beginning is None:
                return BadPrompt("the prompt is empty, and the model has no token to begin with. Write something.")
            return np.array([self._beginning], np.int32)
        if known:
            return tokens  # type: ignore[no-any-return]
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self.vocabulary:
            wrong = lowest if lowest < 0 else highest
            return BadPrompt(
                f"token {wrong} is not in the model's vocabulary. Use tokens from 0 to {self.vocabulary - 1}."
            )
        return np.ascontiguousarray(tokens, np.int32)


def _array(tokens: Sequence[int]) -> NDArray[Any]:
    try:
        return np.asarray(tokens, np.int64 if tokens else np.int32).ravel()
    except (TypeError, ValueError, OverflowError):
        raise BadPrompt("the tokens of a prompt are no integers. Give token numbers.") from None


ENDS_BEGIN = ("gpt2", "nanogpt")  # families trained with the end token before each text too


def open_language(files: LanguageFiles, shape: Shape) -> Language:
    """Raises `UsageError` if there is no tokenizer, or it cannot be used."""
    if files.bytes:
        ends = shape.end_tokens
        return Language(Bytes(), shape.vocabulary, ends, _first(shape.beginning_token, *ends), _templates(files))
    if files.vocabulary is not None:
        vocabulary = Vocabulary(files.vocabulary, files.separator)
        ends = tuple(dict.fromkeys((*shape.end_tokens, *vocabulary.hidden)))
        beginning = _first(shape.beginning_token, *map(vocabulary.token, (END_OF_TEXT, "\n")))  # as nanoGPT begins
        return Language(vocabulary, shape.vocabulary, ends, beginning)
    if files.gguf is not None:
        codec, settings = open_gguf_tokenizer(files.gguf, shape.family)
    elif files.folder is not None:
        settings = read_settings(files.folder)
        codec = open_subwords(files.folder, shape.family, settings)
    else:
        raise UsageError("the model has no tokenizer. Give its alphabet with --meta, or a folder with tokenizer.json.")
    beginning, end = (
        None if name not in settings.named else codec.tokenizer.token_to_id(settings.named[name])
        for name in ("bos_token", "eos_token")
    )
    # any end token of config.json, generation_config.json and the tokenizer ends an answer
    listed = [*shape.end_tokens, *settings.end_tokens, *([] if end is None else [end])]
    ends = tuple(dict.fromkeys(token for token in listed if token < shape.vocabulary))
    spare = ends if shape.family in ENDS_BEGIN else ()
    template = None if settings.template is None else ChatTemplates(settings)
    return Language(codec, shape.vocabulary, ends, _first(shape.beginning_token, beginning, *spare), template)


def has_chat_template(files: LanguageFiles) -> bool:
    """Whether the model has a chat template. Quicker than `open_language`."""
    return _templates(files) is not None


def _templates(files: LanguageFiles) -> ChatTemplates | None:
    if files.gguf is not None:
        settings = gguf_settings(files.gguf)
    else:
        settings = TokenizerSettings(template=files.template) if files.folder is None else read_settings(files.folder)
    return None if settings.template is None else ChatTemplates(settings)


def _first(*tokens: int | None) -> int | None:
    return next((token for token in tokens if token is not None), None)
