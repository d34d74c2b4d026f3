"""Settings: flag > environment `GPUINFER_…` > `gpuinfer.toml` > default, each value with its origin.

Keys are dotted: `device`, `selfplay.games` (a workload's own option), `backends.inprocess.max_rows`. In the environment
that is `GPUINFER_SELFPLAY__GAMES`; in the file, `games` under `[selfplay]`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from gpuinfer.config import registry
from gpuinfer.config.options import GivenValue, check, fields_of
from gpuinfer.errors import UsageError
from gpuinfer.host import installation

log = logging.getLogger(__name__)

FILE = Path("gpuinfer.toml")
PREFIX = "GPUINFER_"
RESERVED = {
    "GPUINFER_CONFIG",
    "GPUINFER_PLUGINS",
    installation.ONE_FILE_VARIABLE,
}  # say where something is, and are no settings
SERVICE_LINK = re.compile(  # what Kubernetes tells pods of a service whose name begins with gpuinfer: no setting
    r"GPUINFER(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
TABLES = ("backends", "strategies", "launchers")  # tables of tables; a workload's table stands at the top
COMMANDS = ("fleet", "models", "serve")  # of ours, with a table of the same kind as a workload's

Place = Callable[[tuple[str, ...]], str]  # where a path stands, for people
Dtype = Literal["float32", "bfloat16", "float16"]


class Common(BaseModel):
    """The settings that every command knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = Field("inprocess", description="who answers the requests")
    fallback: str | None = Field(
        None, description="the backend that goes on in this process when a server is gone for good, as inprocess"
    )
    strategy: str = Field("dynamic", description="when waiting requests become a batch")
    device: str = Field(
        "auto",
        pattern=r"^(auto|all|(cpu|cuda(:\d+)?)([,+](cpu|cuda(:\d+)?))*)$",
        description="where the model computes: auto, cpu or cuda:1; several as cuda:0,cuda:1, every one as cuda or all",
    )
    dtype: Dtype = Field("float32", description="number format of the model: float32, bfloat16 or float16")
    seed: int = Field(0, ge=0, lt=2**63, description="of everything random")
    report: str | None = Field(None, alias="json", description="write the report to this file; - is standard output")
    trace: str | None = Field(None, pattern=r"^[^\x00]+$", description="a file that records every request and batch")
    profile: str | None = Field(
        None, pattern=r"^[^\x00]+$", description="a folder for profiles: a Chrome trace of each process"
    )
    profile_seconds: float = Field(
        5.0,
        gt=0,
        le=60,
        description="how long each process is profiled, as 5s",
        json_schema_extra={"only_with": {"profile": "DIR"}},
    )
    track: list[str] = Field(
        [],
        json_schema_extra={"repeatable": True},
        description="write the figures while the run goes: tensorboard=DIR, wandb=PROJECT, mlflow=EXPERIMENT, otel=URL",
    )
    live: bool | None = Field(None, description="a live view, or plain lines; none: live on a terminal")
    quiet: bool = Field(False, description="no progress: only the result, and errors")
    verbose: int = Field(0, ge=0, description="1 says more, 2 shows tracebacks")
    roofline: bool = Field(True, description="measure the bare model first, for the efficiency")
    patience: float = Field(
        10.0, gt=0, le=1e6, description="after which a plugin that holds things up is named, as 10s"
    )
    give_up: float = Field(
        600.0, gt=0, le=1e9, description="after which such a plugin and the run are given up, as 10min"
    )
    max_failures: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the requests that may fail, as 0.01, else exit 1; none: as the workload has it",
    )
    max_queue_rows: int | None = Field(
        None,
        ge=1,
        le=10**12,
        description="rows that may wait, more are refused; none: 64 full batches, and no less than 4096",
    )
    trial: bool | None = Field(
        None, description="try the advice at the run's end, for 15 % of its time at most; none: on a terminal"
    )
    launcher: str | None = Field(
        None,
        description="what starts the nodes of a run, or a server's replicas: local, ssh, slurm, ray, external "
        "(others start them) or a plugin's; "
        "none: one process here, or replicas of local",
    )
    nodes_min: int = Field(
        1, ge=1, le=100_000, description="nodes that must be there, before and while the run goes on"
    )
    deadline: float | None = Field(
        None,
        ge=60,  # nodes need some of it to send what they have finished
        le=1e8,
        description="after which a run on nodes stops in time, to be resumed, as 8h; none: never",
    )
    disabled_plugins: list[str] = Field([], description="packages, or plugins such as backends.echo, not to use")

    @property
    def devices(self) -> tuple[str, ...]:
        """`+` goes where commas part what is compared: `--compare device=cpu,cpu+cpu`."""
        return tuple(self.device.replace("+", ",").split(","))


