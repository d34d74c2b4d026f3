"""Finds the safetensors files of a folder."""

from __future__ import annotations

from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.fields import read_json
from gpuinfer.models.text.checkpoint.safetensors import Place, SafetensorsStore, read_header

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 3


def open_shards(folder: Path) -> SafetensorsStore:
    """Raises `UsageError` when there are none, one is missing, or their headers are damaged."""
    if (folder / WHOLE).is_file():
        return SafetensorsStore(str(folder), dict(read_header(folder / WHOLE)))
    if (folder / INDEX).is_file():
        return SafetensorsStore(str(folder), _indexed(folder))
    raise _none(folder)


def _indexed(folder: Path) -> dict[str, Place]:
    names = _weight_map(folder / INDEX)
    files = sorted(set(names.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise UsageError(f"{folder} lacks {', '.join(missing[:SHOWN])}{more} of {len(files)} shards. Copy them too.")
    tensors: dict[str, Place] = {}
    for file in files:
        header = read_header(folder / file)
        tensors.update({name: place for name, place in header.items() if names.get(name) == file})
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise UsageError(f"{path} has no weight_map from tensors to files. Copy it again from where the model came.")
    for file in names.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UsageError(f"{path} names '{file[:80]}', no safetensors file of its own folder. Copy it again.")
    return names


def _none(folder: Path) -> UsageError:
    if any(folder.glob("*.bin")):
        return UsageError(
            f"{folder} holds its weights as pickles (*.bin), which are not read, as they can run code. Convert them "
            f'where you trust them: python -c "import transformers as t; '
            f"t.AutoModelForCausalLM.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\""
        )
    return UsageError(f"{folder} has neither {WHOLE} nor {INDEX}. Copy the whole model folder.")
