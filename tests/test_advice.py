"""Advice that can be followed: each flag, option and command that a message names is there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from gpuinfer.cli import bench_serve, subcommands
from gpuinfer.cli.workload import command
from gpuinfer.cli.workload_targets import WorkloadTargets
from gpuinfer.config import foreign_names, options, registry

PACKAGE = Path(__file__).parent.parent / "gpuinfer"
WORKLOADS = ("selfplay", "load", "generate", "rollouts", "train")
OTHERS = {
    "--force-reinstall",
    "--no-deps",
    "--upgrade",
    "--enable-lora",
    "--query-gpu",
    "--format",
    "--local-dir",
    "--logdir",
    "--from-literal",
    "--from-file",
    "--now",
    "--no-such-flag",
    "--runner",
}  # flags of programs that are not ours
OTHER_PROGRAMS = (
    "launchers/slurm",
    "launchers/srun",
    "config/packages/installer.py",
)  # write commands of SLURM's, pip's and uv's
WHERE_INSTALLED = {
    ("vllm", "text/checkpoint/config_keys.py"),
    ("vllm", "serving/openai/model_options.py"),
    ("vllm", "cli/building.py"),
}  # said only then, or as such
OF_NEW_PACKAGES = {("config/packages/template.py", "share")}  # the strategy that is written has it
FLAG = re.compile(r"(?<![\w/.-])--([a-z][a-z-]*[a-z])")
OPTION = re.compile(r"(?<![\w-])-([BS]) ([a-z][a-z_]*)")
PLUGIN = re.compile(r"--(backend|strategy) (?!out\b|names\b|a\b)([a-z]+)")
COMMAND = re.compile(r"`gpuinfer ([a-z]+)(?: ([a-z][a-z-]*[a-z]))?")


def texts(path: Path) -> Iterator[str]:
    """What a file says, apart from docstrings: each text in one piece, however it is put together."""
    tree = ast.parse(path.read_text())
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (silent | inner):
            yield node.value


@cache
def said() -> list[tuple[Path, str]]:
    return [(path, text) for path in sorted(PACKAGE.rglob("*.py")) for text in texts(path)]


@cache
def commands() -> dict[str, Any]:
    own = {
        name: typer.main.get_command(importlib.import_module(f"gpuinfer.cli.{name}").app) for name in registry.COMMANDS
    }
    return own | {name: command(name) for name in WORKLOADS}


@cache
def flags() -> frozenset[str]:
    found: set[str] = {"--version", "--help"}
    for one in commands().values():
        below = [one.target(name) for name in WORKLOADS] if isinstance(one, WorkloadTargets) else []
        below += [bench_serve.command()]
        below += [subcommands.command(name, word) for name, words in subcommands.WORDS.items() for word in words]
        below += list(getattr(one, "commands", {}).values())
        for each in (one, *below):
            for parameter in each.params:
                found |= {*parameter.opts, *parameter.secondary_opts}
    return frozenset(found)


@cache
def keys(kind: str) -> frozenset[str]:
    own = [record for record in registry.listing(kind) if record.distribution == "gpuinfer"]
    return frozenset(key for one in own for key in options.fields_of(registry.load(kind, one.name).Options))


def named(pattern: re.Pattern[str]) -> set[tuple[str, tuple[str, ...]]]:
    """Where, and what."""
    return {
        (str(path.relative_to(PACKAGE)), found.groups()) for path, text in said() for found in pattern.finditer(text)
    }


def test_each_flag_that_is_named_is_a_flag_of_some_command():
    wrong = {(path, f"--{name}") for path, (name,) in named(FLAG) if f"--{name}" not in flags() | OTHERS}
    assert {(path, name) for path, name in wrong if not path.startswith(OTHER_PROGRAMS)} == set()


def test_each_backend_and_strategy_that_is_named_is_installed():
    wrong = {
        (name, path)
        for path, (kind, name) in named(PLUGIN)
        if name not in registry.names({"backend": "backends", "strategy": "strategies"}[kind])
    }
    assert wrong <= WHERE_INSTALLED


@pytest.mark.parametrize(("letter", "kind"), [("B", "backends"), ("S", "strategies")])
def test_each_option_that_is_named_is_an_option_of_some_plugin(letter, kind):
    wrong = {(path, name) for path, (of, name) in named(OPTION) if of == letter and name not in {*keys(kind), "key"}}
    assert wrong - OF_NEW_PACKAGES == set()


def test_each_command_that_is_named_is_one():
    below = {name: set(getattr(one, "commands", {})) | set(WORKLOADS) for name, one in commands().items()}
    below |= {name: set(words) for name, words in subcommands.WORDS.items()}
    wrong = {
        (path, f"gpuinfer {name} {more or ''}")
        for path, (name, more) in named(COMMAND)
        if name not in commands() or (more and getattr(commands()[name], "commands", None) and more not in below[name])
    }
    assert wrong == set()


def test_the_patterns_find_what_is_named():
    assert len(named(FLAG)) > 100
    assert len(named(OPTION)) > 10
    assert len(named(COMMAND)) > 5
    assert len(named(PLUGIN)) > 1


# Words of other programs


def test_each_word_of_ours_that_is_suggested_is_one():
    known = flags() | {"--version"}
    wrong = {
        (theirs, ours)
        for theirs, several in foreign_names.FLAGS.items()
        for ours in several
        if not ours.endswith(".")
        and not (ours[3:].partition("=")[0] in keys("backends") if ours[:3] == "-B " else ours.split()[0] in known)
    }
    assert wrong == set()
    below = {f"{name} {more}" for name, one in commands().items() for more in getattr(one, "commands", {})}
    meant = {one.partition(" --")[0] for one in foreign_names.COMMANDS.values() if not one.endswith(".")}
    assert meant <= {*commands(), *below, "--version"}


def test_only_what_is_spelled_nearly_alike_is_taken_for_it():
    assert foreign_names.flag_hint("--gamse", ["--games", "--workers"]) == "Did you mean '--games'?"
    assert foreign_names.flag_hint("--quantise", ["--actions", "--quiet"]) == ""
    assert foreign_names.option_hint("max_wiat", ["max_wait", "max_rows"]) == "Did you mean 'max_wait'?"
    assert not any(map(foreign_names.HUB_NAME.fullmatch, ("a/b/c", "./b", "b", "/a/b", "a/b@", "a/b@/c")))
