"""Every plugin of an installed package, loaded by entry point and checked in a process of its own with the checks of
its kind.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.config import import_paths, options, registry
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError
from gpuinfer.host import children, error_text
from gpuinfer.host.child import BURIAL_S, Channel, ChannelClosed, Child
from gpuinfer.testing.backends import check_backend
from gpuinfer.testing.fakes import tiny_folder
from gpuinfer.testing.findings import Examination, Finding, run_bounded, wanting
from gpuinfer.testing.strategies import check_strategy
from gpuinfer.testing.workloads import check_workload

ROWS = ModelSpec("gpuinfer.testing.fakes:tiny_model", inputs=8)
SETUP = Setup(model=ROWS, devices=("cpu",))
"""What plugins are built with: a model of rows that costs nothing. That of text is a folder with a tiny checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """How to check: `examiner` makes one whose findings carry this suffix; `model` is a checkpoint of text to use."""

    given: Mapping[str, str]  # options as text: `key`, or `name.key` for one plugin alone
    model: str | None
    examiner: Callable[[str], Examination]


def of_path(path: str) -> registry.PluginRecord:
    """What `module:Class` names, as if a package offered it. Raises `UsageError`."""
    from gpuinfer.workloads.selfplay.game import Game  # NumPy: of no use to the other kinds

    import_paths.refuse_absent_module(path, "plugin")
    try:
        found = _imported(path)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"plugin '{path}': {error_text.short_message(error)}. Name a class of the module that can be imported."
        ) from error
    bases = {"games": Game, **{kind: registry.base_of(kind) for kind in registry.BASES}}
    for kind, base in bases.items():
        if isinstance(found, type) and issubclass(found, base):
            return registry.PluginRecord(kind, path, "", "", path)
    raise UsageError(
        f"plugin '{path}' is no class of a game, backend, strategy, workload, decoder, policy or launcher. Name one "
        "that derives from its base class."
    )


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def check_plugin(record: registry.PluginRecord, order: CheckOrder) -> set[str]:
    """All checks of its kind. Returns the keys of the options that it took."""
    loaded: list[Any] = []

    def load(examiner: Examination) -> None:
        by_path = not record.distribution
        examiner.check(
            "loads",
            lambda: loaded.append(_imported(record.module) if by_path else registry.load(record.kind, record.name)),
        )

    run_bounded(load, order.examiner(""))
    if not loaded or record.kind not in CHECKS:
        return set()
    plugin, values = loaded[0], {}
    own: Any = getattr(plugin, "Options", None)  # a function that makes environments has none
    fields = options.fields_of(own) if hasattr(own, "model_fields") else {}
    named = {f"{prefix}{key}": key for prefix in ("", f"{record.name.replace('-', '_')}.") for key in fields}
    given = {key: GivenValue(order.given[full], f"--set {full}") for full, key in named.items() if full in order.given}

    def read() -> str | None:
        if fault := wanting(plugin, given):
            return fault
        values.update(options.check(plugin.Options, given, f"{registry.KINDS[record.kind]} '{record.name}'"))
        return None

    if not fields or order.examiner("").check("has the options that it needs", read):
        CHECKS[record.kind](plugin, values, order)
    return {full for full in named if full in order.given}


def _check_backend(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    kinds = plugin.serves if isinstance(plugin.serves, tuple | list) else ("rows",)
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="gpuinfer-check-") as folder:
            text = ModelSpec(order.model or str(tiny_folder(Path(folder, "model"))), kind="text")
            spec = text if kind == "text" else ROWS
            build = functools.partial(plugin, replace(SETUP, model=spec), **values)
            check_backend(build, examiner=order.examiner(f" ({kind})" if len(kinds) > 1 else ""))


