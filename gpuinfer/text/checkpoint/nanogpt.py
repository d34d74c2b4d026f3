"""Opens nanoGPT's `model.pt` (Karpathy 2022), which holds "model" and "model_args" or "config".

The vocabulary of a model without a tokenizer is a file next to it: nanoGPT's meta.pkl, or the same as JSON.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Checkpoint, LanguageFiles, settings_files
from gpuinfer.text.checkpoint.config_keys import ConfigFields, read_json, refuse_unknown_keys
from gpuinfer.text.checkpoint.model_family import Biases
from gpuinfer.text.checkpoint.pickle_reader import TensorStore, plain_tensors, read_pickle, read_torch_file
from gpuinfer.text.checkpoint.safetensors_folder import tensors_differ
from gpuinfer.text.checkpoint.tensor_layout import Gpt2Layout, check_store
from gpuinfer.text.transformer import Shape

MOST_BYTES = 32 << 20  # of a meta.pkl
PADDED_TO = 64  # nanoGPT's default vocab_size is GPT-2's, rounded up to a multiple of this

log = logging.getLogger(__name__)


def read_vocabulary(path: Path) -> LanguageFiles:
    """The file holds `itos` (ids → texts, or a list of them) or `stoi`, and may hold `separator`. All else in it is
    passed over. Raises `UsageError`.
    """
    if path.suffix == ".json":
        meta = read_json(path)
    else:
        try:
            if path.stat().st_size > MOST_BYTES:
                raise UsageError(f"{path} is over {MOST_BYTES >> 20} MiB, too much for a vocabulary. Check --meta.")
            meta = read_pickle(path.read_bytes())
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}. Check --meta.") from None
        except ValueError as error:
            raise UsageError(
                f"{path} is no plain meta.pkl: {error}. Save it again as JSON, with itos and stoi."
            ) from None
    pairs = _pairs(meta)
    texts = [pairs.get(number) for number in range(len(pairs))]
    separator = meta.get("separator") if isinstance(meta, Mapping) else None
    wanted = ""
    if not pairs or sorted(pairs) != list(range(len(pairs))):
        wanted = "ids from 0 on, each with its text"
    elif not all(isinstance(one, str) for one in texts):
        wanted = "texts alone; for other tokens give a folder with a tokenizer.json"
    elif len(set(texts)) != len(texts):
        wanted = "each text once"
    elif not isinstance(separator, str | None):
        wanted = "a text as its `separator`"
    if wanted:
        raise UsageError(f"{path} does not hold {wanted}. Give the meta file that the model was trained with.")
    return LanguageFiles(vocabulary=tuple(map(str, texts)), separator=separator)


def _pairs(meta: Any) -> dict[int, Any]:
    """Texts by token id, which JSON writes as a text; {} if the file has none, if an id is none or occurs twice."""
    if not isinstance(meta, Mapping):
        return {}
    itos, stoi = meta.get("itos"), meta.get("stoi")
    items: list[tuple[Any, Any]] = []
    if isinstance(itos, list | tuple):
        items = list(enumerate(itos))
    elif isinstance(itos, Mapping):
        items = list(itos.items())
    elif isinstance(stoi, Mapping):
        items = [(number, text) for text, number in stoi.items()]
    pairs: dict[int, Any] = {}
    for number, text in items:
        if isinstance(number, str) and number.isascii() and number.isdecimal() and len(number) < 10:
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool) or number in pairs:
            return {}
        pairs[number] = text
    return pairs


WRAPPERS = ("_orig_mod.", "module.")  # what torch.compile and DistributedDataParallel put before each name
HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
BLOCK, PRODUCTS = "transformer.h.", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
GPT2_END = 50256
VOCABULARIES = ("meta.json", "meta.pkl")
TOKENIZERS = ("tokenizer.json", "vocab.json")


def open_nanogpt(path: Path, meta: Path | None, name: str) -> Checkpoint:
    """`meta`: a file with the vocabulary, or a folder with a tokenizer; None: found next to the checkpoint, or where
    nanoGPT has it, in `data` next to the checkpoint's folder.

    Raises `UsageError`.
    """
    content = read_torch_file(path)
    if not isinstance(content.get("model"), Mapping):
        raise UsageError(f"{path} holds no 'model'. Save it as nanoGPT's train.py does.")
    tensors: dict[str, Tensor] = {}
    for given, tensor in plain_tensors(content["model"], str(path)).items():
        own = given
        while wrapper := next((one for one in WRAPPERS if own.startswith(one)), None):
            own = own.removeprefix(wrapper)
        tensors[own] = tensor
    store = TensorStore(str(path), tensors)
    shape = _shape(content, path, store)
    places = (folder / one for folder in (path.parent, *_data_folder(content, path)) for one in VOCABULARIES)
    found = meta or next((one for one in places if one.is_file()), path.parent)
    folder = found.parent if found.name in TOKENIZERS else found
    if not folder.is_dir():
        language, files = read_vocabulary(found), [found]
        count: int | None = len(language.vocabulary or ())
    elif any((folder / one).is_file() for one in TOKENIZERS):
        language, files = LanguageFiles(folder=folder), settings_files(folder)
        count = _tokens_of(folder)
        shape = replace(shape, end_tokens=(GPT2_END,)) if shape.vocabulary > GPT2_END else shape
    else:
        raise UsageError(
            f"{path} does not say which token is which text. Give --meta meta.pkl (or meta.json, or a folder with "
            "the tokenizer.json that it was trained with)."
        )
    layout = Gpt2Layout(
        shape,
        Biases(*(f"{BLOCK}0.{one}.bias" in store.tensors for one in PRODUCTS)),  # `check_store` compares all blocks
        transposed=False,
        norm_shifts="transformer.ln_f.bias" in store.tensors,
    )
    check_store(store, layout, spare=[HEAD])
    if count is not None and (count < shape.vocabulary or not folder.is_dir()):
        layout = _with_texts_alone(layout, tensors, count, found, path)
        store = TensorStore(str(path), tensors)
    return Checkpoint(
        name=name,
        shape=layout.shape,
        folder=path.parent,
        settings=files,
        dtype=str(store.tensors[EMBEDDING].dtype).removeprefix("torch."),
        layout=layout,
        store=store,
        language=language,
    )


def _tokens_of(folder: Path) -> int | None:
    """How many tokens the tokenizer in `folder` has, by its highest id; None where its file does not list them."""
    content = read_json(folder / next(one for one in TOKENIZERS if (folder / one).is_file()))
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, Mapping) else content  # vocab.json is the mapping itself
    added = content.get("added_tokens") if isinstance(model, Mapping) else None
    ids = list(listed.values()) if isinstance(listed, Mapping) else []
    ids += [one.get("id") for one in added or () if isinstance(one, Mapping)]
    return max(ids) + 1 if ids and all(isinstance(one, int) for one in ids) else None


def _with_texts_alone(
    layout: Gpt2Layout, tensors: dict[str, Tensor], count: int, found: Path, path: Path
) -> Gpt2Layout:
    """The layout with the first `count` tokens, those that have a text; `tensors` lose the rows of padding, which no
    answer can then hold. Raises `UsageError` where the difference is no padding.
    """
    known = layout.shape.vocabulary
    if count == known:
        return layout
    if count > known or known != -(-count // PADDED_TO) * PADDED_TO:
        raise UsageError(f"{found} has {count} tokens, {path} knows {known}. Give the --meta that it was trained with.")
    _say_padded(found, path, count, known)
    for name in (EMBEDDING, HEAD):
        if name in tensors:
            tensors[name] = tensors[name][:count]
    return replace(layout, shape=replace(layout.shape, vocabulary=count))


@cache
def _say_padded(found: Path, path: Path, count: int, known: int) -> None:
    """Once in a process: a checkpoint is opened several times."""
    log.warning(
        "%s has %d tokens, %s knows %d: taken for padding to a multiple of %d, and left out. If the model was trained "
        "on that many, give its --meta.",
        *(found, count, path, known, PADDED_TO),
    )


def _data_folder(content: Mapping[str, Any], path: Path) -> list[Path]:
    """Where nanoGPT's sample.py searches for the meta.pkl of a checkpoint that train.py saved: `data/DATASET`."""
    config = content.get("config")
    dataset = config.get("dataset") if isinstance(config, Mapping) else None
    named = isinstance(dataset, str) and re.fullmatch(r"\w[\w.-]*", dataset)
    return [path.absolute().parent.parent / "data" / str(dataset)] if named else []


