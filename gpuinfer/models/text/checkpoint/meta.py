"""The alphabet of a character-level model: nanoGPT's meta.pkl, or the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.fields import read_json
from gpuinfer.models.text.checkpoint.pickled import plain_value

MOST_BYTES = 4 << 20  # all characters that there are fit in it


def read_characters(path: Path) -> tuple[str, ...]:
    """Token i is the i-th character. The file holds `itos` (ids → characters, or a list of them) or `stoi`.

    Raises `UsageError`.
    """
    meta = read_json(path) if path.suffix == ".json" else _pickled(path)
    pairs = _pairs(meta)
    if not pairs or sorted(pairs) != list(range(len(pairs))):
        raise _wrong(path, "ids from 0 on, each with its character")
    characters = tuple(pairs[number] for number in range(len(pairs)))
    if not all(isinstance(one, str) and len(one) == 1 for one in characters):
        raise _wrong(path, "single characters; for other tokens give a folder with a tokenizer.json")
    if len(set(characters)) != len(characters):
        raise _wrong(path, "each character once")
    return characters


def _pickled(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path} is over {MOST_BYTES >> 20} MiB, too much for an alphabet. Check --meta.")
        return plain_value(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Check --meta.") from None
    except ValueError as error:
        raise UsageError(f"{path} is no plain meta.pkl: {error}. Save it again as JSON, with itos and stoi.") from None


def _pairs(meta: Any) -> dict[int, Any]:
    """Ids and what they stand for; {} when the file has no such thing."""
    if not isinstance(meta, Mapping):
        return {}
    itos, stoi = meta.get("itos"), meta.get("stoi")
    if isinstance(itos, list | tuple):
        return dict(enumerate(itos))
    if isinstance(itos, Mapping):
        return _numbered(itos.items())
    if isinstance(stoi, Mapping):
        return _numbered((number, text) for text, number in stoi.items())
    return {}


def _numbered(items: Any) -> dict[int, Any]:
    """JSON writes ids as texts."""
    pairs: dict[int, Any] = {}
    for number, text in items:
        if isinstance(number, str) and number.isascii() and number.isdecimal() and len(number) < 10:
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool) or number in pairs:
            return {}
        pairs[number] = text
    return pairs


def _wrong(path: Path, wanted: str) -> UsageError:
    return UsageError(f"{path} does not hold {wanted}. Give the meta file that the model was trained with.")
