"""Reads the header of a GGUF file: metadata by key, and where each tensor lies. Weights are read later, one by one.

The format is that of ggml's documentation ("GGUF", versions 2 and 3): counts, key-value pairs, descriptions of tensors,
and the tensors' bytes, each at a multiple of an alignment. Types of tensors and sizes of their blocks are those that
the `gguf` library knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import UsageError
from gpuinfer.host.extras import require_extra

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIRST_READ = 8 << 20  # bytes: a vocabulary of 150,000 tokens and its merges
MOST_HEADER = 1 << 30
MOST_ENTRIES = 1 << 20  # key-value pairs, and tensors, of one file
MOST_DIMENSIONS = 4
TEXT, ARRAY, FLAG = 8, 9, 7
LENGTH_BYTES = 8  # before each text
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Types of values by their numbers, as numpy writes them."""
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def damaged_gguf(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}. Copy it again from where the model came.")


class JoinedBytes:
    """The bytes of one file, or of several that follow one another."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises `UsageError` for a file that cannot be read."""
        self.paths = tuple(paths)
        try:
            self._sizes = [path.stat().st_size for path in self.paths]
        except OSError as error:
            raise UsageError(f"cannot read {error.filename}: {error.strerror}. Check --model.") from None
        self.size = sum(self._sizes)

    @property
    def first(self) -> Path:
        return self.paths[0]

    def read(self, start: int, length: int) -> NDArray[np.uint8]:
        """uint8 [length]. Threads may call it. Raises `UsageError` where a file ends before, or cannot be read."""
        found = np.empty(length, np.uint8)
        rest = found.data
        for path, size in zip(self.paths, self._sizes, strict=True):
            if rest and start < size:
                wanted = rest[: size - start]
                self._fill(path, start, wanted)
                start, rest = start + len(wanted), rest[len(wanted) :]
            start -= size
        if rest:
            raise damaged_gguf(self.paths[-1], f"it ends {len(rest):,} bytes before it should")
        return found

    def _fill(self, path: Path, start: int, into: memoryview) -> None:
        try:
            with path.open("rb", buffering=0) as file:
                while into:
                    count = os.preadv(file.fileno(), [into[: 1 << 30]], start)
                    if not count:
                        raise damaged_gguf(path, f"it ends {len(into):,} bytes before it should")
                    start, into = start + count, into[count:]
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}. Is its disk still there?") from None


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as stored. `shape` has torch's order: rows first."""

    shape: tuple[int, ...]
    kind: int  # ggml's number of its type
    source: JoinedBytes
    start: int
    size: int  # bytes

    def raw(self, start: int = 0, length: int | None = None) -> NDArray[np.uint8]:
        return self.source.read(self.start + start, self.size - start if length is None else length)


