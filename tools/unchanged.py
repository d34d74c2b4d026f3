"""Which tests need not run again on this machine: they passed here, and nothing that they depend on has changed since.

    python -m tools.unchanged changed thorough    prints the test files that have to run, one a line
    python -m tools.unchanged passed thorough     notes, after they have run, that those files passed
    python -m tools.unchanged changed one-file    prints `one-file` when that stage has to run
    python -m tools.unchanged passed one-file

A test file depends on itself, on the helpers of the tests and the modules of gpuinfer that it imports, at once or in a
function, on what those import, and on modules that any of them names in a string. A test that starts commands, finds
plugins or reads sources depends on all of gpuinfer. Any other stage depends on every file of the repository. Everything
depends on COMMON, on the interpreter, on the processor and on the installed versions.

What passed is noted outside the repository, in `$XDG_CACHE_HOME/gpuinfer-tests`: a new machine runs everything.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import marked  # type: ignore[import-not-found]  # noqa: E402 (found by the line above)

COMMON = (
    ".ci/run",
    "Makefile",
    "constraints.txt",
    "pyproject.toml",
    "tests/conftest.py",
    "tests/counts.py",
    "tests/marked.py",
    "tools/unchanged.py",
)
OTHERS = ("soak", "gpu", "system", "vllm", "docs", "binary", "dist", "real")
BY_FILE = {
    "thorough": " and not ".join(["thorough", *OTHERS])
}  # stages that run test files: what they give to pytest -m
USES_ALL = re.compile(  # starts commands or processes, finds plugins, or reads source files
    r"\bsubprocess\b|\bPopen\b|\bexecute\(|gpuinfer\.cli\b|\bgpuinfer\(|config\.registry\b|\bmultiprocessing\b"
    r"|\"gpuinfer\"|gpuinfer\.__file__|\brglob\b"
)
FACE = "gpuinfer/__init__.py"
MODULE = re.compile(r"\bgpuinfer(?:\.\w+)+")


@functools.cache
def files() -> tuple[str, ...]:
    """Every file that git knows or would add, from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(sorted(path for path in set(listed) if (ROOT / path).is_file()))


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_text(errors="replace")


@functools.cache
def modules() -> dict[str, str]:
    """Importable names and their files: of gpuinfer, and the helpers of the tests by their bare names."""
    found = {}
    for path in files():
        if path.startswith("gpuinfer/") and path.endswith(".py"):
            found[path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = path
        elif path.startswith("tests/") and path.endswith(".py"):
            found.setdefault(Path(path).stem, path)
    return found


@functools.cache
def face() -> dict[str, str]:
    """The names that `import gpuinfer` offers, and the modules that they are imported from."""
    if FACE not in files():
        return {}
    places = re.search(r"^_PLACES = (\{.*?^\})", text(FACE), re.M | re.S)
    found = ast.literal_eval(places[1]) if places else {}
    return {f"gpuinfer.{name}": f"gpuinfer.{place.partition(':')[0]}" for name, place in found.items()}


@functools.cache
def needs(path: str) -> frozenset[str]:
    """The files that one file imports, or names: as a module, or as a file beside it."""
    if path == FACE:  # which imports a part when one of its names is used: `gpuinfer.Batcher`
        return frozenset()
    names = set(MODULE.findall(text(path)))
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    known = modules()
    names |= {place for name in names if (place := face().get(name))}
    siblings = {f"{path.rpartition('/')[0]}/{name}" for name in re.findall(r'"(\w+\.py)"', text(path))}
    return frozenset(known[name] for whole in names for name in prefixes(whole) if name in known) | siblings & set(
        files()
    )


def prefixes(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b` and `a`: importing a module runs the packages around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def closure(path: str) -> set[str]:
    """All files that a test file depends on."""
    found, waiting = {path}, [path]
    while waiting:
        for needed in needs(waiting.pop()) - found:
            found.add(needed)
            waiting.append(needed)
    if any(USES_ALL.search(text(each)) for each in found if not each.startswith("gpuinfer/")):
        found |= {each for each in files() if each.startswith(("gpuinfer/", "plugins/"))}
    folder = path.rpartition("/")[0]
    return found | {
        each for each in files() if each.startswith(f"{folder}/") and not Path(each).name.startswith("test_")
    }


@functools.cache
def machine() -> str:
    """What results depend on besides files: interpreter, processor and installed versions."""
    processor = Path("/proc/cpuinfo")
    flags = re.findall(r"^(?:flags|model name)\s*:.*", processor.read_text(), re.M) if processor.exists() else []
    installed = sorted(f"{each.name}=={each.version}" for each in importlib.metadata.distributions())
    return "\n".join([sys.version, platform.machine(), *sorted(set(flags)), *installed])


def digest(name: str, paths: Iterable[str]) -> str:
    """Of all that decides whether a test file, or a stage, passes."""
    whole = hashlib.sha256(f"{name}\n{machine()}".encode())
    for path in sorted({*paths, *COMMON}):
        whole.update(f"\0{path}\0".encode() + (ROOT / path).read_bytes())
    return whole.hexdigest()


def inputs(stage: str) -> dict[str, set[str]]:
    """What a stage runs, and the files that each of those depends on."""
    if stage in BY_FILE:
        tests = [path for path in files() if re.match(r"(tests|plugins)/.*test_[^/]*\.py$", path)]
        return {path: closure(path) for path in tests if marked.may_hold(ROOT / path, BY_FILE[stage])}
    return {stage: set(files())}


def noted() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuinfer-tests"


def main(arguments: list[str]) -> int:
    match arguments:
        case ["changed", stage]:
            for name, paths in inputs(stage).items():
                if not (noted() / digest(f"{stage} {name}", paths)).exists():
                    print(name)
        case ["passed", stage]:
            noted().mkdir(parents=True, exist_ok=True)
            for name, paths in inputs(stage).items():
                (noted() / digest(f"{stage} {name}", paths)).touch()
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
