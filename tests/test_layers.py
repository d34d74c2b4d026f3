"""Imports point down only, and nothing heavy is imported before it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gpuinfer"

# From the top down. A module imports from layers below its own, and from its own package or file; never across a layer.
LAYERS = [
    ["gpuinfer.__main__"],
    ["gpuinfer.cli"],
    [
        "gpuinfer.bench",
        "gpuinfer.loop",
        "gpuinfer.memory",
        "gpuinfer.packages",
        "gpuinfer.screen",
        "gpuinfer.serving",
        "gpuinfer.testing",
        "gpuinfer.verifying",
    ],
    [
        "gpuinfer.backends",
        "gpuinfer.runtime",
        "gpuinfer.strategies",
        "gpuinfer.workloads.generate",
        "gpuinfer.workloads.load",
        "gpuinfer.workloads.rollouts",
        "gpuinfer.workloads.selfplay",
        "gpuinfer.workloads.train",
        "gpuinfer.workloads",
    ],
    ["gpuinfer.central", "gpuinfer.fleet", "gpuinfer.peers", "gpuinfer.simulate", "gpuinfer.vllm"],
    [
        "gpuinfer.engine",
        "gpuinfer.load",
        "gpuinfer.monitoring",
        "gpuinfer.openai",
        "gpuinfer.report",
        "gpuinfer.rollouts",
        "gpuinfer.routing",
        "gpuinfer.text",
    ],
    ["gpuinfer.models", "gpuinfer.trace"],
    ["gpuinfer.config", "gpuinfer.http", "gpuinfer.manual", "gpuinfer.positions", "gpuinfer.stats"],
    ["gpuinfer.host", "gpuinfer.student", "gpuinfer.units", "gpuinfer.unmasked"],
    ["gpuinfer.api", "gpuinfer.generation", "gpuinfer.gradients"],
    ["gpuinfer.errors", "gpuinfer"],
]
ONLY_IN = {"typer": ["gpuinfer.cli"], "rich": ["gpuinfer.screen.display", "gpuinfer.screen.page"]}
HEAVY = {
    "torch": [
        "gpuinfer.memory.rows",  # which a child process alone imports
        "gpuinfer.memory.staged_rows",
        "gpuinfer.memory.staged_text",
        "gpuinfer.memory.text",
        "gpuinfer.models",
        "gpuinfer.positions.dataset",
        "gpuinfer.text",
        "gpuinfer.workloads.train.checkpoints",
        "gpuinfer.workloads.train.stepping",
    ],
    "numba": ["gpuinfer.workloads.selfplay", "gpuinfer.models", "gpuinfer.text"],
    "matplotlib": [],
    "opentelemetry": [],
    "prometheus_client": [],
    "ray": [],
    "uvloop": [],
}


@cache
def modules() -> dict[str, ast.Module]:
    """All files, read when the first test asks: not by each process that collects the tests."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


@cache
def imports(name: str) -> list[tuple[str, bool]]:
    """Each module or name that a file imports, and whether it is imported as soon as the file is."""
    return list(_imports(modules()[name]))


def _imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types(function)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in lazy


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def inside(name: str, prefix: str) -> bool:
    return name == prefix or (prefix != "gpuinfer" and name.startswith(prefix + "."))


def layer(name: str) -> tuple[int, str]:
    """The layer of a module, or of a name that is imported from one, counted from the top."""
    for level, members in enumerate(LAYERS):
        for member in members:
            if inside(name, member):
                return level, member
    if name.count(".") == 1 and not (PACKAGE / f"{name.split('.')[1]}.py").exists():
        return layer("gpuinfer")  # a name from the package itself, such as __version__
    raise AssertionError(f"{name} has no layer: give it one in LAYERS")


def test_every_module_has_a_layer():
    assert {name: layer(name)[1] for name in modules()}


def found_in_modules(faults_of):
    """What there is to say against each file, if anything. One test for all: so many small ones take ten seconds."""
    return {name: faults for name in modules() if (faults := list(faults_of(name)))}


def test_imports_point_down():
    def upward(name):
        own_level, own = layer(name)
        for target, now in imports(name):
            if inside(target, "gpuinfer") or target.startswith("gpuinfer."):
                level, member = layer(target)
                if member != own and level <= own_level and now:
                    yield target

    assert found_in_modules(upward) == {}


def out_of_place(name, libraries, *, at_once):
    for library, places in libraries.items():
        if not any(inside(name, place) for place in places):
            yield from (target for target, now in imports(name) if inside(target, library) and (now or not at_once))


def test_a_library_for_the_screen_is_imported_in_its_place_only():
    assert found_in_modules(lambda name: out_of_place(name, ONLY_IN, at_once=False)) == {}


def test_heavy_libraries_are_imported_where_they_are_used():
    assert found_in_modules(lambda name: out_of_place(name, HEAVY, at_once=True)) == {}


def test_no_two_files_import_one_another():
    inside_of = {name: sorted(_modules_in(name)) for name in modules()}
    done: dict[str, bool] = {}  # False while it is followed

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert done.get(name, True), f"a circle of imports: {' → '.join((*way[way.index(name) :], name))}"
        if name not in done:
            done[name] = False
            for target in inside_of[name]:
                follow(target, (*way, name))
            done[name] = True

    for name in modules():
        follow(name, ())


def _modules_in(name: str) -> set[str]:
    """The files that a file imports, at once or later; a name stands for the file that it comes from."""
    found = {target if target in modules() else target.rpartition(".")[0] for target, _ in imports(name)}
    return {target for target in found if target in modules() and target != name}


def test_no_plugin_is_named_by_the_engine():
    plugins = ("gpuinfer.backends", "gpuinfer.strategies", "gpuinfer.workloads")
    for name in modules():
        if name.startswith("gpuinfer.engine"):
            assert not [target for target, _ in imports(name) if target.startswith(plugins)]


def test_a_workload_is_known_by_its_entry_point_alone():
    """But to the kit, which tries games with the engine that plays them."""
    for name in modules():
        if not name.startswith(("gpuinfer.workloads", "gpuinfer.testing")):
            assert [target for target, _ in imports(name) if inside(target, "gpuinfer.workloads")] == [], name


FORBIDDEN = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}


def test_nothing_is_unpickled():
    assert found_in_modules(unpickling) == {}


def unpickling(name):
    yield from (target for target, _ in imports(name) if target.split(".")[0] in FORBIDDEN)
    for node in ast.walk(modules()[name]):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        called = ast.unparse(node.func)
        if called == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
            yield "np.load without allow_pickle=False"
        if node.func.attr == "recv" and "line" in called:
            yield f"{called} unpickles: use recv_bytes"