class _HeaderReader:
    """Reads values one after another, and more of the file when they go beyond what has been read."""

    def __init__(self, source: JoinedBytes) -> None:
        self._source, self._position = source, 0
        self._data = source.read(0, min(source.size, FIRST_READ)).tobytes()

    @property
    def position(self) -> int:
        return self._position

    @property
    def so_far(self) -> bytes:
        return self._data[: self._position]

    def advance(self, count: int) -> int:
        """The place of the next `count` bytes, which have been read."""
        place, end = self._position, self._position + count
        if end > len(self._data):
            if end > self._source.size:
                raise damaged_gguf(self._source.paths[-1], "it ends within its header: it was cut short")
            if end > MOST_HEADER:
                raise damaged_gguf(self._source.first, f"its header has over {MOST_HEADER >> 20} MiB")
            more = min(self._source.size, max(end, 2 * len(self._data))) - len(self._data)
            self._data += self._source.read(len(self._data), more).tobytes()
        self._position = end
        return place

    def take(self, count: int) -> bytes:
        place = self.advance(count)
        return self._data[place : place + count]

    def number(self, form: str = "<I") -> int:
        place = self.advance(struct.calcsize(form))
        return int(struct.unpack_from(form, self._data, place)[0])

    def text(self) -> str:
        length = self.number("<Q")
        if length > self._source.size:
            raise damaged_gguf(self._source.paths[-1], "it ends within its header: it was cut short")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A number, a flag, a text, or a list; numbers of a list as an array."""
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number(), self.number("<Q")
            if count > self._source.size or depth:
                raise damaged_gguf(self._source.first, f"a list of {count:,} values does not fit into it")
            if inner == TEXT:
                return self._texts(count)
            if inner == ARRAY:
                return [self.value(inner, depth + 1) for _ in range(count)]
            form = np.dtype(self._form(inner))
            place = self.advance(count * form.itemsize)
            return np.frombuffer(self._data, form, count, place)
        form = np.dtype(self._form(kind))
        found = np.frombuffer(self._data, form, 1, self.advance(form.itemsize))[0].item()
        return bool(found) if kind == FLAG else found

    def _texts(self, count: int) -> list[str]:
        """A vocabulary or its merges: as `text` so many times, in a tenth of the time where they have been read."""
        found: list[str] = []
        data, place, length_at = self._data, self._position, struct.Struct("<Q").unpack_from
        with contextlib.suppress(struct.error):  # a length that lies beyond what has been read
            for _ in range(count):
                (length,) = length_at(data, place)
                begin, place = place + LENGTH_BYTES, place + LENGTH_BYTES + length
                if place > len(data):
                    break
                found.append(data[begin:place].decode("utf-8", "replace"))
                self._position = place
        return found + [self.text() for _ in range(count - len(found))]

    def _form(self, kind: int) -> str:
        if kind not in SCALARS:
            raise damaged_gguf(self._source.first, f"a value of its header is of the unknown type {kind}")
        return SCALARS[kind]


class GgufFile:
    """Metadata and tensors of a GGUF file, or of one that is split into several."""

    def __init__(
        self, paths: Sequence[Path], metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], header: bytes
    ) -> None:
        self.paths, self.metadata, self.tensors = tuple(paths), metadata, tensors
        self.path = paths[0]  # its name in messages
        self.header_digest = hashlib.sha256(header).digest()

    @property
    def in_pieces(self) -> bool:
        """Whether its paths are pieces of one file, rather than files."""
        return len(self.paths) > 1 and SPLIT.fullmatch(self.path.name) is None

    @cached_property
    def architecture(self) -> str:
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str) or not found:
            raise damaged_gguf(self.path, "it does not say its architecture (general.architecture)")
        return found


def open_gguf_file(paths: Sequence[Path]) -> GgufFile:
    """`paths`: one file, the first of a split model, or the pieces of one file in their order.

    Headers of the latest model stay in memory, since a run opens it several times. Raises `UsageError` for a file that
    is damaged, cut short, of another version, or holds unknown types of tensors.
    """
    split = SPLIT.fullmatch(paths[0].name)
    beside = [] if split is None else paths[0].parent.glob(f"{escape(split[1])}-*-of-{split[3]}.gguf")
    try:
        status = [path.stat() for path in [*paths, *sorted(beside)]]
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}. Check --model.") from None
    stamps = tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in status)
    with _OPENING:  # one thread reads it, the others wait for that
        return _opened(tuple(paths), stamps)


_OPENING = threading.Lock()


@lru_cache(maxsize=1)
def _opened(paths: Sequence[Path], stamps: tuple[tuple[int, ...], ...]) -> GgufFile:
    """`stamps`: what changes when the files do."""
    path = paths[0]
    metadata, tensors, header = _read_header(JoinedBytes(paths))
    count = metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        split = SPLIT.fullmatch(path.name)
        if split is None or int(split[2]) != 1 or int(split[3]) != count:
            raise UsageError(
                f"{path} is one of {count} files of a model. Give the first of them, called "
                f"NAME-00001-of-{count:05}.gguf, with the others beside it."
            )
        for number in range(2, count + 1):
            other = path.with_name(f"{split[1]}-{number:05}-of-{count:05}.gguf")
            if not other.is_file():
                raise UsageError(f"{path.parent} lacks {other.name}, one of {count} files of the model. Copy it too.")
            _, more, head = _read_header(JoinedBytes([other]))
            paths = [*paths, other]
            tensors |= more
            header += head
    return GgufFile(paths, metadata, tensors, header)


def _read_header(source: JoinedBytes) -> tuple[dict[str, Any], dict[str, GgufTensor], bytes]:
    path, reader = source.first, _HeaderReader(source)
    if reader.take(len(MAGIC)) != MAGIC:
        raise UsageError(f"{path} is no GGUF file: it does not begin with 'GGUF'. Copy it again, or check --model.")
    version = reader.number()
    if version not in VERSIONS:
        swapped = version & 0xFFFF == 0
        what = "is written for processors of the other byte order" if swapped else f"is of version {version} of GGUF"
        raise UsageError(
            f"{path} {what}; version {' and '.join(map(str, VERSIONS))} are read. Convert it again with llama.cpp's "
            "convert_hf_to_gguf.py, or give the original Hugging Face folder."
        )
    tensor_count, pair_count = reader.number("<Q"), reader.number("<Q")
    if max(tensor_count, pair_count) > MOST_ENTRIES:
        raise damaged_gguf(path, f"it claims {tensor_count:,} tensors and {pair_count:,} settings")
    metadata = {reader.text(): reader.value(reader.number()) for _ in range(pair_count)}
    places = [_place(reader, path) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise damaged_gguf(path, f"its alignment is {str(alignment)[:40]}, not a power of two")
    base = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, start in places:
        size = _stored_bytes(path, name, shape, kind)
        if base + start + size > source.size:
            raise damaged_gguf(
                source.paths[-1], f"it ends before tensor '{name[:80]}' does ({source.size:,} bytes): it was cut short"
            )
        if name in tensors:
            raise damaged_gguf(path, f"it holds tensor '{name[:80]}' twice")
        tensors[name] = GgufTensor(shape, kind, source, base + start, size)
    return metadata, tensors, reader.so_far


def _place(reader: _HeaderReader, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = reader.text(), reader.number()
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise damaged_gguf(path, f"tensor '{name[:80]}' has {dimensions} dimensions")
    sizes = [reader.number("<Q") for _ in range(dimensions)]
    return name, tuple(reversed(sizes)), reader.number(), reader.number("<Q")


def _stored_bytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Bytes of a tensor of this type. Raises `UsageError` for a type that the library does not know."""
    constants = gguf_library().constants
    try:
        block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise UsageError(
            f"{path}: tensor '{name[:80]}' is of type {kind}, which the installed gguf library does not know. Get a "
            "newer one (pip install --upgrade gguf), or a file in Q8_0, Q4_K_M or another common type."
        ) from None
    if shape[-1] % block:
        raise damaged_gguf(path, f"tensor '{name[:80]}' has rows of {shape[-1]} values, no multiple of {block}")
    values = 1
    for size in shape:
        values *= size
    return int(values // block * block_bytes)


def gguf_library() -> Any:
    """The package `gguf`. Raises `UsageError` where it is not installed."""
    require_extra("gguf", "a GGUF file")
    import gguf

    return gguf