@dataclass(frozen=True)
class Settings:
    """The merged settings. Plugins' options stay as they were given until `options` checks them."""

    common: Common
    given: Mapping[str, GivenValue]  # the winner for each key
    file: Path | None = None

    def table(self, name: str) -> dict[str, GivenValue]:
        """What was given under `selfplay` or `backends.inprocess`, by option."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): one for key, one in self.given.items() if key.startswith(prefix)}

    def options(self, kind: str, name: str, plugin: Any, *, complete: bool = True) -> dict[str, Any]:
        """The options given for a plugin, as its class takes them. Raises `UsageError`, as `options.check` does."""
        kind = registry.plural(kind)
        owner = f"{registry.KINDS[kind]} '{name}'"
        return check(plugin.Options, self.table(table_name(kind, name)), owner, complete=complete)

    def read_options(self, kind: str, name: str, plugin: Any) -> dict[str, Any]:
        """The same as the plugin reads them, as plain values: a number that was given as text is one here."""
        given = self.options(kind, name, plugin)
        read = plugin.Options(**given).model_dump(mode="json", by_alias=True)
        return {key: read[key] for key in given}

    def origin(self, key: str) -> str:
        return self.given[key].origin if key in self.given else "default"


def load(flags: Mapping[str, GivenValue] | None = None, config: Path | None = None) -> Settings:
    """Merge flags, environment, file and defaults.

    Plugins that the settings switch off are off from here on. Raises `UsageError` for a value or key that is wrong,
    saying where it came from.
    """
    if config is None and (named := os.environ.get("GPUINFER_CONFIG")):
        config = Path(named)
    if config is None:
        file = _regular(FILE, "Put a text file in its place, or rename it.") if os.path.lexists(FILE) else None
    else:
        cure = "Give --config a file that exists, or leave it out."
        if not os.path.lexists(config):
            raise UsageError(f"there is no settings file {config}. {cure}")
        file = _regular(config, cure)
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict  # 90 ms

    class Reader(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=PREFIX, env_nested_delimiter="__", enable_decoding=False, env_ignore_empty=True
        )

    fields: dict[str, Any] = dict.fromkeys(_common_keys(), (str, ""))
    fields |= {name: (dict[str, dict[str, Any]], {}) for name in TABLES}
    fields |= {_identifier(name): (dict[str, Any], {}) for name in _tables()}
    with warnings.catch_warnings(action="ignore"):  # a field named json hides a method that is not used here
        reader = create_model("Environment", __base__=Reader, **fields)
    read = dict(_flatten(EnvSettingsSource(reader)(), _variable))
    taken = {_variable(path) for path in read} | RESERVED
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        taken |= {variable for variable in os.environ if SERVICE_LINK.fullmatch(variable)}
    for variable, value in os.environ.items():
        if variable.upper().startswith(PREFIX) and value and variable.upper() not in taken:
            known = [_variable((key,)) for key in _common_keys()]
            known += [_variable((name, "…")) for name in (*TABLES, *_tables())]
            raise UsageError(_unknown("setting", variable, known, f"unset {variable}"))
    texts = {variable.upper(): text for variable, text in os.environ.items()}  # some releases read `7` as a number
    layers = [
        _from_file(file) if file else {},
        {
            ".".join(path): GivenValue(texts.get(_variable(path), value), _variable(path))
            for path, value in read.items()
        },
        dict(flags or {}),
    ]
    given = {key: one for layer in layers for key, one in layer.items()}
    common = Common(**check(Common, {key: one for key, one in given.items() if "." not in key}, "gpuinfer"))
    registry.switch_off(common.disabled_plugins)
    for entry in registry.unknown_of(common.disabled_plugins):
        _say_unknown(entry, given["disabled_plugins"].origin)
    return Settings(common, given, file)


@cache
def _say_unknown(entry: str, origin: str) -> None:
    """Once in a process: it does no harm, and may be meant for another machine."""
    log.warning("%s: nothing is installed that '%s' names. See gpuinfer plugins list, or take it out.", origin, entry)


def table_name(kind: str, name: str) -> str:
    """`selfplay` for a workload, `backends.inprocess` for a backend."""
    return name if kind == "workloads" else f"{kind}.{name}"


def _regular(file: Path, cure: str) -> Path:
    """Raises `UsageError` for anything but a file: a pipe without a writer would be waited for without end."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        reasons = {errno.ELOOP: "is a link that leads back to itself", errno.ENOENT: "is a link that leads nowhere"}
        why = reasons.get(error.errno or 0, f"cannot be looked at: {error.strerror}")
    else:
        if stat.S_ISREG(mode):
            return file
        why = "is a folder" if stat.S_ISDIR(mode) else "is a pipe" if stat.S_ISFIFO(mode) else "is no file"
    raise UsageError(f"the settings file {file} {why}. {cure}")


