"""See which plugins there are, check, write and install them."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuinfer.cli import flags
from gpuinfer.cli.app import first_sentence
from gpuinfer.cli.plugin_probe import inspect_all
from gpuinfer.cli.plugins_install import install_plugins, uninstall, upgrade
from gpuinfer.cli.problems import CHECK_FAILED
from gpuinfer.config import registry
from gpuinfer.errors import UnknownName

if TYPE_CHECKING:
    from gpuinfer.testing import Finding


def kinds_that_begin(incomplete: str) -> list[str]:
    """For completion."""
    return [kind for kind in registry.KINDS.values() if kind.startswith(incomplete)]


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help="backend, strategy, workload, game, decoder, environment or policy", autocompletion=kinds_that_begin
        ),
    ],
    name: Annotated[str, typer.Argument(help="what it will be called, such as my-plugin")],
    path: Annotated[Path, typer.Option(metavar="DIR", help="Where to put the folder gpuinfer-NAME.")] = Path(),
) -> None:
    """Write a package with a plugin: code, options, tests, README. It works as it is; nothing is overwritten."""
    from gpuinfer.config import settings
    from gpuinfer.config.packages import template

    settings.load()  # they may switch plugins off
    package = template.new_package(kind, name)
    folder = template.write_package(package, path)
    typer.secho(f"{folder}{os.sep}", bold=True)
    for file, _ in sorted(template.files(package)):
        typer.echo(f"  {file}")
    typer.echo("Install it, see that it works, then make it yours:")
    for line in [f"gpuinfer plugins install {_as_path(folder)}", *package.commands]:
        typer.echo(f"  {line}")


def _as_path(folder: Path) -> str:
    """So that it is taken for a folder, and not for a package's name."""
    text = str(folder)
    return text if os.sep in text else f".{os.sep}{text}"


SET = "Option of the plugins that have it, or NAME.KEY for one of them; repeatable."

PREFIXES = {
    "backends": "-B {}=",
    "strategies": "-S {}=",
    "decoders": "-D {}=",
    "routing": "-R {}=",
    "launchers": "-L {}=",
}  # of options; else a flag each

