"""Writes docs/reference/ (commands, plugins, report, metrics, contract) and the report's JSON Schema from the code.

    python -m tools.reference              write them
    python -m tools.reference --check      say which are not as the code is, and exit 1

The pages are kept in the repository, so that `gpuinfer docs` finds options wherever it runs; a test compares them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuinfer import api
from gpuinfer.cli.plugins import PREFIXES
from gpuinfer.config import options, registry
from gpuinfer.config.registry import KINDS
from gpuinfer.report import document
from tools import tree
from tools.tree import OURS, Command, Parameter

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "reference"
REPORT_SCHEMA = ROOT / "gpuinfer" / "report.schema.json"
SCHEMAS = {
    "report.schema.json": "The report of a run",
    "lab/bench/schema.json": "What `bench` writes",
    "memory.schema.json": "What `memory` writes",
}
EVERYWHERE = "Everywhere"
DUNDERS = ("__aiter__", "__anext__", "__call__")  # of the contract, worth telling


def pages() -> dict[str, str]:
    """Each page by its file's name."""
    everything = tree.commands()
    return {
        "commands.md": _page("Commands and options", COMMANDS, _commands(everything)),
        "plugins.md": _page("Built-in plugins and their options", PLUGINS, _plugins()),
        "report.md": _page("Fields of the report", REPORT, _report()),
        "metrics.md": _page("Metrics", METRICS, _metrics()),
        "contract.md": _page("The contract of plugins", CONTRACT, _contract()),
    }


COMMANDS = """Every command with its arguments and options, as `--help` tells them. A setting comes from the flag,
then from `GPUINFER_…` in the environment, then from `gpuinfer.toml`, then from the default; `gpuinfer config` shows
what is in force. Exit codes: 0 done, 1 failed, 2 bad usage, 3 stopped with work left and resumable, 4 a check that
was asked for did not hold."""
PLUGINS = """What is built in, by kind, with the options of each. `gpuinfer plugins list` names what is installed with
you, `gpuinfer plugins show KIND NAME` says the same of one as this page. [Writing your own](../plugins.md)."""
REPORT = """What `--json FILE` writes, and what `bench` writes. A field is named by its path: `throughput.rows_per_s`;
`[]` is each element of a list, `*` any key. The schemas lie in the package, beside the code that writes them."""
METRICS = (
    """What `/metrics` of a server exposes, for Prometheus. What to ask of them: [monitoring](../monitoring.md)."""
)
CONTRACT = """`gpuinfer.api`: all that the author of a backend, a strategy or a workload reads, as its source says it.
How to write one: [plugins](../plugins.md), [a strategy](../own-strategy.md)."""
GENERATED = "<!-- Written by tools/reference.py from the code: change that, and run `make reference`. -->"


