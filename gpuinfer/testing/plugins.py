"""The checks that belong to each kind of plugin, made on one that is found by its entry point."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.config import modules, options, registry
from gpuinfer.config.options import Given
from gpuinfer.errors import UsageError
from gpuinfer.host import spoken
from gpuinfer.testing.backends import check_backend
from gpuinfer.testing.fakes import tiny_folder
from gpuinfer.testing.findings import Examination, run_bounded, wanting
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

    modules.refuse_absent(path, "plugin")
    try:
        found = _imported(path)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"plugin '{path}': {spoken.in_short(error)}. Name a class of the module that can be imported."
        ) from error
    bases = {"games": Game, **{kind: registry.base_of(kind) for kind in registry.BASES}}
    for kind, base in bases.items():
        if isinstance(found, type) and issubclass(found, base):
            return registry.PluginRecord(kind, path, "", "", path)
    raise UsageError(
        f"plugin '{path}' is no class of a game, backend, strategy, workload or decoder. Name one that derives from "
        "its base class."
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
    given = {key: Given(order.given[full], f"--set {full}") for full, key in named.items() if full in order.given}

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
            spec = ROWS if kind != "text" else _text(order.model, Path(folder))
            build = functools.partial(plugin, replace(SETUP, model=spec), **values)
            check_backend(build, examiner=order.examiner(f" ({kind})" if len(kinds) > 1 else ""))


def _text(model: str | None, folder: Path) -> ModelSpec:
    return ModelSpec(model or str(tiny_folder(folder / "model")), kind="text")


def _check_strategy(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    check_strategy(lambda: plugin(SETUP, **values), examiner=order.examiner(""))


def _check_workload(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    check_workload(lambda: plugin(replace(SETUP, model=None), **values), examiner=order.examiner(""))


def _check_game(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.games import check_game  # Numba: of no use to the other kinds

    check_game(plugin, values, examiner=order.examiner(""))


def _check_decoder(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.decoders import check_decoder  # of use to few

    check_decoder(lambda: plugin(plugin.Options(**values)), examiner=order.examiner(""))


def _check_environment(plugin: Any, values: Mapping[str, Any], order: CheckOrder) -> None:
    from gpuinfer.testing.environments import check_environment  # likewise

    check_environment(functools.partial(plugin, **values), examiner=order.examiner(""))


CHECKS: dict[str, Callable[[Any, Mapping[str, Any], CheckOrder], None]] = {
    "backends": _check_backend,
    "strategies": _check_strategy,
    "workloads": _check_workload,
    "games": _check_game,
    "decoders": _check_decoder,
    "environments": _check_environment,
}
