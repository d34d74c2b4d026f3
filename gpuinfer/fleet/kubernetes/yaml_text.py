"""Manifests as YAML 1.1, which kubectl reads: mappings, lists, texts, whole numbers and truth values in block style.

Of YAML only what a manifest needs is written, so that the command needs no package for it, and each document may begin
with comments, which no common library writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_/.=-]*(:[A-Za-z0-9_/.=-]+)*")
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # which YAML 1.1 reads as no text
# What may not stand in a YAML file as it is, and what JSON leaves as it is (YAML 1.1, 5.1).
UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def yaml_text(documents: Sequence[Mapping[str, Any]], comments: Sequence[str] = ()) -> str:
    """The documents of one file. `comments`: lines at its beginning.

    A text must be encodable as UTF-8. Raises `TypeError` for a value of another type than those above.
    """
    head = "".join(f"# {line}\n" for line in comments)
    return head + "---\n".join("\n".join(_mapping(one, "") or ["{}"]) + "\n" for one in documents)


def _mapping(mapping: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in mapping.items():
        if isinstance(value, (Mapping, list)) and value:
            lines.append(f"{indent}{_text(key)}:")
            lines += _mapping(value, indent + "  ") if isinstance(value, Mapping) else _list(value, indent + "  ")
        else:
            lines.append(f"{indent}{_text(key)}: {_scalar(value)}")
    return lines


def _list(values: Sequence[Any], indent: str) -> list[str]:
    lines = []
    for value in values:
        if isinstance(value, (Mapping, list)) and value:
            first, *rest = _mapping(value, indent + "  ") if isinstance(value, Mapping) else _list(value, indent + "  ")
            lines += [f"{indent}- {first.lstrip(' ')}", *rest]
        else:
            lines.append(f"{indent}- {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (Mapping, list)):  # an empty one
        return "{}" if isinstance(value, Mapping) else "[]"
    raise TypeError(f"{value!r} has no place in a manifest")


def _text(text: str) -> str:
    """Plain where it can be read as nothing else, otherwise as JSON writes it."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