def _page(title: str, about: str, blocks: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", GENERATED, about, *blocks]) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Commands


def _commands(everything: list[Command]) -> Iterator[str]:
    yield f"## Options of every workload\n\n{_options(_shared(everything))}"
    for command in everything:
        yield _command(command, everything)


def _shared(everything: list[Command]) -> list[Parameter]:
    """Those that are the same for each workload."""
    own = [command.parameters for command in everything if command.words[1:] in _workloads()]
    return [one for one in own[0] if one.panel == EVERYWHERE and all(one in other for other in own)]


def _workloads() -> list[tuple[str, ...]]:
    return [(name,) for name in registry.names("workloads")]


def _command(command: Command, everything: list[Command]) -> str:
    blocks = [f"## {command.name}", command.text, f"`{command.name} {command.usage}`"]
    common = _shared(everything)
    told = [one for one in tree.own(command, everything) if one not in common]
    if told:
        blocks.append(_options(told))
    if workload := tree.workload_of(command):
        blocks.append(
            f"Besides these: the options of [gpuinfer {workload}](#gpuinfer-{workload}) and of every workload."
        )
    elif any(one in common for one in command.parameters):
        blocks.append(_besides(command, common))
    if command.commands and command.words != (OURS,):
        blocks.append("Commands below it: " + ", ".join(f"`{word}`" for word in command.commands) + ".")
    return "\n\n".join(block for block in blocks if block)


def _besides(command: Command, common: list[Parameter]) -> str:
    lacks = [one for one in common if one not in command.parameters]
    there = [one for one in common if one in command.parameters]
    link = "[of every workload](#options-of-every-workload)"
    if not lacks:
        return f"Besides these: the options {link}."
    return f"Besides these, {link}: " + ", ".join(f"`{one.flags[0]}`" for one in there) + "."


def _options(parameters: Sequence[Parameter]) -> str:
    rows = [(_spelled(one), one.text, f"`{one.default}`" if one.default else "") for one in parameters]
    return _table(("option", "what", "default"), rows)


def _spelled(one: Parameter) -> str:
    flags = ", ".join(f"`{flag}`" for flag in one.flags[:-1])
    last = f"`{one.flags[-1]}{f' {one.metavar}' if one.metavar else ''}`"
    return f"{flags}, {last}" if flags else last


# Plugins


def _plugins() -> Iterator[str]:
    for kind, word in KINDS.items():
        names = [record.name for record in registry.listing(kind) if record.distribution == OURS]
        yield f"## {kind.capitalize()}"
        for name in names:
            yield _plugin(kind, word, name)


def _plugin(kind: str, word: str, name: str) -> str:
    plugin = registry.load(kind, name)
    blocks = [f"### {word} {name}", inspect.getdoc(plugin) or ""]
    if kind == "workloads":  # its options are flags of its own
        return "\n\n".join([*blocks, f"Its options: [gpuinfer {name}](commands.md#gpuinfer-{name})."])
    prefix = {**PREFIXES, "environments": "--env-option {}="}.get(kind, "--{}")
    rows = []
    for key, field in options.fields_of(plugin.Options).items() if hasattr(plugin, "Options") else ():
        shown = prefix.format(key if "=" in prefix else key.replace("_", "-"))
        allowed = ", ".join(f"`{choice}`" for choice in options.choices(field.annotation))
        default = options.default_text(field)
        text = "; ".join(filter(None, [field.description or "", allowed]))
        rows.append((f"`{shown}`", text, f"`{default}`" if default else ""))
    return "\n\n".join([*blocks, _table(("option", "what", "default"), rows) if rows else "It has no options."])


# The report


def _report() -> Iterator[str]:
    for name, title in SCHEMAS.items():
        schema = json.loads((ROOT / "gpuinfer" / name).read_text())
        yield f"## {title}"
        yield f"`gpuinfer/{name}`"
        yield _table(("field", "type", "what"), _fields(schema, schema, ""))


def _fields(schema: Mapping[str, Any], whole: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    """Path, type and description of everything below; a definition that several fields share is told for each."""
    schema = _followed(schema, whole)
    for name, one in schema.get("properties", {}).items():
        yield from _field(one, whole, f"{path}.{name}".lstrip("."))
    if isinstance(more := schema.get("additionalProperties"), dict) and more:
        yield from _field(more, whole, f"{path}.*".lstrip("."))
    if isinstance(items := schema.get("items"), dict):
        yield from _fields(items, whole, f"{path}[]")
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _fields(branch, whole, path)


def _field(one: Mapping[str, Any], whole: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    followed = _followed(one, whole)
    yield f"`{path}`", _kind(followed, whole), followed.get("description", "")
    yield from _fields(followed, whole, path)


def _followed(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    target: Any = whole
    for step in reference.removeprefix("#/").split("/"):
        target = target[step]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}


def _kind(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    branches = [
        _kind(_followed(branch, whole), whole) for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    ]
    kinds = schema.get("type", branches or "any")
    several = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(dict.fromkeys(several))


# Metrics


def _metrics() -> Iterator[str]:
    sys.path.insert(0, str(ROOT / "tests"))  # who knows how to have everything counted
    from monitoring.exposed import everything, name_of

    rows = []
    for family in everything():
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        rows.append((f"`{name_of(family)}`", family.type, ", ".join(labels), family.documentation))
    yield _table(("metric", "type", "labels", "what"), rows)


# The contract


def _contract() -> Iterator[str]:
    source = inspect.getsource(api)
    body = ast.parse(source).body
    yield inspect.cleandoc(api.__doc__ or "").partition("\n\n")[2]
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _class(node, source)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"## {node.name}\n\n{_code(_signature(node, source))}\n\n{_doc(node)}"
        elif (name := _assigned(node)) and (text := _string(after)):
            yield f"## {name}\n\n{_code(ast.get_source_segment(source, node) or '')}\n\n{text}"


def _class(node: ast.ClassDef, source: str) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"## {node.name}\n\n{_code(f'class {node.name}({bases})' if bases else f'class {node.name}')}\n\n{_doc(node)}"
    fields = list(_attributes(node, source))
    if fields:
        yield _table(("field", "default", "what"), fields)
    for one in node.body:
        public = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and (
            not one.name.startswith("_") or one.name in DUNDERS
        )
        if public:
            assert isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            yield f"### {node.name}.{one.name}\n\n{_code(_signature(one, source))}\n\n{_doc(one)}".strip()


def _attributes(node: ast.ClassDef, source: str) -> Iterator[tuple[str, str, str]]:
    """Fields and members of an enumeration, with the comment behind each or the text below it."""
    lines = source.splitlines()
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        name = _assigned(one)
        if not name or name.startswith("_") or name == "model_config":
            continue
        assert isinstance(one, ast.Assign | ast.AnnAssign)
        kind = f": {ast.unparse(one.annotation)}" if isinstance(one, ast.AnnAssign) else ""
        default = f"`{ast.unparse(one.value)}`" if one.value is not None else ""
        comment = re.search(r"\s#\s(.*)$", lines[(one.end_lineno or one.lineno) - 1])
        yield f"`{name}{kind}`", default, _string(after) or (comment[1] if comment else "")


def _assigned(node: ast.stmt) -> str:
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    return target.id if isinstance(target, ast.Name) else ""


def _string(node: ast.stmt | None) -> str:
    """The text of a string that stands below what it describes."""
    value = node.value if isinstance(node, ast.Expr) else None
    found = value.value if isinstance(value, ast.Constant) else None
    return inspect.cleandoc(found) if isinstance(found, str) else ""


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> str:
    """As it is written, without its body."""
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno]
    text = "\n".join(lines)
    head = text[: _end_of_head(text)]
    decorators = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list)
    return decorators + inspect.cleandoc(head)


def _end_of_head(text: str) -> int:
    """Where the colon stands that ends `def f(a: int) -> int:`."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == ":" and depth == 0:
            return index
    return len(text)


def _doc(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.get_docstring(node) or ""


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def main(words: Sequence[str]) -> int:
    schema = json.dumps(document.json_schema(), indent=2, ensure_ascii=False) + "\n"
    if "--check" not in words:
        REPORT_SCHEMA.write_text(schema, encoding="utf-8")  # first: one of the pages is made from it
    written = {REPORT_SCHEMA: schema} | {FOLDER / name: text for name, text in pages().items()}
    stale = [file for file, text in written.items() if _written(file) != text]
    if "--check" in words:
        for file in stale:
            print(f"{file.relative_to(ROOT)} is not as the code is: run `make reference`.")
        return bool(stale)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in stale:
        file.write_text(written[file], encoding="utf-8")
    return 0


def _written(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
