"""Flags: those that every workload has, and those made from a plugin's typed options.

Command lines as people would type them, from the values of flags.
"""

from __future__ import annotations

import inspect
import itertools
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpuinfer.api import Workload
from gpuinfer.config import options, registry, settings
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import PluginError, UsageError

EVERYWHERE = "Everywhere"  # the help panel of the common flags

METAVARS = {
    "backend": "NAME",
    "fallback": "NAME",
    "strategy": "NAME",
    "device": "NAME",
    "dtype": "NAME",
    "seed": "N",
    "json": "FILE|-",
    "trace": "FILE",
    "profile": "DIR",
    "profile_seconds": "S",
    "track": "TARGET",
    "live": "",
    "roofline": "",
    "trial": "",
    "patience": "S",
    "give_up": "S",
    "max_failures": "SHARE",
    "max_queue_rows": "N",
    "launcher": "NAME",
    "nodes_min": "N",
    "deadline": "S",
}
"""The common settings that are flags, and what stands for the value in the help."""

OPTIONS_AFTER = {
    "strategy": (("backend", "backends"), ("strategy", "strategies")),
    "launcher": (("launcher", "launchers"),),
}
"""The common flags after which options of plugins stand, by their kinds."""

Parameters = dict[str, inspect.Parameter]


def common_flags(max_failures: float = Workload.max_failures) -> Parameters:
    """The flags of every workload, by the setting that they set. `max_failures` is what a workload has by itself."""
    fields = {field.alias or name: field for name, field in settings.Common.model_fields.items()}
    offered = {
        "backend": _names("backends"),
        "fallback": _names("backends"),
        "strategy": _names("strategies"),
        "device": _from("auto", "all", "cpu", "cuda"),
        "dtype": _from(*map(str, options.choices(fields["dtype"].annotation))),
        "track": _from("tensorboard=", "wandb", "mlflow"),
        "launcher": _names("launchers"),
    }
    found: Parameters = {}
    for name, metavar in METAVARS.items():
        field = fields[name]
        about, _, unset = (field.description or "").partition("; none: ")  # what no value means is its default
        default = f"{max_failures:g}" if name == "max_failures" else unset or options.default_text(field)
        is_switch, several = options.accepts(field.annotation, bool), options.takes_list(field.annotation)
        text = _help(f"{about[:1].upper()}{about[1:]}{'; repeatable' if several else ''}.", default)
        found[name] = _parameter(
            name,
            bool | None if is_switch else list[str] | None if several else str | None,  # settings judge a text
            [f"{flag(name)}/--no-{flag(name)[2:]}" if is_switch else flag(name)],
            text,
            metavar=metavar,
            panel=EVERYWHERE,
            **({} if is_switch else {"autocompletion": offered.get(name)}),
        )
        for kind, plural in OPTIONS_AFTER.get(name, ()):
            key, short = f"{kind}_options", SHORTS[f"{kind}_options"]
            text, complete = f"Option of the {kind}; repeatable.", _keys(plural)
            found[key] = _parameter(
                key,
                list[str] | None,
                [short],
                text,
                metavar="KEY=VALUE",
                autocompletion=complete,
                panel=EVERYWHERE,
            )
    quiet = "No progress: only the result, and errors."
    verbose = "Say more; -vv shows tracebacks."
    config = _help("Settings file.", "./gpuinfer.toml, if any")
    return {
        **found,
        "quiet": _parameter("quiet", bool | None, ["--quiet"], quiet, panel=EVERYWHERE),
        "verbose": _parameter("verbose", int, ["--verbose", "-v"], verbose, count=True, panel=EVERYWHERE),
        "config": _parameter("config", Path | None, ["--config"], config, metavar="FILE", panel=EVERYWHERE),
    }


def of(model: type[BaseModel], owner: str) -> Parameters:
    """One flag for each option of a workload. Raises `PluginError` for an option named like a common flag."""
    taken = set(common_flags())
    for name in options.fields_of(model):
        if name in taken:
            raise PluginError(f"{owner} has an option '{name}', which is a flag of every command. Rename the option.")
    return {name: _of_field(name, field) for name, field in options.fields_of(model).items()}


def command(
    name: str, own: Parameters, shared: Collection[str], text: str, execute: Callable[[Mapping[str, Any]], int]
) -> typer.Typer:
    """A command of ours: flags of its own, and these of the common ones. `execute` gets all their values, and gives the
    exit code.
    """

    def call(**values: Any) -> None:
        raise typer.Exit(execute(values))

    known = common_flags()
    return app(name, {**own, **{key: one for key, one in known.items() if key in shared}}, text, call)


def app(name: str, parameters: Parameters, text: str, call: Callable[..., None]) -> typer.Typer:
    """A command of these flags, which calls `call` with their values (None: not given)."""
    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {key: parameter.annotation for key, parameter in parameters.items()}
    made = typer.Typer(add_completion=False, rich_markup_mode="rich")
    made.command(name, help=escape_markup(text), context_settings={"help_option_names": ["-h", "--help"]})(call)
    return made


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_pairs(given: list[str], short: str, table: str) -> dict[str, GivenValue]:
    """`key=value` words as settings of a plugin's table, such as `backends.inprocess`; a key that is there often has
    all its values. Raises `UsageError`.
    """
    pairs = []
    for word in given:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise UsageError(f"{short} {word}: not of the form key=value. Write {short} {key or 'key'}=VALUE.")
        key = key.strip().replace("-", "_")
        pairs.append((f"{table}.{key}", GivenValue(value, f"{short} {key}")))
    return options.several(pairs)


