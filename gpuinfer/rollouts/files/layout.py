"""What lies in a folder of rollouts.

`manifest.json`: schema, the settings that decide what is played, the form; after a run that ended, its groups. Shards
`shard-000000.jsonl` or `.parquet`, in the order in which groups ended. And, of a run that is on or was killed, one
journal: the groups that no shard has yet, as lines of JSON in either form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

SCHEMA = "gpuinfer.rollouts/1"
Form = Literal["jsonl", "parquet"]
FORMS: tuple[Form, ...] = get_args(Form)
JOURNAL = ".journal"
_NAME = re.compile(r"shard-(\d{6,})\.(jsonl|parquet)")


def shard_name(number: int, form: str) -> str:
    return f"shard-{number:06d}.{form}"


def journal_name(number: int) -> str:
    return f"shard-{number:06d}{JOURNAL}"


def shards(folder: Path) -> dict[int, Path]:
    """Whole shards by number, in order."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def journals(folder: Path) -> dict[int, Path]:
    """Journals by number, in order, without those whose groups a shard has: a run was killed before it removed them."""
    whole = shards(folder)
    found = {int(path.stem.removeprefix("shard-")): path for path in folder.glob(f"shard-*{JOURNAL}")}
    return {number: path for number, path in sorted(found.items()) if number not in whole}


def whole_lines(path: Path) -> Iterator[bytes]:
    """Up to the first that is torn. Raises `OSError`."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line
