"""The output: a file that a later run can go on with, a folder with a file a row, or a stream. Beside a file or a
folder lies a note of how it was made.

The note (`out.jsonl.run.json`) is written before the first answer and stays: it holds the settings and the model's
fingerprint, and the run that writes to the output holds a lock on it. With ordered output, answers that wait for an
earlier one lie in `out.jsonl.early`; and what must be put in the midst of old answers (`--retry-errors`) is written
anew from the start, and old answers come from `out.jsonl.before` until all is done. Of Parquet all this is so of its
journal, `out.parquet.journal`, which becomes the file at the end. An output without one answer binds no later run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.host.extras import require_extra
from gpuinfer.host.files import differences, no_folder, put_whole, sync_folder
from gpuinfer.serving.openai.row_names import KeySet
from gpuinfer.workloads.generate.answer_folder import open_answer_folder, other_files
from gpuinfer.workloads.generate.answer_lines import DoneRows, EarlierAnswers, read_key
from gpuinfer.workloads.generate.answer_table import AnswerTable, unpack_answers
from gpuinfer.workloads.generate.opened_output import STDOUT, OpenedOutput, RunNote, output_parts, waiting_files
from gpuinfer.workloads.generate.output_writer import SpillFile, unfinished_lines

JOURNAL = ".journal"  # behind the name of a Parquet file: the answers, until all are there
TABLE_END = ".parquet"
UNWRITTEN_TABLES = (".csv", ".tsv", ".xlsx")  # what people may expect, as prompts come so

log = logging.getLogger(__name__)


def is_folder(name: str) -> bool:
    """Whether this names a folder with a file a row: it ends with a slash."""
    return name.endswith(os.sep)


def is_table(name: str) -> bool:
    return name.lower().endswith(TABLE_END)


def check_output(name: str, input_name: str, resume: bool) -> None:
    """Raises `UsageError` for an output that cannot be. Touches nothing."""
    path = Path(name)
    if is_folder(name):
        _check_folder(path, name, resume)
        return
    if name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        if resume:
            raise UsageError(f"--resume needs to see what is done, and --output {name} cannot be read. Give a file.")
        return
    if path.is_dir():
        raise UsageError(
            f"--output {name}: this is a folder. Write {path}/ for a file a row in it, or give a file, such as "
            f"{path / 'answers.jsonl'}."
        )
    if path.suffix.lower() in UNWRITTEN_TABLES:
        raise UsageError(
            f"--output {name}: answers are written as JSON Lines ({path.stem}.jsonl), as Parquet "
            f"({path.stem}{TABLE_END}), or each in a file of its own ({path.stem}/). Give one of these."
        )
    if is_table(name):
        require_extra("parquet", f"--output {name}")
    if not path.parent.is_dir():
        raise no_folder("--output", path)
    if input_name != "-" and path.exists() and Path(input_name).exists() and path.samefile(input_name):
        raise UsageError(f"--input and --output are the same file, {name}. Give the answers a file of their own.")
    if not resume:
        _refuse_overwriting(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--output {name} cannot be written. Give a file in a folder of yours.")


def _check_folder(path: Path, name: str, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UsageError(f"--output {name}: there is a file of this name. Give another folder, or leave out the slash.")
    if not path.parent.is_dir():
        raise no_folder("--output", path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--output {name} cannot be written. Give a folder of yours.")
    if others := other_files(path):
        listed = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise UsageError(f"--output {name} holds other files than answers ({listed}). Give a new or an empty folder.")
    if not resume and path.exists() and any(path.glob("*.json")):
        raise UsageError(f"--output {name} holds answers already. Add --resume to go on, or give another folder.")


def open_output(
    name: str, settings: Mapping[str, Any], *, resume: bool = False, retry: bool = False, ordered: bool = False
) -> OpenedOutput:
    """Claim the output for a run of these settings. May take a while: what there is is read.

    Raises `UsageError` when there are answers and `resume` is not set, when they were made with other settings, or when
    another run writes there.
    """
    if name == "-":
        sys.stdout.flush()
        return OpenedOutput(STDOUT, sys.stdout.fileno())
    path = Path(name)
    plain = json.loads(json.dumps(dict(settings)))
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a device, or a pipe
            return OpenedOutput(name, os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        with contextlib.ExitStack() as if_refused:
            note = RunNote(path.resolve())
            if_refused.callback(note.close)
            if is_folder(name):
                _check_folder(path, name, resume)
                output: OpenedOutput = open_answer_folder(path.resolve(), note, plain, retry)
            elif is_table(name):
                output = _open_table(path.resolve(), note, plain, resume, retry, ordered)
            else:
                output = _opened(path.resolve(), note, plain, resume, retry, ordered)
            if_refused.pop_all()
        return output
    except OSError as error:
        raise UsageError(f"--output {name} cannot be written: {error.strerror}. Give another.") from error


def _open_table(
    path: Path, note: RunNote, settings: Mapping[str, Any], resume: bool, retry: bool, ordered: bool
) -> OpenedOutput:
    """The journal of a Parquet file, made of that where an earlier run has ended."""
    journal = path.with_name(path.name + JOURNAL)
    if not resume:
        _refuse_overwriting(path)
    unpacked = not output_parts(journal) and path.exists() and bool(path.stat().st_size)
    if unpacked:
        unpack_answers(path, journal)
    try:
        return _opened(journal, note, settings, resume, retry, ordered, partial(AnswerTable, path))
    except BaseException:
        if unpacked:
            journal.unlink(missing_ok=True)
        raise


def _opened(
    path: Path,
    note: RunNote,
    settings: Mapping[str, Any],
    resume: bool,
    retry: bool,
    ordered: bool,
    make: Callable[..., OpenedOutput] = OpenedOutput,
) -> OpenedOutput:
    if not resume:  # there may be something since it was looked for
        _refuse_overwriting(path)
    if parts := output_parts(path):
        found = note.settings()
        if found is None:
            raise UsageError(f"{note.path} does not say how {path} was made. Give another --output.")
        if differing := differences(found, settings):
            if any(map(_answers, parts)):
                raise UsageError(
                    f"{path} was made with other settings ({differing}). Use those, or give another --output."
                )
            log.warning("%s held errors alone, of other settings (%s): it begins anew", path, differing)
            for part in parts:
                part.unlink()
    note.write(settings)
    is_new = not path.exists()
    before, early = waiting_files(path)
    retry = retry and not before.exists()  # else that has begun already
    done = KeySet() if is_new else _mend(path, before, retry, ordered)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    output = make(str(path), descriptor, path=path, note=note, is_ours=is_new, done=done)
    if ordered:
        output.aside = SpillFile(early, unfinished_lines(early, done, retry))
        output.before = EarlierAnswers(before) if before.exists() else None
    sync_folder(path.parent)
    return output


def _refuse_overwriting(path: Path) -> None:
    journal = path.with_name(path.name + JOURNAL)
    for part in (*output_parts(path), *(output_parts(journal) if is_table(path.name) else ())):
        raise UsageError(f"{part} exists already. Add --resume to go on with it, or give another --output.")


def _answers(path: Path) -> bool:
    """Whether there is any line but errors."""
    with path.open("rb") as file:
        found = (read_key(line) for line in file if line.endswith(b"\n"))
        return any(one is None or not one[1] for one in found)


def _mend(path: Path, before: Path, retry: bool, ordered: bool) -> KeySet:
    """Remove torn lines and lines to be tried again; returns the rows that are done."""
    with path.open("r+b") as file:
        done = DoneRows(file, retry)
        if done.whole_bytes < os.fstat(file.fileno()).st_size:
            file.truncate(done.whole_bytes)
    if done.unreadable:
        log.warning("%s: %d lines cannot be read; their rows are asked again", path, done.unreadable)
    if done.dropped and ordered and not before.exists():
        path.rename(before)
        return KeySet()
    if done.dropped:  # a crash leaves the old file or the new one
        with path.open("rb") as old:
            put_whole(path, lambda new: new.writelines(line for line in old if done.keeps(line) is not None))
    return done.rows


def is_stream(name: str) -> bool:
    """Whether the output is neither a regular file nor a folder, so that no run can go on with it."""
    return name == "-" or (Path(name).exists() and not Path(name).is_file() and not Path(name).is_dir())
