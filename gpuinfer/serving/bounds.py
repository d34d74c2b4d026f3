"""What one request may ask for at most, checked before anything is done for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.generation import Constraint, Prompt
from gpuinfer.openai.requests import BadRequest

MOST_PROMPTS = 256  # in one request for completions
MOST_PATTERN = 32 << 10  # characters of a regular expression
MOST_GRAMMAR = 128 << 10  # of a grammar
MOST_NODES = 20_000  # values in a JSON schema
MOST_DEPTH = 64  # of its nesting
MOST_VALUE = 1_000  # characters of a template's argument
TEMPLATE_ARGUMENTS = frozenset(
    ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking", "date_string", "today")
)
"""What a client may say to a chat template: models read these, and anything else means whatever a template makes of it.
"""


def check_request(prompt: Prompt, widest: int) -> None:
    """Raises `BadRequest`, which names the field. `widest`: the most rows of one request."""
    if prompt.samples > widest:
        raise BadRequest(
            f"`n` is {prompt.samples}, and {widest} answers at once are the most here. Ask for fewer.", "n"
        )
    _check_template(prompt.rendering.variables)
    if (wanted := prompt.sampling.constraint) is not None:
        _check_constraint(wanted)


def _check_template(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in TEMPLATE_ARGUMENTS:
            known = ", ".join(sorted(TEMPLATE_ARGUMENTS))
            why = f"`{name[:60]}` is no argument of a chat template that may be given here. Choose from {known}."
            raise BadRequest(why, "chat_template_kwargs")
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > MOST_VALUE:
            why = (
                f"`{name}` is no plain value of at most {MOST_VALUE} characters. Give a text, a number, true or false."
            )
            raise BadRequest(why, "chat_template_kwargs")


def _check_constraint(wanted: Constraint) -> None:
    if wanted.regex is not None and len(wanted.regex) > MOST_PATTERN:
        raise BadRequest(f"a pattern of {len(wanted.regex):,} characters; {MOST_PATTERN:,} are the most. Shorten it.")
    if wanted.grammar is not None and len(wanted.grammar) > MOST_GRAMMAR:
        raise BadRequest(f"a grammar of {len(wanted.grammar):,} characters; {MOST_GRAMMAR:,} are the most. Shorten it.")
    if isinstance(wanted.json_schema, Mapping):
        _check_schema(wanted.json_schema)


def _check_schema(schema: Any) -> None:
    """Level by level, so that no schema is too deep for the check itself."""
    level, seen = [schema], 0
    for _ in range(MOST_DEPTH):
        seen += len(level)
        if seen > MOST_NODES:
            raise BadRequest(f"a JSON schema of more than {MOST_NODES:,} values. Make it smaller.", "response_format")
        level = [one for value in level for one in _inside(value)]
        if not level:
            return
    raise BadRequest(f"a JSON schema nested more than {MOST_DEPTH} deep. Make it flatter.", "response_format")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