def _shape(content: Mapping[str, Any], path: Path, store: TensorStore) -> Shape:
    """Of `model_args`; else of `config`, which holds settings of the training script too. Vocabulary and positions are
    those of the tensors, unless the arguments give them.
    """
    if isinstance(content.get("model_args"), Mapping):
        arguments = ConfigFields(content["model_args"], f"{path}: model_args")
        refuse_unknown_keys("nanogpt", arguments)
    elif isinstance(content.get("config"), Mapping):
        arguments = ConfigFields(content["config"], f"{path}: config")
    else:
        raise UsageError(f"{path} holds neither 'model_args' nor 'config'. Save it as nanoGPT's train.py does.")
    found = ((name, store.tensors.get(name)) for name in (EMBEDDING, POSITIONS))
    rows = {name: tensor.shape[0] for name, tensor in found if tensor is not None and len(tensor.shape) == 2}
    hidden, heads = arguments.integer("n_embd"), arguments.integer("n_head")
    if hidden % heads:
        raise arguments.wrong("n_head", f"a divisor of {hidden}")
    return Shape(
        family="nanogpt",
        vocabulary=arguments.integer("vocab_size", rows.get(EMBEDDING)),
        hidden=hidden,
        layers=arguments.integer("n_layer", most=4096),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=4 * hidden,
        positions=arguments.integer("block_size", rows.get(POSITIONS)),
        norm="layer",
        norm_eps=1e-5,
        activation="gelu",
        gated=False,
        learned_positions=True,
        tied=not tensors_differ(store, EMBEDDING, HEAD),
    )
