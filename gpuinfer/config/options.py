"""Values for typed options: text into what a field takes, complaints into sentences that end with a cure, and one
option changed in a command line.
"""

from __future__ import annotations

import collections.abc
import json
import re
import shlex
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gpuinfer.config.foreign_names import option_hint
from gpuinfer.errors import UsageError, nearest
from gpuinfer.host import error_text

FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
NUMBER = re.compile(r"([+-]?[\d_]*\.?\d+(?:[eE][+-]?\d+)?)\s*([A-Za-zµ]*)")

LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Set)

SHOWN = 3  # problems in one message
VARIABLE = "GPUINFER_"  # of the environment: there an empty value is as good as none

PROBLEMS = {
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "string_type": "is not text",
    "literal_error": "is not one of the choices",
    "string_pattern_mismatch": "is not of the right form",
    "greater_than_equal": "is less than {ge}",
    "greater_than": "is not more than {gt}",
    "less_than_equal": "is more than {le}",
    "less_than": "is not less than {lt}",
}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value, and where it was given: `--games`, `GPUINFER_DEVICE`, `gpuinfer.toml [selfplay] games`."""

    value: Any
    origin: str


class GivenValues(list[str]):
    """The texts of a flag that was given several times. A field that takes no list takes the last."""


def several(given: Iterable[tuple[str, GivenValue]]) -> dict[str, GivenValue]:
    """Values by key, in the order in which they were given; those of one key become `Several`."""
    found: dict[str, GivenValue] = {}
    for key, one in given:
        before = found.get(key)
        if before is None:
            found[key] = one
        else:
            earlier = before.value if isinstance(before.value, GivenValues) else [before.value]
            found[key] = GivenValue(GivenValues([*earlier, one.value]), one.origin)
    return found


def missing_options(model: type[BaseModel], given: Iterable[str]) -> list[str]:
    """The options without a default that were not given."""
    return [key for key, field in fields_of(model).items() if field.is_required() and key not in set(given)]


def check(
    model: type[BaseModel], given: Mapping[str, GivenValue], owner: str, *, complete: bool = True
) -> dict[str, Any]:
    """The given values as `model` takes them, ready for `model(**values)`.

    Raises `UsageError` for unknown, ill-typed and refused values: one line each, with origin and cure. So does, unless
    `complete` is False, an option without a default that is not given.
    """
    fields = fields_of(model)
    for key, one in given.items():
        if key not in fields:
            known = list(fields)
            hint = option_hint(key, known)
            between = f" {hint}" if hint else ""
            raise UsageError(
                f"{one.origin}: {owner} has no option '{key}'.{between} Options: {', '.join(sorted(known)) or 'none'}."
            )
        if (
            (one.value == "" or (isinstance(one.value, GivenValues) and one.value == [""]))
            and accepts(fields[key].annotation, type(None))
            and not one.origin.startswith(VARIABLE)
        ):
            raise UsageError(f"{one.origin} is empty, which sets nothing. Give it a value, or leave it out.")
    values = {key: _natural_of(fields[key], one.value) for key, one in given.items()}
    try:
        refuse_idle_flags(model, given, model(**values))
    except ValidationError as error:
        details = [one for one in error.errors(include_url=False) if complete or one["type"] != "missing"]
        if details:
            raise UsageError(explain(details, given, model, owner)) from error
    return values


def explain(
    details: Iterable[ErrorDetails], given: Mapping[str, GivenValue], model: type[BaseModel], owner: str
) -> str:
    """At most three lines: what was given and where, what is wrong with it, what is allowed."""
    lines = [_explain_one(detail, given, model, owner) for detail in _of_each_value(list(details))]
    more = len(lines) - SHOWN
    return "\n".join(lines[:SHOWN] if more < 1 else [*lines[: SHOWN - 1], f"And {more + 1} more of this kind."])


def _of_each_value(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """A number or a text is complained about twice, as no such number and as no such text: as a number will do."""
    of_text = ("literal_error", "string_type")
    typed = {str(one["loc"][0]) for one in details if one["loc"] and one["type"] not in of_text}
    return [one for one in details if one["type"] not in of_text or str(one["loc"][0]) not in typed]


def natural(value: Any, annotation: Any) -> Any:
    """Text such as `4k`, `64Ki`, `5ms` or `none` as the value that a field of this annotation takes.

    Sizes become numbers, durations seconds; `a,b`, JSON such as `["a", "b"]` and a flag given several times a list.
    What is no such text stays as it is.
    """
    members = list(_members(annotation))
    lists = [member for member in members if takes_list(member)]
    if isinstance(value, GivenValues):
        return [part for text in value for part in _parts(text, lists)] if lists else natural(value[-1], annotation)
    if not isinstance(value, str):
        return value
    if type(None) in members and value.strip().lower() in ("none", "") and value not in choices(annotation):
        return None  # where `none` is one of the words to choose from, it is no lack of a value
    if lists:
        return _parts(value, lists)
    if value.lstrip().startswith("{") and any(_kind(member) in (dict, collections.abc.Mapping) for member in members):
        return _json(value)
    if {int, float} & set(members) and not {str, bool} & set(members):
        return _number(value)
    return value


def takes_list(annotation: Any) -> bool:
    """Whether a field of this annotation takes several values."""
    return any(_kind(member) in LISTS for member in _members(annotation))


def repeatable(field: FieldInfo) -> bool:
    """Whether each value of a list has a flag of its own, since a value may hold a comma."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("repeatable"))