def _from_file(file: Path) -> dict[str, GivenValue]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is no valid TOML: {error}. Correct that line.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}. Make it a readable text file in UTF-8.") from error
    return {
        ".".join(path): GivenValue(value, _place_in_file(file, path))
        for path, value in _flatten(content, lambda path: _place_in_file(file, path))
    }


def _place_in_file(file: Path, path: tuple[str, ...]) -> str:
    table = f" [{'.'.join(path[:-1])}]" if len(path) > 1 else ""
    return f"{file}{table} {path[-1]}"


def _flatten(content: Mapping[str, Any], place: Place) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths and values of nested tables, every name checked. `place` tells people where a path stands."""
    tables = {_identifier(name): name for name in _tables()}
    for key, value in content.items():
        if key in TABLES:
            for plugin, table in _table(value, place((key,))).items():
                names = {_identifier(name): name for name in _names(key)}
                if _identifier(plugin) not in names:
                    where = place((key, plugin))
                    raise UsageError(
                        _unknown(registry.KINDS[key], where, list(names.values()), f"take out '{plugin}'", plugin)
                    )
                name = names[_identifier(plugin)]
                yield from (((key, name, option), one) for option, one in _table(table, place((key, name))).items())
        elif _identifier(key) in tables and key not in _common_keys():
            name = tables[_identifier(key)]
            yield from (((name, option), one) for option, one in _table(value, place((name,))).items())
        elif key in _common_keys():
            yield (key,), value
        else:
            known = [*_common_keys(), *TABLES, *tables.values()]
            raise UsageError(_unknown("setting", place((key,)), known, f"take out '{key}'", key))


def _table(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{place}: {value!r} is no table. Give options one by one, under their names.")
    return value


def _variable(path: tuple[str, ...]) -> str:
    return PREFIX + "__".join(map(_identifier, path)).upper()


def _identifier(name: str) -> str:
    return name.replace("-", "_").lower()


def _tables() -> list[str]:
    """Of workloads, and of those commands of ours that have settings of their own."""
    return sorted({*_names("workloads"), *COMMANDS})


def _names(kind: str) -> list[str]:
    """Those that are switched off too: their tables may stay."""
    return sorted({record.name for record in registry.listing(kind)})


def _common_keys() -> list[str]:
    return list(fields_of(Common))


def _unknown(what: str, place: str, known: list[str], cure: str, name: str = "") -> str:
    near = get_close_matches(name or place.upper(), known, n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"{place}: no such {what}. {hint}Known: {', '.join(sorted(known))}. Or {cure}."
