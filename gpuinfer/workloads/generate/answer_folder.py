"""Answers in a folder, a file a row: `ID.json` with the line that a file of all answers would have.

Each file is there whole or not at all. A row that has no answer because of its own fault (`bad_row`) has its error in
`error-DIGEST.json`: its id may be that of another row, or no name of a file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.api import Lane
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.files import FULL, TORN, differences, sync_folder
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.row_names import KEY_BYTES, KeySet, NamedRow
from gpuinfer.workloads.generate.answer_lines import BATCH_ANSWER, read_key
from gpuinfer.workloads.generate.opened_output import OpenedOutput, RunNote
from gpuinfer.workloads.generate.output_writer import OutputWriter

ANSWER_END = ".json"
MOST_NAME = 200  # bytes of an id that is a name
UNSAFE = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')
DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # what Windows takes for no file
BLOCK = 1024

log = logging.getLogger(__name__)


class _Fault(Struct):
    type: str = ""
    code: str = ""


class _Named(Struct):
    id: str | int = ""
    custom_id: str | int | None = None
    digest: str = ""
    error: _Fault | None = None


_decode = msgspec.json.Decoder(_Named).decode


def unsafe_name(id: str) -> str | None:
    """Why this id cannot be the name of a file; None where it can."""
    if found := UNSAFE.search(id):
        return f"it has {found[0]!r}"
    if not id or id.startswith(".") or id.endswith((".", " ")):
        return "it is empty, or begins or ends with a dot or a space"
    if len(id.encode(errors="surrogatepass")) > MOST_NAME:
        return f"it has more than {MOST_NAME} bytes"
    return "Windows keeps that name for itself" if DEVICES.fullmatch(id) else None


def answer_name(line: bytes) -> str:
    """The name of the file of a line."""
    found = _decode(line)
    if found.error is not None and "bad_row" in (found.error.type, found.error.code):
        return f"error-{found.digest or str(found.id).removeprefix(BATCH_ANSWER)}{ANSWER_END}"
    return f"{found.id if found.custom_id is None else found.custom_id}{ANSWER_END}"


def other_files(folder: Path) -> list[str]:
    """The names in a folder that are no answers: what a run of ours has not left there. Hidden files do not count."""
    if not folder.is_dir():
        return []
    others = []
    for one in sorted(folder.iterdir()):
        if one.name.startswith("."):
            continue
        if one.suffix != ANSWER_END or not one.is_file() or _is_foreign(one.read_bytes()):
            others.append(one.name)
    return others


def _is_foreign(content: bytes) -> bool:
    """Whether this is whole JSON of another program: a file that is torn may be an answer."""
    if read_key(content) is not None:
        return False
    try:
        msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return False
    return True


def open_answer_folder(path: Path, note: RunNote, settings: Mapping[str, Any], retry: bool) -> AnswerFolder:
    """Claim the folder for a run of these settings, and see what is done. Raises `UsageError` for answers of others."""
    found = [(one, read_key(one.read_bytes())) for one in sorted(path.glob("[!.]*" + ANSWER_END))]
    if found:
        noted = note.settings()
        if noted is None:
            raise UsageError(f"{note.path} does not say how {path} was made. Give another --output.")
        if differing := differences(noted, settings):
            if any(key is None or not key[1] for _, key in found):
                raise UsageError(
                    f"{path} was made with other settings ({differing}). Use those, or give another --output."
                )
            log.warning("%s held errors alone, of other settings (%s): it begins anew", path, differing)
            for one, _ in found:
                one.unlink()
            found = []
    note.write(settings)
    is_ours = not path.exists()
    path.mkdir(exist_ok=True)
    for torn in path.glob(f".*{ANSWER_END}{TORN}"):
        torn.unlink()
    if unreadable := sum(key is None for _, key in found):
        log.warning("%s: %d files cannot be read; their rows are asked again", path, unreadable)
    done, keys = KeySet(), list[bytes]()
    for one, key in found:
        if key is None or (retry and key[1]):
            one.unlink()
        else:
            keys.append(key[0])
    for start in range(0, len(keys), BLOCK):
        done.count(keys[start : start + BLOCK])
    sync_folder(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return AnswerFolder(str(path), descriptor, path=path, note=note, is_ours=is_ours, done=done)


class AnswerFolder(OpenedOutput):
    """An opened folder of answers. `check_names` sees all rows, so that the first of two ids that clash is the same in
    each run.
    """

    def __init__(self, *opened: Any, **facts: Any) -> None:
        super().__init__(*opened, **facts)
        self._names = KeySet()

    def writer(self, lane: Lane | None) -> OutputWriter:
        return FolderWriter(self.descriptor, self.name, lane, path=self.path)

    def check_names(self, rows: Sequence[NamedRow]) -> None:
        keys = [_clash_key(str(row.id)) for row in rows]
        for row, before in zip(rows, self._names.count(keys), strict=True):
            if isinstance(row.error, BadRequest):
                continue
            if why := unsafe_name(str(row.id)):
                row.error = BadRequest(
                    f"the id '{str(row.id)[:100]}' cannot be the name of a file: {why}. Give it letters, digits, '-', "
                    "'_' and '.', or give --output a file."
                )
            elif before:
                row.error = BadRequest(
                    f"the id '{row.id}' differs from an earlier one in case alone, and many file systems take both for "
                    "one name. Change it, or give --output a file."
                )

    def _is_empty(self) -> bool:
        return self.path is None or not any(self.path.glob("*" + ANSWER_END))

    def _remove(self) -> None:
        if self.path is not None:
            for one in (*self.path.glob("error-*" + ANSWER_END), *self.path.glob(f".*{TORN}")):
                one.unlink(missing_ok=True)
            self.path.rmdir()


def _clash_key(id: str) -> bytes:
    """Equal for ids that are one name where case and the ways to write a letter do not count."""
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", id).casefold())
    return hashlib.blake2b(plain.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


class FolderWriter(OutputWriter):
    """Writes each line to a file of its own; what has been written since the last sync is synced together."""

    def __init__(self, folder: int, name: str, lane: Lane | None = None, path: Path | None = None) -> None:
        """`folder`: its descriptor, which stays the caller's."""
        self._folder = folder
        self._unsynced: list[str] = []
        super().__init__(folder, name, lane, path=path)

    def _write(self, items: Sequence[bytes | list[bytes]]) -> int:
        self._enter("write")
        size = 0
        for line in items:
            if not isinstance(line, bytes):
                continue
            name = answer_name(line)
            torn = f".{name}{TORN}"
            file = os.open(torn, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666, dir_fd=self._folder)
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(file, left) :]
            finally:
                os.close(file)
            os.replace(torn, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._unsynced.append(name)
            size += len(line)
        self._enter("idle")
        return size

    def _sync(self) -> None:
        self._enter("sync")
        for name in self._unsynced:
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        self._unsynced.clear()
        os.fsync(self._folder)
        self._enter("idle")
        self._finish()

    def _failed(self, error: Exception) -> WorkError:
        if not isinstance(error, OSError):
            return super()._failed(error)
        if displaced := self._displaced():
            return displaced
        cure = "Free some space" if error.errno in FULL else "Mend that"
        return WorkError(
            f"answers cannot be written to {self._name}: {error.strerror}. What was answered before is kept. {cure}, "
            "then run again with --resume."
        )
