"""Opens nanoGPT's `model.pt` (Karpathy 2022), which holds "model" and "model_args" or "config".

The alphabet of a character-level model lies beside it: nanoGPT's meta.pkl, or the same as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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

MOST_BYTES = 4 << 20  # of a meta.pkl: all of Unicode fits


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
        return read_pickle(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Check --meta.") from None
    except ValueError as error:
        raise UsageError(f"{path} is no plain meta.pkl: {error}. Save it again as JSON, with itos and stoi.") from None


def _pairs(meta: Any) -> dict[int, Any]:
    """Texts by token id; {} if the file has none."""
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
    """Pairs of an id, which JSON writes as a text, and its text; {} if an id is none, or occurs twice."""
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


WRAPPERS = ("_orig_mod.", "module.")  # what torch.compile and DistributedDataParallel put before each name
HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
BLOCK, PRODUCTS = "transformer.h.", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
GPT2_END = 50256
ALPHABETS = ("meta.json", "meta.pkl")
TOKENIZERS = ("tokenizer.json", "vocab.json")


def open_nanogpt(path: Path, meta: Path | None, name: str) -> Checkpoint:
    """`meta`: a file with the characters, or a folder with a tokenizer; None: found beside the checkpoint.

    Raises `UsageError`.
    """
    content = read_torch_file(path)
    store = TensorStore(str(path), unwrapped(plain_tensors(_object(content, "model", path), str(path))))
    shape = shape_of_nanogpt(_arguments(content, path), store)
    language, files = language_beside(path, meta)
    layout = Gpt2Layout(
        _with_end_token(shape, language, path),
        Biases(*(f"{BLOCK}0.{name}.bias" in store.tensors for name in PRODUCTS)),  # `check_store` compares all blocks
        transposed=False,
        norm_shifts="transformer.ln_f.bias" in store.tensors,
    )
    check_store(store, layout, spare=[HEAD])
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


def unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names that the model's author gave."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        while wrapper := next((one for one in WRAPPERS if name.startswith(one)), None):
            name = name.removeprefix(wrapper)
        plain[name] = tensor
    return plain


def shape_of_nanogpt(arguments: ConfigFields, store: TensorStore) -> Shape:
    """Vocabulary and positions are those of the tensors, unless the arguments give them."""
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


def language_beside(path: Path, meta: Path | None) -> tuple[LanguageFiles, list[Path]]:
    """The model's tokenizer or alphabet, and its files."""
    found = meta or next((path.parent / name for name in ALPHABETS if (path.parent / name).is_file()), path.parent)
    folder = found.parent if found.name in TOKENIZERS else found
    if folder.is_dir():
        if any((folder / name).is_file() for name in TOKENIZERS):
            return LanguageFiles(folder=folder), settings_files(folder)
        raise UsageError(
            f"{path} does not say which token is which character. Give --meta meta.pkl (or meta.json, or a folder with "
            "the tokenizer.json that it was trained with)."
        )
    return LanguageFiles(characters=read_characters(found)), [found]


def _with_end_token(shape: Shape, language: LanguageFiles, path: Path) -> Shape:
    """The shape with its language's end token. Raises `UsageError` if the alphabet is larger than the vocabulary."""
    if language.characters is None:
        return replace(shape, end_tokens=(GPT2_END,)) if shape.vocabulary > GPT2_END else shape
    if len(language.characters) > shape.vocabulary:
        raise UsageError(
            f"the alphabet has {len(language.characters)} characters, {path} knows {shape.vocabulary} tokens. "
            "Give the --meta file that it was trained with."
        )
    return shape


def _arguments(content: Mapping[str, Any], path: Path) -> ConfigFields:
    """`model_args`; else `config`, which holds settings of the training script too."""
    if isinstance(content.get("model_args"), Mapping):
        arguments = ConfigFields(content["model_args"], f"{path}: model_args")
        refuse_unknown_keys("nanogpt", arguments)
        return arguments
    if isinstance(content.get("config"), Mapping):
        return ConfigFields(content["config"], f"{path}: config")
    raise UsageError(f"{path} holds neither 'model_args' nor 'config'. Save it as nanoGPT's train.py does.")


def _object(content: Mapping[str, Any], name: str, path: Path) -> Mapping[Any, Any]:
    if not isinstance(content.get(name), Mapping):
        raise UsageError(f"{path} holds no '{name}'. Save it as nanoGPT's train.py does.")
    return content[name]  # type: ignore[no-any-return]
