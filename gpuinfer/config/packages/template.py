"""A package with a plugin of one kind, whole: code, options, tests, README; from the templates beside this file.

A template lies where its file goes: `backend/MODULE/backend.py.jinja` becomes `gpuinfer_echo/backend.py`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpuinfer.config import registry
from gpuinfer.errors import UsageError

TEMPLATES = Path(__file__).with_name("templates")
COMMON, ENDING, MODULE = "common", ".jinja", "MODULE"
HIDDEN = {"gitignore": ".gitignore"}  # files whose names begin with a dot, which packages leave out
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST = 28  # lines with longer ones would have to be broken
PREFIX = "gpuinfer-"


@dataclass(frozen=True, slots=True)
class TemplateKind:
    """What the README and pyproject.toml of one kind say. `{name}` is the plugin's."""

    about: str  # in one line, without a full stop
    files: Mapping[str, str]  # what each holds
    commands: tuple[str, ...]  # that use it
    needs: tuple[str, ...]  # packages that its code imports, beside gpuinfer


KINDS = {
    "backend": TemplateKind(
        "A backend of gpuinfer: the run's model in plain PyTorch, a batch at a time",
        {"backend.py": "the backend `{name}`, with its options"},
        ("gpuinfer selfplay --backend {name} -B max_rows=512 --model blobnet-small --games 20",),
        ("numpy>=2.0", "pydantic>=2.9", "torch>=2.6"),
    ),
    "strategy": TemplateKind(
        "A strategy of gpuinfer: batches of a share of the largest, within a time",
        {"strategy.py": "the strategy `{name}`, with its options"},
        ("gpuinfer selfplay --strategy {name} -S share=0.25 --model blobnet-small --games 20",),
        ("pydantic>=2.9",),
    ),
    "workload": TemplateKind(
        "A workload of gpuinfer: a network is asked about every row of a file",
        {
            "workload.py": "the workload, and with it the command `gpuinfer {name}`",
            "network.py": "the network that it asks",
        },
        ("gpuinfer {name} --help", "gpuinfer {name} --rows 20000 --out answers.npy"),
        ("numpy>=2.0", "pydantic>=2.9", "torch>=2.6"),
    ),
    "game": TemplateKind(
        "A game for gpuinfer's self-play: who takes the last one from a heap wins",
        {"game.py": "the game `{name}`: its sizes and options", "rules.py": "its rules, which are compiled"},
        ("gpuinfer selfplay --game {name} --game-options heap=30 --model rollout --games 1000",),
        ("numpy>=2.0", "pydantic>=2.9"),
    ),
    "decoder": TemplateKind(
        "A decoder of diffusion models for gpuinfer: tokens of one step are never close together",
        {"decoder.py": "the decoder `{name}`, with its options"},
        (
            "gpuinfer generate --model tiny-llada --decoder {name} -D apart=3 --max-new-tokens 16 "
            '--prompt "Once upon a time"',
        ),
        ("numpy>=2.0", "pydantic>=2.9"),
    ),
    "policy": TemplateKind(
        "A routing policy for gpuinfer's fleets: one replica is filled after the other",
        {"policy.py": "the policy `{name}`, with its options"},
        ("gpuinfer simulate --rate 500 --alpha 1ms --beta 4ms --replicas 4 --routing {name} --requests 2000",),
        ("pydantic>=2.9",),
    ),
    "launcher": TemplateKind(
        "A launcher for gpuinfer: processes of this machine that let others go first",
        {"launcher.py": "the launcher `{name}`, with its options"},
        (
            "gpuinfer generate --backend fleet -B replicas=2 -B launcher={name} --model tiny --max-new-tokens 16 "
            '--prompt "Once upon a time"',
        ),
        ("pydantic>=2.9",),
    ),
    "environment": TemplateKind(
        "An environment for gpuinfer's rollouts: sentences of a given number of words",
        {"environment.py": "the environment `{name}`, with its options"},
        (
            "gpuinfer rollouts --env {name} --env-option tries=3 --model tiny --groups 2 --samples-per-group 4 "
            "--max-new-tokens 16",
        ),
        ("pydantic>=2.9",),
    ),
}


