"""Models by their names on the Hugging Face hub, as the local cache has them. Nothing is fetched here, and nothing
heavy is imported.

The cache is huggingface_hub's ("Understand caching" in its documentation): models--OWNER--NAME with refs/REVISION,
which holds a commit, snapshots/COMMIT/FILE, and trees/COMMIT.json, which lists the files of that commit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.config.foreign_names import HUB_NAME
from gpuinfer.errors import UsageError, nearest

BARE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # old repositories have no owner, such as gpt2
MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")
PREFIX = "models--"
MOST_LISTED = 8
MOST_BYTES = 64 << 20  # of a JSON file that is read here
LEAST_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
VOCABULARIES = ("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
INDEX = ".index.json"


@dataclass(frozen=True, slots=True)
class HubModel:
    """What a name says: OWNER/NAME, then /FILE.gguf or nothing, then @REVISION or nothing."""

    repository: str
    file: str | None = None
    revision: str | None = None

    @property
    def name(self) -> str:
        """As people write it."""
        return "".join(
            [self.repository, f"/{self.file}" if self.file else "", f"@{self.revision}" if self.revision else ""]
        )

    @property
    def folder(self) -> Path:
        """Where the cache has the repository, if it has it."""
        return hub_folder() / (PREFIX + self.repository.replace("/", "--"))


def hub_model_of(name: str) -> HubModel | None:
    """None for what can be no name of the hub."""
    if (found := HUB_NAME.fullmatch(name)) is None or ".." in (found["revision"] or "").split("/"):
        return None
    return HubModel(found["repository"], found["file"], found["revision"])


def hub_folder() -> Path:
    """The cache as the environment says: HF_HUB_CACHE, else HF_HOME/hub, else that of the user."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(variable):
            return Path(os.path.expandvars(os.path.expanduser(given)))
    usual = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(usual, "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(home)), "hub")


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """One commit of a repository in the cache. `lacks`: files that its model needs and that are not there."""

    folder: Path
    lacks: tuple[str, ...] = ()

    @property
    def ggufs(self) -> list[Path]:
        """Its GGUF files, where it has no weights in another format."""
        if any(self.folder.glob("*.safetensors")) or any(self.folder.glob("*.bin")):
            return []
        return sorted(self.folder.glob("*.gguf"))


def cached_model(name: str) -> Path | None:
    """The folder of a whole model by this name, or its GGUF file; None where the cache has none, or not all of it."""
    model = hub_model_of(name) or (HubModel(name) if BARE_NAME.fullmatch(name) else None)
    if model is None or (snapshot := snapshot_of(model)) is None:
        return None
    if model.file is not None:
        file = snapshot.folder / model.file
        return file if file.is_file() else None
    if snapshot.lacks:
        return None
    ggufs = snapshot.ggufs
    return snapshot.folder if not ggufs else ggufs[0] if len(ggufs) == 1 else None


def snapshot_of(model: HubModel) -> HubSnapshot | None:
    """The snapshot of its revision, main where it names none; None where the cache has no such one."""
    commit = _commit_of(model.folder, model.revision or MAIN)
    return None if commit is None else _snapshot(model.folder, commit)


def cached_repositories() -> Iterator[tuple[HubModel, HubSnapshot]]:
    """Every revision of every model in the cache: those with a name, and commits without one."""
    try:
        folders = sorted(one for one in hub_folder().iterdir() if one.name.startswith(PREFIX) and one.is_dir())
    except OSError:
        return
    for folder in folders:
        repository = folder.name.removeprefix(PREFIX).replace("--", "/", 1)
        seen: set[str] = set()
        for revision, commit in sorted(_references(folder).items(), key=lambda one: (one[0] != MAIN, one[0])):
            if commit not in seen and (folder / "snapshots" / commit).is_dir():
                seen.add(commit)
                shown = None if revision == MAIN else revision
                yield HubModel(repository, None, shown), _snapshot(folder, commit)
        for commit in _commits(folder):
            if commit not in seen:
                yield HubModel(repository, None, commit[:12]), _snapshot(folder, commit)


def absence_of(model: HubModel) -> UsageError:
    """Why the cache cannot give it, with the cure. Call it where `cached_model` is None."""
    name, cache = model.name, hub_folder()
    fetch = "To fetch it, add --download."
    snapshot = snapshot_of(model)
    if snapshot is not None and model.file is not None:
        return UsageError(f"'{model.repository}' is in {cache} without {model.file}{_listed(snapshot.ggufs)}.\n{fetch}")
    if snapshot is not None and snapshot.lacks:
        shown = ", ".join(snapshot.lacks[:3]) + (f" and {len(snapshot.lacks) - 3} more" if snapshot.lacks[3:] else "")
        return UsageError(
            f"only a part of '{name}' is in {cache}: it lacks {shown}.\nTo fetch the rest, add --download."
        )
    if snapshot is not None:
        first = snapshot.ggufs[0].name
        return UsageError(
            f"'{name}' has several GGUF files{_listed(snapshot.ggufs)}. Name one: --model {model.repository}/{first}"
        )
    known = sorted(_references(model.folder)) or [commit[:12] for commit in _commits(model.folder)]
    if known:
        return UsageError(
            f"'{model.repository}' is in {cache} with other revisions only: {', '.join(known[:MOST_LISTED])}.\n"
            f"Name one, as --model {model.repository}@{known[0]}. {fetch}"
        )
    near = nearest(model.repository, [one.repository for one, _ in cached_repositories()], 0.6)
    hint = f" Did you mean '{near}'?" if near else ""
    return UsageError(
        f"there is no model folder '{name}', and no such model in {cache}.{hint} Nothing is downloaded by itself.\n"
        f"{fetch}"
    )


def _listed(files: Collection[Path]) -> str:
    shown = [file.name for file in files][:MOST_LISTED]
    return f" ({', '.join(shown)}{' …' if len(files) > MOST_LISTED else ''})" if shown else ""


def needed_files(names: Collection[str], code: bool = False) -> list[str]:
    """Of a repository's files those that running its model takes: settings, tokenizer, templates, and its weights, as
    safetensors where there are any, else as files of torch.save, else as GGUF. `code`: Python files too.
    """
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    if plain := [name for name in weights if not name.startswith("consolidated")]:
        weights = plain  # the others are the same weights in their makers' own format
    weights = weights or [name for name in top if name.endswith(".bin") and name.startswith("pytorch_model")]
    weights = weights or [name for name in top if name.endswith(".gguf")]
    index = f".{weights[0].rpartition('.')[2]}{INDEX}" if weights else INDEX
    return [
        name
        for name in names
        if name in weights
        or ("/" not in name and name.endswith(".json") and (not name.endswith(INDEX) or name.endswith(index)))
        or name in VOCABULARIES
        or ("/" not in name and name.endswith((".jinja", ".tiktoken")))
        or re.fullmatch(r"\d+_\w+/config\.json", name)  # of sentence-transformers: how embeddings are pooled
        or (code and name.endswith(".py"))
    ]


def _commit_of(folder: Path, revision: str) -> str | None:
    try:
        commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = ""
    if COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir():
        return commit
    if not SHORT_COMMIT.fullmatch(revision):
        return None
    found = [one for one in _commits(folder) if one.startswith(revision)]
    return found[0] if len(found) == 1 else None


def _references(folder: Path) -> dict[str, str]:
    """Commits by the revision's name."""
    base = folder / "refs"
    found = {}
    for path in base.rglob("*"):
        try:
            found[path.relative_to(base).as_posix()] = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError):  # a folder, or nothing of the cache
            continue
    return found