app = typer.Typer(
    help="See which plugins there are, check, write and install them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    kind = ctx.params.get("kind")
    return [name for name in registry.names(kind) if name.startswith(incomplete)] if kind else []


def _packages(incomplete: str) -> list[str]:
    return sorted({record.distribution for record in registry.listing() if record.distribution.startswith(incomplete)})


@app.command("list")
def show_list(
    load: bool = typer.Option(False, "--load", help="Import each, to see whether it can be used."),
) -> None:
    """Every plugin and where it comes from. None is imported, unless --load asks for it."""
    from gpuinfer.cli.screen.display import facts

    _apply_settings()
    records = inspect_all(registry.listing()) if load else registry.listing()
    for kind in registry.KINDS:
        if rows := [_row(record) for record in records if record.kind == kind]:
            facts(kind, rows)
    first = {record.distribution: record for record in reversed(records)}
    listed = sorted(first.values(), key=lambda record: (record.place != registry.BUILT_IN, record.distribution))
    facts("packages", [(f"    {record.package}", record.place, _contract(record)) for record in listed])


def _contract(record: registry.PluginRecord) -> str:
    if record.place == registry.BUILT_IN:
        return f"the contract {registry.contract_range()}"
    if record.contract is None:
        return "does not say for which gpuinfer"
    return f"for gpuinfer {record.contract}" if record.contract else "for any gpuinfer"


def _row(record: registry.PluginRecord) -> tuple[str, str, str]:
    mark = {True: "✓", False: "✗", None: "·"}[record.ok]
    return f"  {mark} {record.name}", record.package, record.reason or first_sentence(record.module)


@app.command("show")
def show_one(
    kind: str = typer.Argument(
        help="backend, strategy, workload, game, environment, decoder, policy or launcher",
        autocompletion=kinds_that_begin,
    ),
    name: str = typer.Argument(help="as `plugins list` names it", autocompletion=_names),
) -> None:
    """One plugin: what it is, where it comes from, its options."""
    from gpuinfer.cli.screen.display import facts

    _apply_settings()
    record = registry.find(kind, name)
    plugin = registry.load(kind, name)
    origin = [("package", record.package, f"{record.place}; {_contract(record)}"), ("module", record.module, "")]
    if problem := registry.missing_library(plugin):
        origin.append(("missing", problem, ""))
    facts(
        f"{registry.KINDS[record.kind]} {name}",
        [("what", " ".join((plugin.__doc__ or "no description").split()), ""), *origin],
    )
    if rows := _options(record, plugin):
        facts("options", rows)


def _options(record: registry.PluginRecord, plugin: Any) -> list[tuple[str, str, str]]:
    from gpuinfer.config import options

    if not hasattr(plugin, "Options"):
        return []
    prefix = PREFIXES.get(record.kind, "--{}")
    rows = []
    for key, field in options.fields_of(plugin.Options).items():
        allowed = "|".join(map(str, options.choices(field.annotation)))
        remark = "; ".join(filter(None, [field.description, allowed]))
        flag = prefix.format(key if record.kind in PREFIXES else key.replace("_", "-"))
        rows.append((flag, options.default_text(field) or "-", remark))
    return rows


@app.command("check")
def check_plugins(
    package: str = typer.Argument(
        help="an installed package (`echo` is gpuinfer-echo), or module:Class", autocompletion=_packages
    ),
    given: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET)] = None,
    model: Annotated[str, typer.Option(metavar="DIR", help="Checkpoint for backends of text; else a tiny one.")] = "",
    each: Annotated[str, typer.Option(metavar="TIME", help="For one check; a run gets three times it.")] = "10s",
    limit: Annotated[str, typer.Option(metavar="TIME", help="For the whole package.")] = "5min",
) -> None:
    """Run the conformance kit on every plugin of a package, or on one class of a module, in a process of its own. Exits
    4 when something does not hold.
    """
    from gpuinfer.cli.workload_targets import parse_seconds
    from gpuinfer.config.packages import package_info
    from gpuinfer.testing import check_package

    _apply_settings()
    known = {record.distribution for record in registry.listing()}
    package = next((name for name in package_info.candidate_names(package, package) if name in known), package)
    if package not in known and ":" not in package:
        raise UnknownName("package with plugins", package, known)
    shown = Shown()
    findings = check_package(
        package,
        given={
            key.removeprefix("."): ",".join(one.value) if isinstance(one.value, list) else one.value
            for key, one in flags.option_pairs(given or [], "--set", "").items()
        },
        model=model or None,
        each_s=parse_seconds("each", each, 0.01),
        limit_s=parse_seconds("limit", limit, 0.01),
        tell=shown.tell,
    )
    shown.sum_up(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(CHECK_FAILED)


app.command("new")(new)
app.command("install")(install_plugins)
app.command("upgrade")(upgrade)
app.command("uninstall")(uninstall)


def _apply_settings() -> None:
    """They may switch plugins off."""
    from gpuinfer.config import settings

    settings.load()


QUIET_S = 3.0  # a check that takes longer is named while it goes on
MARKS = {"held": ("✓", typer.colors.GREEN), "broken": ("✗", typer.colors.RED), "skipped": ("–", typer.colors.YELLOW)}
INDENT = 4


class Shown:
    """Draws on standard output; what goes on meanwhile on standard error."""

    def __init__(self) -> None:
        self._plugin = ""
        self._waiting: threading.Timer | None = None

    def tell(self, plugin: str, check: str, finding: Finding | None) -> None:
        """A check begins, or has been made."""
        self._stop_waiting()
        if plugin != self._plugin:
            self._plugin = plugin
            typer.secho(plugin, bold=True)
        if finding is None:
            self._waiting = threading.Timer(QUIET_S, _say, (f"  … {check}",))
            self._waiting.daemon = True
            self._waiting.start()
        else:
            mark, colour = MARKS[_state(finding)]
            typer.echo(f"  {typer.style(mark, fg=colour)} {finding.name}")
            columns = max(40, shutil.get_terminal_size().columns)
            for line in textwrap.wrap(
                finding.detail, columns, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
            ):
                typer.echo(line)

    def sum_up(self, findings: Sequence[Finding]) -> None:
        self._stop_waiting()
        states = [_state(finding) for finding in findings]
        parts = [f"{states.count('held')} of {len(findings)} checks hold"]
        parts += [f"{count} {words}" for state, words in WORDS.items() if (count := states.count(state))]
        typer.echo(", ".join(parts))

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()


WORDS = {"broken": "do not", "skipped": "were not tried"}


def _state(finding: Finding) -> str:
    return "skipped" if finding.skipped else "held" if finding.ok else "broken"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
