"""From what an answer must match to a grammar of llguidance, within limits (Moskal et al. 2025)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint

LONGEST_SCHEMA = 128 * 1024  # characters of JSON
LONGEST_REGEX = 16 * 1024
LONGEST_GRAMMAR = 64 * 1024
LONGEST_CHOICES = 256 * 1024  # characters of all together
MOST_CHOICES = 10_000
DEEPEST = 64  # levels of a schema
SHOWN = 240  # characters of the library's message
OPTIONS = '%llguidance {"no_forcing": true}\n'  # what is forced may be spelt by any tokens, not by one spelling alone
STUCK = "no token of the model can go on from here"
KINDS = ("json_schema", "regex", "choice", "grammar", "listed")
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Key = tuple[str, str]  # what kind of grammar, and its text: what a cache knows it by


def key_of(constraint: Constraint) -> Key:
    """Raises `BadPrompt` for none or several kinds at once, and for one over the limits."""
    kinds = [name for name in KINDS if getattr(constraint, name) is not None]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "nothing"
        raise BadPrompt(f"a constraint sets {found}. Give exactly one of {', '.join(KINDS)}.")
    if kinds == ["json_schema"]:
        return "schema", _within(_schema(constraint.json_schema), LONGEST_SCHEMA, "JSON schema")
    if kinds == ["regex"]:
        return "regex", _within(constraint.regex, LONGEST_REGEX, "regex")
    if kinds == ["choice"]:
        return "choice", _choice(constraint.choice or ())
    if kinds == ["listed"]:
        raise BadPrompt("a list between tags is no grammar. It is matched in another way.")
    return "grammar", _within(constraint.grammar, LONGEST_GRAMMAR, "grammar")


def grammar_of(key: Key) -> str:
    """The grammar as llguidance reads it. Raises whatever the library raises for a bad one."""
    kind, text = key
    if kind == "schema":
        return f"start: %json {text}\n{OPTIONS}"
    if kind in ("regex", "choice"):
        return f"start: /{regex_to_lark(text)}/\n{OPTIONS}"
    return f"{any_to_lark(text)}\n{OPTIONS}"


def refused(what: str, message: str) -> BadPrompt:
    """The library's complaint, without its inner state and on one line."""
    message = message.split("<state>")[0].replace("<non-verbose/>", "")
    if message.strip() == "NoExtensionBias":  # the library's name for a dead end
        message = STUCK
    own = re.search(r"^error: (.+)$", message, re.MULTILINE)
    text = " ".join((own[1] if own else message).split())
    text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return BadPrompt(f"the {what} of this answer cannot be used: {text.rstrip('.')}. Correct or simplify it.")


def _within(text: Any, longest: int, what: str) -> str:
    if not isinstance(text, str) or not text:
        raise BadPrompt(f"the {what} is no text, or empty. Write one, or leave the constraint out.")
    if len(text) > longest:
        raise BadPrompt(f"the {what} has {len(text)} characters. Give at most {longest}.")
    if "\x00" in text:
        raise BadPrompt(f"the {what} holds a zero byte. Leave it out.")
    return text


def _schema(schema: Any) -> str:
    """`True` asks for JSON of any kind."""
    if _depth(schema) > DEEPEST:
        raise BadPrompt(f"the JSON schema is nested deeper than {DEEPEST} levels. Make it flatter, or use $ref.")
    try:
        return json.dumps({} if schema is True else schema, ensure_ascii=False, default=dict)
    except (TypeError, ValueError) as error:
        raise BadPrompt(f"the JSON schema is not JSON: {error}. Write it with JSON's own types.") from None


def _depth(value: Any) -> int:
    """Levels of objects and lists, counted no further than one beyond the limit."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        inner = [one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list)]
        level = [one for values in inner for one in values]
        depth += bool(inner)
        if not inner:
            break
    return depth


def _choice(choices: tuple[str, ...]) -> str:
    if not choices or not all(isinstance(one, str) for one in choices):
        raise BadPrompt("choice holds no texts. Give at least one.")
    if len(choices) > MOST_CHOICES or sum(map(len, choices)) > LONGEST_CHOICES:
        raise BadPrompt(
            f"choice is too long. Give at most {MOST_CHOICES} texts of {LONGEST_CHOICES} characters in all."
        )
    return "(?:" + "|".join(_literal(one) for one in choices) + ")"


def _literal(text: str) -> str:
    """A regex that matches this text alone."""
    escaped = _META.sub(lambda match: "\\" + match[0], text)
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped)