def _commits(folder: Path) -> list[str]:
    try:
        return sorted(one.name for one in (folder / "snapshots").iterdir() if COMMIT.fullmatch(one.name))
    except OSError:
        return []


def _snapshot(repository: Path, commit: str) -> HubSnapshot:
    """What it lacks is told by the commit's list of files, where the cache has it, and by the weights' index."""
    folder = repository / "snapshots" / commit
    listed = json_object_in(repository / "trees" / f"{commit}.json").get("files")
    names = list(listed) if isinstance(listed, dict) else []
    ends = (".safetensors", ".bin", INDEX)
    least = [name for name in needed_files(names) if name in LEAST_NAMES or name.endswith(ends)]
    if not least and not any(folder.glob("config.json")) and not any(folder.glob("*.gguf")):
        least = ["config.json"]
    if not any(name.endswith(ends) for name in least) and not any(
        path.suffix in (".safetensors", ".bin", ".gguf") for path in folder.glob("*")
    ):
        least.append("its weights")
    for index in folder.glob(f"*{INDEX}"):
        kind = index.name.removesuffix(INDEX).rpartition(".")[2]
        named = json_object_in(index).get("weight_map")
        if kind == "safetensors" and isinstance(named, dict):
            least += sorted({file for file in named.values() if isinstance(file, str)})
    return HubSnapshot(folder, tuple(one for one in dict.fromkeys(least) if not (folder / one).is_file()))


def json_object_in(path: Path) -> dict[str, Any]:
    """Empty where the file cannot be read or holds no object."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