def _of_field(name: str, field: FieldInfo) -> inspect.Parameter:
    text = _help(field.description or "", options.default_text(field))
    if options.accepts(field.annotation, bool):
        return _parameter(name, bool | None, [f"{flag(name)}/--no-{flag(name)[2:]}"], text)
    allowed = [str(choice) for choice in options.choices(field.annotation)]
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    kind = extra.get("kind")  # of plugins, such as "games", whose names the option takes
    known = extra.get("names")  # what it takes beside files and names of people's own: a shell offers them
    offered = [str(name) for name in known] if isinstance(known, list) else allowed
    complete = _names(str(kind)) if kind else _from(*offered) if offered else None
    if short := extra.get("short"):
        return words(name, str(short), "KEY=VALUE", text)
    if options.takes_list(field.annotation):  # `--names a,b`, or the flag once for each
        return _parameter(name, list[str] | None, [flag(name)], text, metavar=_metavar(field, allowed))
    return _parameter(name, str | None, [flag(name)], text, metavar=_metavar(field, allowed), autocompletion=complete)


def _metavar(field: FieldInfo, allowed: list[str]) -> str:
    names = {int: "N", float: "X", Path: "PATH"}
    other = [name for kind, name in names.items() if options.accepts(field.annotation, kind)][:1]
    return "|".join([*allowed, *other]) or "TEXT"


def words(name: str, short: str, metavar: str, text: str, kind: str | None = None) -> inspect.Parameter:
    """A flag of one command that may be repeated. `kind`: of the plugins whose options it takes."""
    complete = None if kind is None else _keys(kind)
    return _parameter(name, list[str] | None, [short], text, metavar=metavar, autocompletion=complete)


def _parameter(
    name: str, annotation: Any, declarations: list[str], text: str, *, panel: str | None = None, **more: Any
) -> inspect.Parameter:
    """What is not given stays None (0 when counted), so that the environment and the file can speak."""
    default = 0 if more.get("count") else None
    more.setdefault("metavar", "")
    option = typer.Option(default, *declarations, help=text, show_default=False, rich_help_panel=panel, **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _help(text: str, default: str | None) -> str:
    shown = f"{text} [default: {default}]" if default is not None else text
    return escape_markup(shown.strip())


def escape_markup(text: str) -> str:
    """For Typer, which would take `[onnx]` for markup, and leave it out."""
    return text.replace("[", r"\[")


def _from(*values: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def _names(kind: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in registry.names(kind) if name.startswith(incomplete)]


DEFAULTS = {"backends": "inprocess", "strategies": "dynamic", "launchers": "local"}


def _keys(kind: str) -> Callable[[typer.Context, str], list[str]]:
    """Completes `key=` from the options of the plugin that the line names."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        name = ctx.params.get(registry.KINDS[kind]) or DEFAULTS[kind]
        try:
            keys = options.fields_of(registry.load(kind, name).Options)
        except UsageError:
            return []
        return [f"{key}=" for key in keys if key.startswith(incomplete)]

    return complete


SHORTS = {
    "backend_options": "-B",
    "strategy_options": "-S",
    "decoder_options": "-D",
    "routing_options": "-R",
    "launcher_options": "-L",
}
SHOWN_ONLY = (
    "json",
    "trace",
    "profile",
    "profile_seconds",
    "track",
    "live",
    "quiet",
    "verbose",
    "trial",
)  # how a run is displayed, not what it does


def spelled(name: str, values: Mapping[str, Any]) -> str:
    """The command line of these flags (None: not given), without what only says how the run is shown."""
    words = ["gpuinfer", name]
    for key, value in values.items():
        if value is None or key in SHOWN_ONLY:
            continue
        if isinstance(value, bool):
            words.append(flag(key if value else f"no_{key}"))
        else:
            several = value if isinstance(value, list) else [value]
            words += [word for one in several for word in (SHORTS.get(key, flag(key)), str(one))]
    return shlex.join(words)


def anew(name: str, values: Mapping[str, Any], workload: Workload) -> str:
    """The command line that does the same work from its start, beside what this run writes: the verdict's advice is a
    change to it, and would be refused by records that were made with another setting.
    """
    own = dict(values)
    given = workload.options.model_dump()
    for key in workload.goes_on_by:
        if given[key]:
            own[key] = None if values.get(key) else False  # what the environment or the file says needs a flag against
    for key in workload.writes_to:
        if (place := given[key]) and _is_written(Path(place)):
            own[key] = str(_free(Path(place)))
    return spelled(name, own)


def _is_written(path: Path) -> bool:
    """Whether there is, or will be, a file or a folder: not standard output, a pipe or a device."""
    return str(path) != "-" and (path.is_file() or path.is_dir() or not path.exists())


def _free(path: Path) -> Path:
    """`records-2` for `records`, `out-3.jsonl` for `out.jsonl` where there is an `out-2.jsonl`."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())