@dataclass(frozen=True, slots=True)
class NewPackage:
    """What a package is called, and everything in it that is."""

    kind: str
    name: str  # the plugin's

    @property
    def package(self) -> str:
        return f"{PREFIX}{self.name}"

    @property
    def module(self) -> str:
        return self.package.replace("-", "_")

    @property
    def commands(self) -> list[str]:
        """What shows it at work, once it is installed: it is there, it keeps the contract, it is used."""
        used = [line.format(name=self.name) for line in KINDS[self.kind].commands]
        return [f"gpuinfer plugins show {self.kind} {self.name}", f"gpuinfer plugins check {self.package}", *used]

    @property
    def words(self) -> dict[str, Any]:
        """What templates speak of."""
        own = KINDS[self.kind]
        return {
            "kind": self.kind,
            "kinds": registry.plural(self.kind),
            "name": self.name,
            "package": self.package,
            "module": self.module,
            "class": "".join(map(str.capitalize, self.name.split("-"))) + self.kind.capitalize(),
            "about": own.about,
            "files": [(f"{self.module}/{file}", what.format(name=self.name)) for file, what in own.files.items()],
            "commands": self.commands,
            "dependencies": [f"gpuinfer{registry.contract_range()}", *own.needs],
        }


def new_package(kind: str, name: str) -> NewPackage:
    """The package for a new plugin of this name. Raises `UsageError` for a name that is none, or is taken."""
    new = NewPackage(registry.KINDS[registry.plural(kind)], name.removeprefix(PREFIX))
    if not NAME.fullmatch(new.name) or len(new.name) > LONGEST:
        near = re.sub(r"[^a-z0-9]+", "-", new.name.lower()).strip("-0123456789")[:LONGEST].rstrip("-")
        hint = f", such as {near}" if NAME.fullmatch(near) else ", such as my-plugin"
        raise UsageError(
            f"'{name}' is no name for a plugin. Take small letters and digits, in words joined by hyphens{hint}."
        )
    if problem := _taken(new):
        raise UsageError(f"{problem}. Take another name, such as my-{new.name}.")
    return new


def _taken(new: NewPackage) -> str | None:
    """By whom, whether that can be used or not."""
    if new.kind == "workload" and registry.is_reserved(new.name):
        return f"a workload cannot be called '{new.name}', which is a command or a setting of gpuinfer"
    for record in registry.listing(new.kind):
        if record.name == new.name:
            return f"the {new.kind} '{new.name}' is there already, from {record.package}"
    try:
        return f"a package {new.package} {version(new.package)} is installed already"
    except PackageNotFoundError:
        return None


def write_package(new: NewPackage, parent: Path) -> Path:
    """Write it as the folder `parent / new.package`, which is there whole or not at all. Returns the folder.

    Raises `UsageError` when that exists already, and for a parent that cannot be written to.
    """
    folder = parent / new.package
    if folder.exists() or folder.is_symlink():
        raise UsageError(
            f"there is a {folder} already, and nothing is overwritten. Take another name, or another place: --path DIR."
        )
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{new.package}-", dir=parent) as torn:
            whole = Path(torn, new.package)
            for path, text in files(new):
                (whole / path).parent.mkdir(parents=True, exist_ok=True)
                (whole / path).write_text(text, encoding="utf-8")
            whole.rename(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}. Name a place: --path DIR.") from error
    return folder


def files(new: NewPackage) -> Iterator[tuple[str, str]]:
    """Path and text of each of its files."""
    import jinja2  # 40 ms

    reading = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    for part in (COMMON, new.kind):
        for path in sorted((TEMPLATES / part).rglob(f"*{ENDING}")):
            place = path.relative_to(TEMPLATES / part).as_posix().removesuffix(ENDING).replace(MODULE, new.module)
            text = reading.get_template(path.relative_to(TEMPLATES).as_posix()).render(new.words)
            yield HIDDEN.get(place, place), text
