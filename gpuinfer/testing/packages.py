"""Every plugin of an installed package, loaded by entry point and checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpuinfer import registry
from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.testing.backends import check_backend
from gpuinfer.testing.findings import Finding
from gpuinfer.testing.strategies import check_strategy
from gpuinfer.testing.workloads import check_workload

SETUP = Setup(model=ModelSpec("gpuinfer.testing.fakes:tiny_model", inputs=8), device="cpu")
"""What the plugins are built with: their default options, and a model that costs nothing."""

CHECKS: dict[str, Callable[[Callable[[], Any]], list[Finding]]] = {
    "backends": check_backend,
    "strategies": check_strategy,
    "workloads": check_workload,
}


def check_package(package_name: str) -> list[Finding]:
    """Load each plugin that the installed package offers, and check it with its default options.

    Raises `UsageError` when the package is not installed or offers no plugin.
    """
    records = [record for record in registry.listing() if _same(record.distribution, package_name)]
    if not records:
        raise UsageError(_no_plugins(package_name))
    return [finding for record in records for finding in _check(record)]


def _check(record: registry.Record) -> list[Finding]:
    name = f"{registry.KINDS[record.kind]} {record.name}"
    try:
        plugin = registry.load(record.kind, record.name)
    except GpuinferError as error:
        return [Finding("loads", False, str(error)).of(name)]
    check = CHECKS.get(record.kind)
    findings = check(lambda: plugin(SETUP)) if check else []
    return [finding.of(name) for finding in (Finding("loads", True), *findings)]


def _no_plugins(package_name: str) -> str:
    offering = sorted({record.distribution for record in registry.listing()})
    return (
        f"no installed package '{package_name}' offers a plugin. Install it (pip install {package_name}), or give its "
        f'pyproject.toml an entry point such as [project.entry-points."gpuinfer.backends"]. '
        f"Packages with plugins: {', '.join(offering) or 'none'}."
    )


def _same(first: str, second: str) -> bool:
    return _plain(first) == _plain(second)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
