"""Prompts and options as a program gives them, as the rows and defaults that `gpuinfer generate` makes of a file and of
flags: so the same prompts have the same names, and the same answers.
"""

from __future__ import annotations

import glob
import json
import os
from collections import deque
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
from pydantic import Field

from gpuinfer.config.options import GivenValue, check
from gpuinfer.errors import UsageError
from gpuinfer.generation import Constraint
from gpuinfer.library.choices import in_python_words
from gpuinfer.serving.openai.model_options import (
    AnswerOptions,
    check_text,
    constraint_of,
    rendering_of,
    sampling_of,
)
from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.requests import PromptDefaults
from gpuinfer.serving.openai.row_files import pieces_of
from gpuinfer.serving.openai.row_forms import ROW_FILES
from gpuinfer.serving.openai.row_names import NamedRow, Namer
from gpuinfer.serving.openai.row_splitter import Piece, Unusable
from gpuinfer.serving.openai.sampling_fields import unmasking_of
from gpuinfer.serving.openai.schema import MOST_SAMPLES

BLOCK_ROWS = 64
INLINE = ("json_schema", "regex", "grammar")  # forms that are no files here
PROMPTS = (
    'Give a text, token ids ([1, 2]), a chat ([{"role": "user", "content": "Hi"}]), a list or an iterator of these, '
    'or a file of them (Path("prompts.jsonl"), Path("prompts.csv"), Path("data/*.parquet")).'
)


OnePrompt = str | Mapping[str, Any] | Sequence[Any]
"""A text, a row, token ids, or the messages of a chat."""
Prompts = str | Mapping[str, Any] | os.PathLike[str] | Iterable[Any]
"""One of those, many, or a file of them; or several files."""


class AnswerArguments(AnswerOptions):
    """The options as keyword arguments."""

    n: int | None = Field(None, ge=1, le=MOST_SAMPLES, description="answers to each prompt")
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63, description="in place of the model's")
    adapter: str | None = Field(None, description="one of the model's; empty: none")


class AnswerKeywords(TypedDict, total=False):
    """How prompts are answered: the flags of `gpuinfer generate`, with underscores. What is not given is as there."""

    max_new_tokens: int  # of each answer, at most [128]
    min_tokens: int  # before which none ends [0]
    temperature: float  # 0 takes the likeliest token [1]
    top_k: int  # draw from so many likeliest tokens [0: all]
    top_p: float  # from the likeliest that make up this share [1]
    min_p: float  # without those less likely than this part of the likeliest [0]
    repetition_penalty: float  # divides logits of tokens that were there [1]
    presence_penalty: float  # off logits of tokens in the answer [0]
    frequency_penalty: float  # the same, for each time [0]
    seed: int  # draw by this number in place of the model's seed
    n: int  # answers to each prompt [1]
    num_samples: int  # the same, as the command calls it
    stop: str | Sequence[str]  # end the answer before one of these texts
    stop_token_ids: Sequence[int]  # end it after one of these
    ignore_eos: bool  # go on past the model's end token
    skip_special_tokens: bool  # leave them out of the texts [True]
    logprobs: int  # of each token, and of so many likeliest ones beside it
    prompt_logprobs: int  # the same of the prompt
    truncate: Literal["left", "right"]  # of a prompt that does not fit, what goes; else it is an error
    json_schema: Mapping[str, Any] | bool | str | Path | type[Any]  # answers fit it: a dict, JSON, pydantic, a file
    regex: str  # answers match this pattern
    choice: Sequence[str]  # answers are one of these
    grammar: str | Path  # answers follow this grammar (Lark or GBNF): its text, or a file
    chat_template_kwargs: Mapping[str, Any] | str  # what else a chat's template reads
    adapter: str  # one of the model's adapters; "": the model itself
    decoder: str  # of diffusion models, and so are those below: which masks a step fills in
    threshold: float
    steps: int
    block_length: int
    cfg_scale: float
    cache: Literal["none", "prefix", "dual", "vicinity", "exact"]
    decoder_options: Mapping[str, Any]