def out_of_place(model: type[BaseModel], given: Mapping[str, Any]) -> set[str]:
    """Of the options that are given, those that go with other values of another option: `only_with` in the field's
    `json_schema_extra` maps that one's name to the values, or to an example where any value will do.
    """
    fields = fields_of(model)
    return {key for key in given.keys() & fields.keys() if _lacking(fields, key, given) is not None}


def _lacking(fields: Mapping[str, FieldInfo], key: str, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The other option that this one goes with, and a fitting value, where it has none."""
    extra = fields[key].json_schema_extra
    wanted = extra.get("only_with") if isinstance(extra, dict) else None
    for other, values in wanted.items() if isinstance(wanted, dict) else ():
        value = given.get(other, fields[other].default)
        if isinstance(values, list) and value not in values:
            return other, str(values[0])
        if isinstance(values, str) and value is None:
            return other, values
    return None


def refuse_idle_flags(model: type[BaseModel], given: Mapping[str, GivenValue], read: BaseModel) -> None:
    """Raises `UsageError` for a flag that does nothing without another. A settings file or a variable may name such an
    option: it may be meant for other runs.
    """
    fields = fields_of(model)
    values = {field.alias or name: getattr(read, name) for name, field in model.model_fields.items()}
    for key, one in given.items():
        lacking = _lacking(fields, key, values) if one.origin.startswith("-") else None
        if lacking is not None:
            before, equals = (one.origin[:3], "=") if one.origin.startswith(("-B", "-S")) else ("--", " ")
            flag = f"{before}{lacking[0].replace('_', '-') if before == '--' else lacking[0]}"
            raise UsageError(
                f"{one.origin} has no effect without {flag}. Add {flag}{equals}{lacking[1]}, or leave it out."
            )


def _natural_of(field: FieldInfo, value: Any) -> Any:
    return list(value) if isinstance(value, GivenValues) and repeatable(field) else natural(value, field.annotation)


def _parts(text: str, lists: Iterable[Any]) -> list[Any]:
    """The elements of one text, each as the list's own elements are written."""
    kinds = [inner for member in lists for inner in typing.get_args(member) if inner is not Ellipsis]
    element = kinds[0] if len(set(kinds)) == 1 else Any
    read = _json(text) if text.lstrip().startswith("[") else None
    if isinstance(read, list):
        return [natural(one, element) for one in read]
    return [natural(part.strip(), element) for part in text.split(",") if part.strip()]


def _json(text: str) -> Any:
    """What the text says as JSON; the text itself when it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _kind(annotation: Any) -> Any:
    """`list` for `list[str]` and for `list`."""
    return typing.get_origin(annotation) or annotation


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields by the names under which their values are given."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def choices(annotation: Any) -> list[Any]:
    """The values of a Literal, alone or in a union; empty for anything else."""
    return [
        value
        for member in _members(annotation)
        if typing.get_origin(member) is Literal
        for value in typing.get_args(member)
    ]


def accepts(annotation: Any, kind: type) -> bool:
    """Whether a field of this annotation takes that type, alone or in a union."""
    return any(member is kind for member in _members(annotation))


def default_text(field: FieldInfo) -> str | None:
    """The default as a person would type it; None when there is none, or nothing to type."""
    default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return None
    if isinstance(default, bool):
        return "true" if default else "false"
    several = isinstance(default, (list, tuple, set, frozenset))
    return (",".join(map(error_text.safe_str, default)) if several else error_text.safe_str(default)) or None


def _members(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    elif origin is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    else:
        yield annotation


def _number(text: str) -> Any:
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return text
    digits, unit = match.groups()
    factor = FACTORS.get(unit, SECONDS.get(unit))
    if factor is None or not unit:
        return text
    number = float(digits.replace("_", "")) * factor
    return int(number) if number.is_integer() else number


def _explain_one(detail: ErrorDetails, given: Mapping[str, GivenValue], model: type[BaseModel], owner: str) -> str:
    if not detail["loc"]:  # a rule over several options
        return f"{owner}: {_own_words(detail)}"
    key = str(detail["loc"][0])
    field = fields_of(model).get(key)
    if key not in given:
        return f"{owner} needs '{key}'. Give it on the command line or in gpuinfer.toml."
    origin, value = given[key].origin, given[key].value
    if detail["type"] not in PROBLEMS:
        return f"{origin}: {value!r}: {_own_words(detail)}"
    no_number = str(detail["input"]).strip().lower().lstrip("+-") == "nan"  # which is in no bounds
    words = choices(field.annotation) if field else []
    kind = "literal_error" if detail["type"].startswith("bool") and words else detail["type"]
    problem = "is not a number" if no_number else PROBLEMS[kind].format(**_bounds(detail))
    return f"{origin}: {value!r} {problem}. {_cure(detail, value, field)}"


def _own_words(detail: ErrorDetails) -> str:
    """The message of the plugin's validator, or else pydantic's."""
    message = error_text.safe_str(detail.get("ctx", {}).get("error", detail["msg"])).rstrip(".")
    return f"{message}."


def _cure(detail: ErrorDetails, value: Any, field: FieldInfo | None) -> str:
    allowed = list(map(str, choices(field.annotation))) if field else []
    truth = detail["type"].startswith("bool")
    near = nearest(str(value), allowed)
    hint = f"Did you mean '{near}'? " if near else ""
    if detail["type"] == "literal_error" or (truth and allowed):
        allowed = ["true", "false", *allowed] if truth else allowed
        return f"{hint}Choose from {', '.join(allowed)}."
    words = "".join(f", or {one}" for one in allowed)  # beside a number
    bounds = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}
    for bound, limit in bounds.items():
        if bound in _bounds(detail):
            return f"{hint}Give {limit.format(_bounds(detail)[bound])}{words}."
    if truth:
        return "Give true or false."
    example = default_text(field) if field else None
    nouns = {"int": "a whole number", "float": "a number", "finite": "a finite number", "string_type": "text"}
    fitting = (noun for start, noun in nouns.items() if detail["type"].startswith(start))
    what = next(fitting, (field.description if field else None) or "another value")
    return f"{hint}Give {what}{words}" + (f" (default: {example})." if example and not words else ".")


def _bounds(detail: ErrorDetails) -> dict[str, str]:
    """The limits that the error names, as people write numbers."""
    return {
        name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in detail.get("ctx", {}).items()
    }


OptionFlag = Literal["-B", "-S", "-L", "--"]
"""An option of the backend, of the strategy, of the launcher, of the workload or of every command."""


@dataclass(frozen=True, slots=True)
class OptionChange:
    """`-B max_rows=512`, `-S max_wait=0` or `--workers 4`, by the option's name in the settings."""

    flag: OptionFlag
    name: str
    value: int | float | str
    without: Sequence[str] = ()  # options of the same plugin that go with the old value alone: they are left out

    @property
    def words(self) -> list[str]:
        """As they stand on a command line."""
        if self.flag == "--":
            return [f"--{self.name.replace('_', '-')}", f"{self.value}"]
        return [self.flag, f"{self.name}={self.value}"]

    def plain(self) -> dict[str, Any]:
        """Its fields, without those that say nothing: `Change(**plain)` is the same."""
        found = asdict(self)
        without = {"without": list(found.pop("without"))}
        return {**found, **without} if self.without else found

    def in_command(self, command: str) -> str:
        """The command with this change, in the place of what it gave the option before."""
        return shlex.join([*self._without(shlex.split(command)), *self.words])

    def _without(self, words: Sequence[str]) -> Iterator[str]:
        skip = False
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if skip:
                skip = False
            elif self._sets(word, after):
                skip = "=" not in word
            else:
                yield word

    def _sets(self, word: str, after: str) -> bool:
        """Whether this word, with the one after it, gives the option a value."""
        if self.flag == "--":
            return word.partition("=")[0] == self.words[0]
        named = after.partition("=")[0].replace("-", "_")
        return word == self.flag and named in (self.name, *self.without)
