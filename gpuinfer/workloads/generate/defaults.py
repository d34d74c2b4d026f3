"""What the flags say on how answers are drawn, for rows that say nothing else."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from gpuinfer.api import ModelSpec
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Constraint, Rendering, Sampling
from gpuinfer.workloads.generate.options import GenerateOptions

TEST_TOKENS = 16
FLAGS = ("json_schema", "regex", "choice", "grammar")
MOST_FILE = 1 << 20  # bytes of a schema or a grammar

log = logging.getLogger(__name__)


def sampling(own: GenerateOptions) -> Sampling:
    """What the flags say on how an answer is drawn. Raises `UsageError`."""
    if own.min_tokens > own.max_new_tokens:
        raise UsageError(f"--min-tokens {own.min_tokens} is more than --max-new-tokens {own.max_new_tokens}. Lower it.")
    if "" in own.stop:
        raise UsageError("--stop has an empty text, which would end every answer. Leave it out.")
    same = ("min_tokens", "temperature", "top_p", "min_p", "ignore_eos", "skip_special_tokens")
    others = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs")
    return Sampling(
        max_tokens=min(own.max_new_tokens, TEST_TOKENS) if own.test else own.max_new_tokens,
        top_k=max(0, own.top_k),
        stop=tuple(own.stop),
        stop_token_ids=tuple(own.stop_token_ids),
        constraint=constraint(own),
        **{name: getattr(own, name) for name in (*same, *others)},
    )


def rendering(own: GenerateOptions) -> Rendering:
    """What the flags say on how chats are written out. Raises `UsageError`."""
    if own.chat_template_kwargs is None:
        return Rendering()
    given, example = own.chat_template_kwargs, "--chat-template-kwargs '{\"enable_thinking\": false}'"
    try:
        variables: Any = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-kwargs {given} is not JSON: {error}. Write {example}.") from error
    if not isinstance(variables, dict) or "messages" in variables:
        raise UsageError(f"--chat-template-kwargs {given} is no JSON object of settings. Write {example}.")
    return Rendering(variables=variables)


def constraint(own: GenerateOptions) -> Constraint | None:
    """The form that the flags demand of every answer. Raises `UsageError`."""
    given = [name for name in FLAGS if getattr(own, name) not in (None, [])]
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags} each say what an answer must be. Give one of them.")
    if own.json_schema:
        return Constraint(json_schema=_schema(own.json_schema))
    if own.grammar:
        return Constraint(grammar=_text(own.grammar, "--grammar"))
    if own.choice:
        return Constraint(choice=tuple(own.choice))
    return None if own.regex is None else Constraint(regex=own.regex)


def check(spec: ModelSpec, wanted: Sampling) -> None:
    """Tries what the flags ask of every answer with the model, so that a mistake is told once and not for each row.

    Takes seconds at most. Raises `UsageError` for what cannot be. Of a model that only its backend can read nothing is
    known yet.
    """
    if not (wanted.constraint or wanted.stop_token_ids):  # the rest has its limits whatever the model
        return
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.language import open_language
    from gpuinfer.text.sampling.slots import check_sampling

    try:
        checkpoint = open_checkpoint(spec)
        language = open_language(checkpoint.language_files(), checkpoint.shape)
    except UsageError as error:
        log.info("the flags are not checked for %s: %s", spec.name, error)
        return
    name = "stop_token_ids"
    try:
        check_sampling(wanted, language.vocabulary)
        if wanted.constraint is not None:
            (name,) = [one for one in FLAGS if getattr(wanted.constraint, one) is not None]
            language.matcher(wanted.constraint)
    except BadPrompt as error:
        raise UsageError(f"--{name.replace('_', '-')}: {error}") from error


def _schema(path: Path) -> dict[str, Any] | bool:
    try:
        schema: Any = json.loads(_text(path, "--json-schema"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {path} is not JSON: {error}. Correct it.") from error
    if not isinstance(schema, dict) and schema is not True:
        raise UsageError(
            f"--json-schema {path} is no JSON schema that an answer can fit: {json.dumps(schema)[:40]}. Give an object."
        )
    return schema


def _text(path: Path, flag: str) -> str:
    try:
        if path.stat().st_size > MOST_FILE:
            raise UsageError(f"{flag} {path} has more than {MOST_FILE:,} bytes. Give a smaller one.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} cannot be read: {error}. Give a readable file in UTF-8.") from error