def prompt_defaults(given: Mapping[str, Any], adapter: str | None = None) -> PromptDefaults:
    """What these options say of prompts that say nothing else. Raises `UsageError` for one that is not known, with the
    nearest, and for a value out of range.
    """
    options = {name: value for name, value in given.items() if value is not None}
    if {"n", "num_samples"} <= options.keys():
        raise UsageError("n and num_samples are the same. Give one of them.")
    if not isinstance(own_adapter := options.pop("adapter", None), str | None):
        raise UsageError(f"adapter={own_adapter!r:.60} is no name. Give that of an adapter of this model.")
    forms = {name: options.pop(name) for name in INLINE if name in options and not isinstance(options[name], Path)}
    if "choice" in options and not options["choice"]:
        raise UsageError(f"choice={options['choice']!r} leaves no answer. Give one or more texts, or leave it out.")
    for name in ("stop", "choice", "stop_token_ids"):
        if isinstance(options.get(name), str | int):
            options[name] = [options[name]]
    if isinstance(options.get("chat_template_kwargs"), Mapping):
        options["chat_template_kwargs"] = json.dumps(options["chat_template_kwargs"])
    if isinstance(options.get("decoder_options"), Mapping):
        options["decoder_options"] = dict(options["decoder_options"])
    with in_python_words():
        named = {key: GivenValue(value, f"{key}={value!r:.100}") for key, value in options.items()}
        own = AnswerArguments(**check(AnswerArguments, named, "an answer"))
        inline = [_constraint(name, value) for name, value in forms.items()]
        if len(inline) + len([name for name in ("choice", *INLINE) if name in options]) > 1:
            raise UsageError("json_schema, regex, choice and grammar each say what an answer must be. Give one.")
        sampling = sampling_of(
            own,
            logprobs=own.logprobs,
            prompt_logprobs=own.prompt_logprobs,
            unmasking=unmasking_of(own),
            seed=own.seed,
            keyed=own.seed is not None,  # as a run of this seed
            constraint=inline[0] if inline else constraint_of(own),
        )
        adapter = adapter if own_adapter is None else own_adapter or None
        return PromptDefaults(sampling, rendering_of(own), own.n or own.num_samples, own.truncate, adapter=adapter)


def _constraint(name: str, form: Any) -> Constraint:
    if name != "json_schema":
        if not isinstance(form, str):
            raise UsageError(f"{name}={form!r:.60} is no text. Give the {name} as text.")
        check_text(f"--{name}", form)
        return Constraint(grammar=form) if name == "grammar" else Constraint(regex=form)
    if isinstance(form, str):
        try:
            form = json.loads(form)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f'json_schema is not JSON: {error}. Give a dict, its JSON, or a file: Path("schema.json").'
            ) from error
    if hasattr(form, "model_json_schema"):  # of pydantic
        form = form.model_json_schema()
    if not isinstance(form, Mapping) and form is not True:
        raise UsageError(f"json_schema={form!r:.60} is no schema that an answer can fit. Give a dict, or True.")
    check_text("--json-schema", form)
    return Constraint(json_schema=form if form is True else dict(form))


