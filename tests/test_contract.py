"""What is asked of a plugin stands in `gpuinfer.api`: nothing is looked up by a name that it does not declare."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import pytest

from gpuinfer import api
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.backends.standin import StandIn
from gpuinfer.errors import UsageError

PACKAGE = Path(__file__).parent.parent / "gpuinfer"
PLUGINS = re.compile(r"(^|\.)_?(workload|backend|strategy|infer|plugin|built)(\.options)?$")
MAY_BE_MISSING = {"limits", "Options"}  # of a plugin that breaks the contract, or has not been started


def lookups():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
                of, name = node.args[:2]
                if PLUGINS.search(ast.unparse(of)) and isinstance(name, ast.Constant):
                    yield str(path.relative_to(PACKAGE)), ast.unparse(of), name.value


def test_no_hook_of_a_plugin_is_found_by_its_name():
    assert {found for found in lookups() if found[2] not in MAY_BE_MISSING} == set()


def test_nothing_is_set_on_a_backend_from_outside():
    """It is told of its run by `start` alone."""
    told = {
        (str(path.relative_to(PACKAGE)), ast.unparse(target))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for one in node.targets
        for target in (one.elts if isinstance(one, ast.Tuple) else [one])
        if re.fullmatch(r"(\w+\.)*_?backend\.\w+", ast.unparse(target))
    }
    assert told == set()


@pytest.mark.parametrize("kind", [api.Plugin, api.Backend, api.Strategy, api.Infer, api.Workload])
def test_every_method_of_the_contract_says_what_it_promises(kind):
    silent = {"__init__", "__call__", "_abc_impl"}
    public = {name: one for name, one in vars(kind).items() if not name.startswith("_") and name not in silent}
    found = [one.fget if isinstance(one, property) else one for one in public.values()]
    assert [one.__qualname__ for one in found if inspect.isfunction(one) and not inspect.getdoc(one)] == []


@pytest.mark.parametrize("backend", [InProcess, Central, StandIn])
def test_a_backend_whose_weights_cannot_be_exchanged_says_so(backend):
    one = backend()
    assert not one.updates
    with pytest.raises(UsageError, match=r"cannot change its weights while it runs\. End the run"):
        asyncio.run(one.update("v1", "somewhere"))
