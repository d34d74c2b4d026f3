"""Opens a Hugging Face folder: its settings, its tokenizer, and the safetensors files with its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import Gpt2Layout, RotaryLayout, Store, check
from gpuinfer.text.checkpoint.checkpoint import Checkpoint, LanguageFiles
from gpuinfer.text.checkpoint.digests import settings_of
from gpuinfer.text.checkpoint.family import NOTHING, Biases, Told, biases_of, shape_of
from gpuinfer.text.checkpoint.keys import read_json, refuse_remote_code
from gpuinfer.text.checkpoint.masked_keys import TOKENIZERS
from gpuinfer.text.checkpoint.safetensors import SafetensorsStore, TensorPlace, read_header
from gpuinfer.text.checkpoint.tensor_names import names_of
from gpuinfer.text.shape import Shape

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 3


def open_shards(folder: Path) -> SafetensorsStore:
    """Raises `UsageError` when there are none, one is missing, or their headers are damaged."""
    if (folder / WHOLE).is_file():
        return SafetensorsStore(str(folder), dict(read_header(folder / WHOLE)))
    if (folder / INDEX).is_file():
        return SafetensorsStore(str(folder), _indexed(folder))
    raise _none(folder)


def _indexed(folder: Path) -> dict[str, TensorPlace]:
    names = _weight_map(folder / INDEX)
    files = sorted(set(names.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise UsageError(f"{folder} lacks {', '.join(missing[:SHOWN])}{more} of {len(files)} shards. Copy them too.")
    tensors: dict[str, TensorPlace] = {}
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


HEAD = "lm_head.weight"


def open_folder(folder: Path, name: str, told: Told = NOTHING) -> Checkpoint:
    """Reads settings and headers, and checks them against one another. Raises `UsageError`."""
    return assembled(folder, name, folder, lambda shape: open_shards(folder), told)


def assembled(
    base: Path, name: str, folder: Path | None, open_weights: Callable[[Shape], Store], told: Told = NOTHING
) -> Checkpoint:
    """Configuration and tokenizer of `base`, with weights that are opened once their shape is known.

    `folder` is where all of it lies, if it is one place. Raises `UsageError`.
    """
    config = read_config(base)
    shape = shape_of(config, optional(base / "generation_config.json"), told)
    _refuse_code_of_a_tokenizer(shape, base / "tokenizer_config.json")
    store = open_weights(shape)
    layout = layout_for(shape, biases_of(config), store)
    check(store, layout, spare=spare_of(shape))
    return Checkpoint(
        name=name,
        shape=layout.shape,
        folder=folder,
        settings=settings_of(base),
        dtype=stored_dtype(store),
        layout=layout,
        store=store,
        language=LanguageFiles(folder=base),
    )


def spare_of(shape: Shape) -> list[str]:
    """Tensors that may be stored and are not used: a head beside the embedding that it is tied to."""
    names = names_of(shape.family)
    return list(dict.fromkeys([HEAD, *(names.head_of(prefix) for prefix in (names.prefix, ""))]))


def _refuse_code_of_a_tokenizer(shape: Shape, path: Path) -> None:
    """But that of a known one is read from its files, without its code."""
    settings, known = optional(path), TOKENIZERS.get(shape.family)
    if known is None or settings.get("tokenizer_class") != known:
        refuse_remote_code(settings, str(path))


def read_config(folder: Path) -> dict[str, Any]:
    if (folder / "config.json").is_file():
        return read_json(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder} is an adapter, not a whole model. Merge it into its base model and save that.")
    if files := sorted(folder.glob("*.pt")):
        raise UsageError(f"{folder} has no config.json. For a nanoGPT model: --checkpoint {files[0]}.")
    if any(folder.glob("*.gguf")):
        raise UsageError(f"{folder} holds GGUF files, which are not read here. Give the original Hugging Face folder.")
    raise UsageError(f"{folder} has no config.json: it is no Hugging Face model folder. Check --model.")


def layout_for(shape: Shape, biases: Biases, store: Store) -> RotaryLayout | Gpt2Layout:
    """The names that this store uses: with the prefix or without, head and embedding tied or apart."""
    names = names_of(shape.family)
    prefix = "transformer." if shape.family == "gpt2" else names.prefix
    if not any(tensor.startswith(prefix) for tensor in store.tensors):
        prefix = ""
    gpt2 = shape.family == "gpt2"
    embedding, head = (f"{prefix}wte.weight", HEAD) if gpt2 else (names.embedding_of(prefix), names.head_of(prefix))
    only_head = shape.tied and embedding not in store.tensors and head in store.tensors
    if shape.tied and not only_head and differ(store, embedding, head):
        shape = replace(shape, tied=False)
    name = head if only_head else None
    if gpt2:
        return Gpt2Layout(shape, biases, prefix, embedding_name=name)
    return RotaryLayout(shape, biases, prefix, name, names)


def differ(store: Store, one: str, other: str) -> bool:
    """Whether both are there and differ: then they are not tied, whatever the config says. So does transformers."""
    if one not in store.tensors or other not in store.tensors:
        return False
    if store.tensors[one].dtype != store.tensors[other].dtype:
        return True
    content = store.digests([one, other])
    return content[one] != content[other]


def stored_dtype(store: Store) -> str:
    """That of most values' tensors."""
    kinds = [str(stored.dtype).removeprefix("torch.") for stored in store.tensors.values() if len(stored.shape) > 1]
    return max(set(kinds), key=kinds.count) if kinds else "float32"


def optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