class PromptReader:
    """The prompts that a caller gives, one after the other, as named rows: each has its prompt, or the error that
    refuses it. `total`: how many there are, as far as that is known. Raises `UsageError` for what holds no prompts.

    Those of a list or a file are parsed in blocks, which is quicker; of an iterator each when it is asked for.
    """

    def __init__(self, given: Any, defaults: PromptDefaults, column: str | None = None) -> None:
        """`column`: which column of a table, or field of a file's objects, holds the prompts."""
        self._reader, self._namer = PromptRowReader(defaults, cure=", or put it under `metadata`"), Namer({})
        self.total: int | None
        if not isinstance(column, str | None):
            raise UsageError(f"prompt_column={column!r:.60} is no name of a column. Give a text.")
        self._pieces, self.total, is_iterator = _pieces_in(given, column)
        self._block = 1 if is_iterator else BLOCK_ROWS
        self.may_block = self.total is None  # an iterator of the caller's, or a file: the next may take its time
        self._rows: deque[NamedRow] = deque()

    def __iter__(self) -> Iterator[NamedRow]:
        return self

    def __next__(self) -> NamedRow:
        if not self._rows:
            self._rows.extend(self._namer.name([self._reader.read(one) for one in islice(self._pieces, self._block)]))
        if not self._rows:
            raise StopIteration
        return self._rows.popleft()

    def close(self) -> None:
        if (close := getattr(self._pieces, "close", None)) is not None:
            close()


def _pieces_in(given: Any, column: str | None) -> tuple[Iterator[Piece], int | None, bool]:
    """The rows, how many there are, and whether they come from an iterator of the caller's."""
    files = _files_in(given)
    if files:
        return _pieces_of_files(files, column), None, False
    if column is not None:
        raise UsageError(f"prompt_column={column!r} names a column of a file, and this is none. Leave it out.")
    if hasattr(given, "tolist"):  # an array, or a tensor
        given = given.tolist()
    if isinstance(given, str | Mapping) or _is_one_prompt(given):
        return iter([_piece(1, given)]), 1, False
    if isinstance(given, AsyncIterable):
        raise UsageError("prompts come from an asynchronous iterator. Collect them first, or ask `answer` for each.")
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise UsageError(f"prompts={given!r:.60} is nothing to answer. {PROMPTS}")
    total = len(given) if isinstance(given, Sequence) else None
    return (_piece(number, one) for number, one in enumerate(given, 1)), total, total is None


def _files_in(prompts: Any) -> list[str]:
    """The paths, where these are files."""
    if isinstance(prompts, str) and prompts.lower().endswith(ROW_FILES) and len(prompts.split()) == 1:
        if not Path(prompts).is_file() and not glob.has_magic(prompts):
            raise UsageError(
                f"there is no file {prompts}. Name one that is there; if this is a prompt, put it into a list: "
                f"[{prompts!r}]."
            )
        return [prompts]
    several = prompts if isinstance(prompts, list | tuple) else [prompts]
    return [os.fspath(one) for one in several] if all(isinstance(one, os.PathLike) for one in several) else []


def _is_one_prompt(given: Any) -> bool:
    """Token ids, or a chat."""
    if not isinstance(given, list | tuple) or not given:
        return False
    return isinstance(given[0], int) or (isinstance(given[0], Mapping) and "role" in given[0])


def _piece(number: int, one: Any) -> Piece:
    """A prompt as a row of a file has it."""
    if hasattr(one, "tolist"):
        one = one.tolist()
    if isinstance(one, Mapping) and "role" in one and "messages" not in one:
        return number, Unusable("a message is no prompt. Put the messages of a chat into a list.", b"message")
    if isinstance(one, list | tuple):
        name = "messages" if one and isinstance(one[0], Mapping) else "prompt_token_ids"
        one = {name: list(one)}
    elif not isinstance(one, str | Mapping):
        return number, Unusable(f"{one!r:.60} is no prompt. Give a text, token ids, or the messages of a chat.", b"")
    try:
        return number, msgspec.json.encode(one, enc_hook=_plain_value)
    except UnicodeEncodeError:
        return number, Unusable("the text has half of a character (\\ud800 to \\udfff). Write whole ones.", b"half")
    except (TypeError, ValueError, RecursionError) as error:
        return number, Unusable(f"the prompt cannot be read ({error}). Write it with plain values.", b"odd")


def _plain_value(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is in it")


def _pieces_of_files(files: Sequence[str], column: str | None) -> Iterator[Piece]:
    for file in files:
        with in_python_words():
            yield from pieces_of(Path(file), f"prompts {file}", column)
