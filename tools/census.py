"""Counts what the house holds, and lists names that occur twice and words that only we use.

    python -m tools.census             parts, files, lines, functions, names that occur twice, tests by the front door
    python -m tools.census --new       what tools/census.txt does not list yet: CI prints it and fails
    python -m tools.census --accept    writes tools/census.txt anew: what is there now is known

A name occurs twice when two files of `gpuinfer/` define a class or a public function of that name at the top level. A
word that only we use is one of WORDS, where the field says otherwise: tools/census.txt lists how often each may occur.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ROOT / "tools" / "census.txt"

# A word of ours, and what the field says.
WORDS = {
    "asked": "requested, options, prompts",
    "asking": "request, client",
    "beside": "next to, with, concurrent",
    "bury": "close, reap",
    "casting": "roles",
    "course": "loop, schedule, runner",
    "crowd": "concurrency",
    "desk": "server",
    "foretold": "predicted",
    "given": "options, passed",
    "giving": "emit",
    "handing": "handoff",
    "heeds": "supports",
    "insist": "retry",
    "lies": "is stored",
    "looks": "experiment",
    "nobody": "no client, no caller",
    "obituary": "exit message",
    "outlet": "writer",
    "rehearsal": "trial run",
    "rig": "setup",
    "said": "message, reported",
    "seams": "interfaces",
    "seat": "slot, agent, player",
    "shown": "rendered",
    "spoken": "message",
    "story": "summary",
    "telling": "report",
    "told": "given, formatted, reported",
    "trip": "proxied request",
    "troubles": "failures",
    "visitor": "external worker",
    "wheel": "timer",
    "whoever": "the caller, the client",
    "witness": "probe",
}
FRONT_DOORS = re.compile(
    r"CliRunner|gpuinfer\.cli|\bexecute\(|subprocess|Popen|\bserving\(|httpx|http\.client|ClientSession|\brun_cli|\bcommand\("
)


def sources(folder: str = "gpuinfer") -> dict[str, str]:
    """Path from the root, and text, of each Python file that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {path: (ROOT / path).read_text() for path in sorted(set(listed)) if (ROOT / path).exists()}


def kinds_of_lines(text: str) -> Counter[str]:
    """How many lines are code, docstring, blank, import or comment alone."""
    kinds: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), "import")
        elif (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            first = node.body[0]
            kinds |= dict.fromkeys(range(first.lineno, (first.end_lineno or 0) + 1), "docstring")
    counted: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        kind = kinds.get(number) or ("comment" if line.lstrip().startswith("#") else "code")
        counted[kind if line.strip() or kind == "docstring" else "blank"] += 1
    return counted


def functions(tree: ast.AST) -> Iterator[int]:
    """Lines of each function's body, without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            yield (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def defined_twice(files: dict[str, str]) -> dict[str, list[str]]:
    """Classes and public functions that more than one file defines, with those files."""
    where: dict[str, set[str]] = defaultdict(set)
    for path, text in files.items():
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.ClassDef) or not node.name.startswith("_"):
                where[node.name].add(path)
    return {name: sorted(paths) for name, paths in sorted(where.items()) if len(paths) > 1}


def words(text: str) -> Iterator[str]:
    """Each word of a file's names, docstrings and comments, in small letters; other strings are what a user reads."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        documents = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        if documents or token.type in (tokenize.NAME, tokenize.COMMENT):
            yield from (word.lower() for word in re.findall(r"[A-Z]?[a-z]+", token.string))


def private_words(files: dict[str, str]) -> Counter[str]:
    """How often each of WORDS occurs."""
    return Counter(word for text in files.values() for word in words(text) if word in WORDS)


def front_door(files: dict[str, str]) -> tuple[int, int]:
    """Test functions in files that start commands, servers or processes, and all test functions."""
    through = total = 0
    for text in files.values():
        tests = len(re.findall(r"^\s*(?:async )?def test_", text, re.M))
        total += tests
        through += tests if FRONT_DOORS.search(text) else 0
    return through, total


def figures() -> Iterator[tuple[str, str]]:
    """What the house holds, as rows of a table."""
    files, tests = sources(), sources("tests")
    parts = {path.split("/")[1] for path in files if path.count("/") > 1}
    lines: Counter[str] = sum((kinds_of_lines(text) for text in files.values()), Counter())
    bodies = [size for text in files.values() for size in functions(ast.parse(text))]
    through, total = front_door(tests)
    yield "parts", str(len(parts))
    yield "files", str(len(files))
    yield "files under 60 lines", str(sum(text.count("\n") < 60 for text in files.values()))
    yield "lines", f"{sum(lines.values()):,}"
    for kind in ("code", "docstring", "blank", "import", "comment"):
        yield f"  {kind}", f"{lines[kind]:,}"
    yield "functions", f"{len(bodies):,}"
    yield "  median lines of a body", f"{statistics.median(bodies):g}"
    twice = defined_twice(files)
    yield "names that occur twice", str(len(twice))
    yield "  of classes", str(sum(name.lstrip("_")[0].isupper() for name in twice))
    yield "words that only we use", f"{private_words(files).total():,}"
    yield "lines of tests", f"{sum(text.count(chr(10)) for text in tests.values()):,}"
    yield "files of tests", str(len(tests))
    yield "tests by a front door", f"{through:,} of {total:,} ({through / total:.0%})"


def findings() -> Iterator[str]:
    """A line for each name that occurs twice, and for each word that only we use, with its count."""
    files = sources()
    for name in defined_twice(files):
        yield f"twice {name}"
    for word, count in sorted(private_words(files).items()):
        yield f"word {word} {count}"


def new(found: list[str], known: list[str]) -> Iterator[str]:
    """What is found and not known: a name, or a word more often than it was known to occur."""
    allowed = {line.split()[1]: int(line.split()[2]) for line in known if line.startswith("word ")}
    for line in found:
        kind, name, *count = line.split()
        if kind == "twice" and line not in known:
            yield f"{name} is defined in more than one file of gpuinfer/: find it a name of its own"
        elif kind == "word" and int(count[0]) > allowed.get(name, 0):
            yield f"“{name}” occurs {count[0]} times, {allowed.get(name, 0)} are known. The field says: {WORDS[name]}"


def main(arguments: list[str]) -> int:
    if arguments == ["--accept"]:
        KNOWN.write_text("".join(f"{line}\n" for line in findings()))
        return 0
    if arguments == ["--new"]:
        found = list(new(list(findings()), KNOWN.read_text().splitlines()))
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    width = max(len(name) for name, _ in figures())
    for name, value in figures():
        print(f"{name:<{width}}  {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
