"""From a command line to a run that is ready: settings merged, plugins made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gpuinfer.api import Backend, Setup, Strategy, Workload
from gpuinfer.cli import flags
from gpuinfer.config import blame, registry, settings
from gpuinfer.config.options import GivenValue, GivenValues
from gpuinfer.errors import UsageError

if TYPE_CHECKING:
    from gpuinfer.runtime.run import RunPlan

DEFAULT_BACKEND = "inprocess"
NO_SETTINGS = (
    "config",
    "backend_options",
    "strategy_options",
    "launcher_options",
)  # flags that are not settings by themselves


def merge(name: str, values: Mapping[str, Any]) -> settings.Settings:
    """The settings with these flags on top. The plugins' options are not yet checked."""
    merged = settings.load(plain_flags(name, values), values.get("config"))
    if merged.common.quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of huggingface_hub, where a model is fetched
    return replace(merged, given={**merged.given, **option_flags(values, merged.common)})


def plain_flags(name: str, values: Mapping[str, Any]) -> dict[str, GivenValue]:
    """Flags with a name of their own, as settings."""
    common = flags.common_flags()
    return {
        key if key in common else f"{name}.{key}": GivenValue(
            GivenValues(value) if isinstance(value, list) else value, flags.SHORTS.get(key) or flags.flag(key)
        )
        for key, value in values.items()
        if value is not None and value != [] and key not in NO_SETTINGS and not (key == "verbose" and value == 0)
    }


def option_flags(values: Mapping[str, Any], common: settings.Common) -> dict[str, GivenValue]:
    """-B, -S and -L, as settings of the backend, the strategy and the launcher in force. Raises `UsageError`."""
    backend = settings.table_name("backends", common.backend)
    strategy = settings.table_name("strategies", common.strategy)
    pairs = flags.option_pairs(values.get("backend_options") or [], "-B", backend)
    pairs |= flags.option_pairs(values.get("strategy_options") or [], "-S", strategy)
    if words := values.get("launcher_options"):
        if common.launcher is None:
            raise UsageError(
                f"-L {words[0]} is an option of a launcher, and none is named. Add --launcher slurm, or leave it out."
            )
        pairs |= flags.option_pairs(words, "-L", settings.table_name("launchers", common.launcher))
    return pairs


def launcher_options(merged: settings.Settings, name: str, words: Sequence[str]) -> dict[str, GivenValue]:
    """What settings and `-L key=value` words give the launcher of this name, by option. Raises `UsageError`."""
    table = settings.table_name("launchers", name)
    pairs = flags.option_pairs(list(words), "-L", table)
    return merged.table(table) | {key.removeprefix(f"{table}."): one for key, one in pairs.items()}


def build(name: str, merged: settings.Settings) -> RunPlan:
    """Make workload, backend and strategy; of a run on nodes, what coordinates them. Raises `UsageError` or
    `ValidationError` for what they refuse.
    """
    plan = around(name, _made("workloads", name, merged, setup_of(merged.common)), merged)
    if merged.common.launcher is None:
        if unused := next((key for key in ("nodes_min", "deadline") if key in merged.given), None):
            raise UsageError(
                f"{merged.origin(unused)} applies to a run on nodes only. Add --launcher NAME, or leave it out."
            )
        return plan
    from gpuinfer.cli.cluster_run import over_nodes

    return over_nodes(name, plan, merged)


def setup_of(common: settings.Common) -> Setup:
    """What the settings alone say of a run's setup."""
    trace = None if common.trace is None else os.path.realpath(common.trace)  # of a link, what it leads to
    return Setup(
        devices=common.devices,
        dtype=common.dtype,
        seed=common.seed,
        trace=trace,
        profile=None if common.profile is None else os.path.realpath(common.profile),
        profile_s=common.profile_seconds,
        patience=common.patience,
        give_up=common.give_up,
        max_queue_rows=common.max_queue_rows,
    )


def around(name: str, workload: Workload, merged: settings.Settings) -> RunPlan:
    """This workload with the backend and the strategy that the settings name. Raises what `build` does."""
    from gpuinfer.runtime.run import RunPlan

    common = merged.common
    if not workload.asks and common.backend != DEFAULT_BACKEND:
        raise UsageError(
            f"{name} brings its own answers with these options, so the backend '{common.backend}' would never be "
            f"asked. Leave --backend out, or give {name} a --model."
        )
    backend, strategy = served(name, blame.completed_setup(workload, setup_of(common)), merged)
    shown = merged.common.model_dump(
        mode="json", by_alias=True, exclude={"disabled_plugins", "quiet", "verbose", "live", "trial", "track"}
    )
    return RunPlan(
        workload,
        backend,
        strategy,
        {
            **shown,
            "workload": name,
            name: _plain(workload.options),
            "backends": {merged.common.backend: _plain(backend.options)},
            "strategies": {merged.common.strategy: _plain(strategy.options)},
        },
    )


def served(name: str, setup: Setup, merged: settings.Settings) -> tuple[Backend, Strategy]:
    """The backend and the strategy that the settings name, for the command `name`. Raises what `build` does."""
    common = merged.common
    serving = registry.load("backends", common.backend)
    if setup.model is not None and setup.model.kind not in serving.serves:
        raise UsageError(
            f"{name} has a model of {setup.model.kind}, and the backend '{common.backend}' serves "
            f"{' and '.join(serving.serves)}. Choose another with --backend; `gpuinfer plugins list` names them."
        )
    if setup.model is not None and setup.model.arguments.get("trust_remote_code") and not serving.remote_code:
        raise UsageError(
            "--trust-remote-code: code that comes with a checkpoint is never run here. Leave the flag out, or have "
            "vLLM run it: --backend vllm."
        )
    if not serving.several_devices:
        setup.device  # noqa: B018  raises for several
    backend = _made("backends", common.backend, merged, setup)
    if common.fallback is not None:
        from gpuinfer.backends.fallback import with_fallback

        local = registry.load("backends", common.fallback)
        local_options = merged.options("backends", common.fallback, local)
        backend = with_fallback(backend, common.backend, common.fallback, local, local_options)
    return backend, _made("strategies", common.strategy, merged, setup)


def served_plainly(name: str, setup: Setup, merged: settings.Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that were given for the backend and the strategy, checked as `served` does, to be made later."""
    if merged.common.fallback is not None:
        raise UsageError(
            f"{merged.origin('fallback')}: a fallback is for a run, and {name} serves others. Leave it out: "
            "with -B restart=true a central server comes back, and --replicas 2 answers while one is gone."
        )
    backend, strategy = served(name, setup, merged)
    return _given_of(merged, "backends", merged.common.backend, backend), _given_of(
        merged, "strategies", merged.common.strategy, strategy
    )


def _given_of(merged: settings.Settings, kind: str, name: str, made: Backend | Strategy) -> dict[str, Any]:
    """Those alone that somebody gave, as the plugin understood them."""
    given = merged.options(kind, name, registry.load(kind, name))
    plain = _plain(made.options)
    return {key: plain.get(key, value) for key, value in given.items()}


def _made(kind: str, name: str, merged: settings.Settings, setup: Setup) -> Any:
    plugin = registry.load(kind, name)
    return blame.make(plugin, setup, merged.options(kind, name, plugin))


def _plain(options: Any) -> dict[str, Any]:
    return options.model_dump(mode="json") if isinstance(options, BaseModel) else {}