def _check_game(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.games import check_game  # Numba: of no use to the other kinds

    check_game(plugin, values, examiner=order.examiner(""))


def _check_decoder(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.decoders import check_decoder  # of use to few

    check_decoder(lambda: plugin(plugin.Options(**values)), examiner=order.examiner(""))


def _check_environment(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.environments import check_environment  # likewise

    check_environment(functools.partial(plugin, **values), examiner=order.examiner(""))


def _check_policy(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.policies import check_policy  # likewise

    check_policy(lambda: plugin(SETUP, **values), examiner=order.examiner(""))


def _check_launcher(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.launchers import check_launcher  # likewise

    check_launcher(plugin, values, examiner=order.examiner(""))


CHECKS: dict[str, Callable[[Any, Mapping[str, Any], CheckOrder], object]] = {
    "backends": _check_backend,
    "strategies": lambda plugin, values, order: check_strategy(
        lambda: plugin(SETUP, **values), examiner=order.examiner("")
    ),
    "workloads": lambda plugin, values, order: check_workload(
        lambda: plugin(replace(SETUP, model=None), **values), examiner=order.examiner("")
    ),
    "games": _check_game,
    "decoders": _check_decoder,
    "environments": _check_environment,
    "routing": _check_policy,
    "launchers": _check_launcher,
}


EACH_S = 10.0  # for one check; a run of a workload may take three times as long, compiling a game's search longer
LIMIT_S = 300.0  # for a package
START_S = 60.0  # for the process to import what it needs, on a busy machine
NAME = "gpuinfer plugins check"  # of the process
OVERDUE = 1.5  # limits of a check after which its process is ended: it would have reported by then

Tell = Callable[[str, str, "Finding | None"], None]
"""Told of each check: the plugin, the check's name, and what was found; None when it begins."""


def check_package(
    package_name: str,
    *,
    given: Mapping[str, str] | None = None,
    model: str | None = None,
    each_s: float = EACH_S,
    limit_s: float = LIMIT_S,
    tell: Tell = lambda plugin, check, finding: None,
) -> list[Finding]:
    """Load each plugin that the installed package offers, and check it; or the class that `module:Class` names.

    `given` are options as text, by `key`, or `name.key` for one plugin alone; `model` a checkpoint of text for the
    backends that serve it. Each check may take `each_s`, all of them `limit_s`: what hangs is named and ended, and the
    others go on. Raises `UsageError` when the package is not installed or offers no plugin.
    """
    records = [
        one for one in registry.listing() if registry.plain_name(one.distribution) == registry.plain_name(package_name)
    ]
    if ":" in package_name:
        records = [of_path(package_name)]
    if not records:
        offering = sorted({record.distribution for record in registry.listing()})
        raise UsageError(
            f"no installed package '{package_name}' offers a plugin. Install it (pip install {package_name}), or give "
            f'its pyproject.toml an entry point such as [project.entry-points."gpuinfer.backends"]. '
            f"Packages with plugins: {', '.join(offering) or 'none'}."
        )
    order = {"given": {key: _whole(text) for key, text in (given or {}).items()}, "model": model, "each_s": each_s}
    order["model"] = _whole(model) if model else None
    package = _Package([(record.kind, record.name) for record in records], order, limit_s, tell)
    package.check()
    return package.findings


class _Package:
    """The plugins of one package, and how far their check has come."""

    def __init__(self, plugins: list[tuple[str, str]], order: Mapping[str, Any], limit_s: float, tell: Tell) -> None:
        self.findings: list[Finding] = []
        self._left, self._order, self._tell = plugins, order, tell
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s
        self._plugin, self._check, self._used = "", "starts", set[str]()

    def check(self) -> None:
        """Another process goes on with the next plugin when one has been ended or has died."""
        while self._left:
            with tempfile.NamedTemporaryFile("r", errors="replace") as said:
                child = Child(_examine, said.name, {**self._order, "plugins": self._left}, name=NAME, group=True)
                try:
                    self._follow(child, said)
                finally:
                    child.kill(BURIAL_S)
        for key in sorted(set(self._order["given"]) - self._used):
            self._plugin = f"--set {key}"
            self._add(Finding("is an option", False, "no plugin of this package has it. See gpuinfer plugins show."))

    def _follow(self, child: Child, said: IO[str]) -> None:
        """What the examining process finds, to its end. Its complaints are in the file `said`."""
        silence_s, events = START_S, Channel(child.end)
        while True:
            if not events.poll(max(0.0, min(silence_s, self._end - time.monotonic()))):
                if time.monotonic() < self._end:
                    self._broken_off(f"did not come back within {silence_s:g} s and was ended. Give every wait an end.")
                else:
                    self._broken_off(
                        f"the limit of {self._limit_s:g} s for the package is over. Allow more, or make it quicker."
                    )
                    for its_kind, its_name in self._left:
                        self._plugin = f"{registry.KINDS[its_kind]} {its_name}"
                        self._add(Finding("is checked", False, "not tried: there was no time left. Allow more."))
                    self._left = []
                return
            try:
                event = events.receive()
            except ChannelClosed:
                if self._left:
                    last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
                    why = f"its process ended: {last} (exit code {child.exit_code()})"
                    self._broken_off(f"{why}. Whatever happens, raise an error instead.")
                return
            if "plugin" in event:
                kind, name = event["plugin"]
                self._plugin, self._check = f"{registry.KINDS[kind]} {name}", "loads"
            elif "begin" in event:
                self._check = event["begin"]
                self._tell(self._plugin, self._check, None)
            elif "finding" in event:
                self._add(Finding(**event["finding"]))
            else:
                self._used |= set(event["used"])
                self._left = self._left[1:]
            silence_s = OVERDUE * event.get("limit_s", self._order["each_s"]) + START_S

    def _broken_off(self, why: str) -> None:
        kind, name = self._left.pop(0)
        self._plugin = f"{registry.KINDS[kind]} {name}"
        self._add(Finding(self._check, False, why))

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding.of(self._plugin))
        self._tell(self._plugin, finding.name, finding)


def _examine(end: socket.socket, complaints: str, order: Mapping[str, Any]) -> None:
    """The process in which a package's plugins are checked: what they break, they break there. What they print goes to
    the file `complaints`, what happens to `end`: {plugin}, {begin, limit_s}, {finding}, {used}.
    """
    children.set_up_child(group=True)
    with open(complaints, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(children.with_our_path())  # for programs that a plugin starts
    events, turn = Channel(end), threading.Lock()

    def send(**event: Any) -> None:
        with turn:
            events.send(event)

    def examiner(suffix: str) -> Examination:
        return Examination(
            order["each_s"],
            lambda name, limit_s: send(begin=f"{name}{suffix}", limit_s=limit_s),
            lambda finding: send(finding={**asdict(finding), "name": f"{finding.name}{suffix}"}),
        )

    with tempfile.TemporaryDirectory(prefix="gpuinfer-check-") as folder:
        os.chdir(folder)  # for what a workload writes
        for kind, name in order["plugins"]:
            send(plugin=[kind, name])
            offered = (one for one in registry.listing(kind) if one.name == name)
            record = registry.PluginRecord(kind, name, "", "", name) if ":" in name else next(offered)
            used = check_plugin(record, CheckOrder(order["given"], order["model"], examiner))
            send(used=sorted(used))
        os.chdir("/")
    os._exit(0)  # threads that were left behind may hang


def _whole(text: str) -> str:
    """A file of this folder by its whole path: plugins are checked in a folder of their own."""
    return str(Path(text).resolve()) if Path(text).exists() else text
