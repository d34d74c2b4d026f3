"""What lies beside a tokenizer: its settings, the names of its special tokens, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, WITH_TOOLS = "default", "tool_use"  # templates by the names that transformers has for them
LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class TokenizerSettings:
    """tokenizer_config.json, special_tokens_map.json, generation_config.json and the template files of one folder."""

    config: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)  # "bos_token" → "<s>", …: what a template may print
    special: tuple[str, ...] = ()  # all special tokens that are spoken of
    end_tokens: tuple[int, ...] = ()  # of generation_config.json
    template: str | None = None
    tool_template: str | None = None  # for chats with tools, where there is one of its own


def read_settings(folder: Path) -> TokenizerSettings:
    """Raises `UsageError` for a file that is not what its name says. Absent files are no error."""
    config = read_object(folder / "tokenizer_config.json")
    merged = {**read_object(folder / "special_tokens_map.json"), **config}
    named = {name: text for name in NAMED if (text := _content(merged.get(name))) is not None}
    listed = [text for name in LISTS for item in _listed(merged.get(name)) if (text := _content(item)) is not None]
    return TokenizerSettings(
        config=config,
        named=named,
        special=tuple(dict.fromkeys([*named.values(), *listed])),
        end_tokens=_ids(read_object(folder / "generation_config.json").get("eos_token_id")),
        template=_template(folder, config, DEFAULT),
        tool_template=_template(folder, config, WITH_TOOLS),
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} when there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}. Copy it again from where it came.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not hold a JSON object. Copy it again from where it came.")
    return value


def _content(token: Any) -> str | None:
    """A token is written as a text or, with its switches, as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0)


def _template(folder: Path, config: Mapping[str, Any], name: str) -> str | None:
    """The template of this name. A file of its own goes before the settings, as transformers has it."""
    file = "chat_template.jinja" if name == DEFAULT else f"additional_chat_templates/{name}.jinja"
    if (own := folder / file).is_file():
        try:
            return own.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{own} cannot be read: {error}. Copy it again from where it came.") from None
    for settings in (config, read_object(folder / "chat_template.json")):
        if (template := _named(settings.get("chat_template"), name)) is not None:
            return template
    return None


def _named(templates: Any, name: str) -> str | None:
    """Of several templates the one of this name; the only one there is is the default."""
    if isinstance(templates, list):
        pairs = [one for one in templates if isinstance(one, Mapping)]
        templates = {one.get("name"): one.get("template") for one in pairs}
    if isinstance(templates, Mapping):
        only = next(iter(templates.values())) if len(templates) == 1 and name == DEFAULT else None
        found = templates.get(name, only)
    else:
        found = templates if name == DEFAULT else None
    return found if isinstance(found, str) else None
