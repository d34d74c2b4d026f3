"""Opens a Hugging Face folder that transformers' own code computes: a decoder whose attention goes through its
interface.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import (
    Checkpoint,
    Digests,
    DigestSource,
    LanguageFiles,
    cached_digests,
    settings_files,
    tensor_digests,
)
from gpuinfer.text.checkpoint.config_keys import (
    DEQUANTISED,
    ConfigFields,
    quantisation_method,
    read_json,
    refuse_remote_code,
)
from gpuinfer.text.checkpoint.model_family import Biases
from gpuinfer.text.checkpoint.quantised_store import dequantising
from gpuinfer.text.checkpoint.rotary_family import beginning_of, end_tokens_of
from gpuinfer.text.checkpoint.safetensors_folder import open_shards
from gpuinfer.text.checkpoint.tensor_layout import RotaryLayout, StoredTensor
from gpuinfer.text.checkpoint.transformers_trace import (
    OURS,
    TracedModel,
    first_words,
    positions_of_config,
    quiet,
    read_transformers_config,
    register_attention,
    traced,
)
from gpuinfer.text.text_options import WeightFormat
from gpuinfer.text.transformer import Shape

WIDTHS = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "moe_intermediate_size")
SHOWN = 3


class WeightFiles:
    """`Store` of whole files, of which only digests are wanted: transformers reads them."""

    tensors: Mapping[str, StoredTensor] = {}

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._files = sorted(folder.glob("*.safetensors"))

    def read(self, name: str, into: Tensor) -> None:
        raise UsageError(f"{self.where}: transformers reads '{name}', not we. Use -B decoder=transformers.")

    def digests(self, names: Collection[str]) -> Digests:
        """Of each file by its name, whatever is asked for; kept until the file changes."""
        found: Digests = {}
        for path in self._files:
            whole = {path.name: path}
            found |= cached_digests(path, whole, partial(_file_digests, whole))
        return found


def _file_digests(files: Mapping[str, Path]) -> Digests:
    (name, path), *_ = files.items()
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return tensor_digests(
                {name: DigestSource(size, lambda start, length: os.pread(file.fileno(), length, start))}
            )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Is its disk still there?") from None


@dataclass(frozen=True, kw_only=True)
class TransformersCheckpoint(Checkpoint):
    """A checkpoint whose weights only transformers' own code understands: `layout` and `store` describe none."""

    traced: TracedModel
    weights_from: Path
    state: Callable[[torch.dtype], dict[str, Tensor]] | None = None  # of all tensors; None: transformers reads them

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits of settings, tokenizer and weights, file by file. Raises `UsageError`."""
        digest = hashlib.sha256(b"transformers" + self.identity)
        for path in self.settings:
            try:
                digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}. Check its permissions.") from None
        for name, content in sorted(self.store.digests(()).items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()[:32]

    def weight_bytes(self, dtype: torch.dtype, quantised: WeightFormat | None = None, own: bool = False) -> int:
        """See `Checkpoint.weight_bytes`. Nothing is quantised here."""
        return self.traced.values * dtype.itemsize

    def model(self, dtype: torch.dtype, folder: Path | None = None) -> Any:
        """Transformers' model on the CPU in `dtype`, with our attention in it, and the weights of `folder` instead of
        its own. Raises `UsageError` for weights that are missing, damaged, or of another model.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

        register_attention()
        place = self.weights_from if folder is None else folder
        given = self.state(dtype) if self.state is not None and folder is None else None
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        make: Any = AutoModelForCausalLM if given is None else classes[type(self.traced.config)]
        try:
            with quiet():
                model, told = make.from_pretrained(
                    place if given is None else None,
                    state_dict=given,
                    config=copy.deepcopy(self.traced.config),
                    dtype=dtype,
                    attn_implementation=OURS,
                    local_files_only=True,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # they are told, and refused below
                    output_loading_info=True,
                )
        except Exception as error:  # noqa: BLE001  of any kind: damaged files, other sizes, packages that are missing
            raise UsageError(
                f"transformers cannot load the weights in {place}: {first_words(error)}. Copy the whole folder again."
            ) from None
        problems = [f"'{name}' is missing" for name in sorted(told["missing_keys"])]
        problems += [f"'{one[0]}' is of another size" for one in told["mismatched_keys"]]
        problems += [f"'{name}' is not part of it" for name in sorted(told["unexpected_keys"])]
        if problems:
            more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise UsageError(
                f"the weights in {place} are not those of a {self.shape.family} model of this config: "
                f"{'; '.join(problems[:SHOWN])}{more}. Copy the whole folder again, or save the model again."
            )
        return model.eval().requires_grad_(False)


def open_with_transformers(folder: Path, name: str) -> TransformersCheckpoint:
    """Settings are read, and the model's code is traced; weights are not read. Raises `UsageError` for what does not
    run here, by the family's name.
    """
    others = [folder / "generation_config.json", folder / "tokenizer_config.json"]
    generation, tokenizer = (read_json(path) if path.is_file() else {} for path in others)
    config = read_transformers_config(folder)
    quantised: Any = getattr(config, "quantization_config", None)
    settings = None
    if quantised is not None:
        refuse_missing_package(quantisation_method(quantised), folder)
    if quantisation_method(quantised) in DEQUANTISED:  # by us, whatever is installed
        settings = ConfigFields(quantised, "config.json: quantization_config")
        del config.quantization_config
    refuse_remote_code(tokenizer, str(others[1]))
    found = traced(config)
    shape = shape_of_traced(found, generation)
    stored = open_shards(folder, quantised=quantised is not None).tensors
    matrices = [str(one.dtype).removeprefix("torch.") for one in stored.values() if len(one.shape) > 1]
    return TransformersCheckpoint(
        name=name,
        shape=shape,
        folder=folder,
        settings=settings_files(folder),
        dtype=max(set(matrices), key=matrices.count, default="float32"),
        layout=RotaryLayout(shape, Biases()),
        store=WeightFiles(folder),
        language=LanguageFiles(folder=folder),
        traced=found,
        weights_from=folder,
        state=None if settings is None else partial(dequantised_state, folder, settings),
    )


QUANTISERS = {  # methods that transformers opens through another package: how it is imported, and installed
    "aqlm": ("aqlm", "aqlm[cpu]"),
    "auto-round": ("auto_round", "auto-round"),
    "eetq": ("eetq", "eetq"),
    "higgs": ("flute", "flute-kernel"),
    "hqq": ("hqq", "hqq"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "spqr": ("spqr_quant", "spqr_quant"),
    "torchao": ("torchao", "torchao"),
    "vptq": ("vptq", "vptq"),
}


def refuse_missing_package(method: str, folder: Path) -> None:
    """Raises `UsageError` for a method whose weights neither we nor transformers, as it is installed, can read."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if method in DEQUANTISED:
        return
    module, package = QUANTISERS.get(method, ("", ""))
    if module and find_spec(module.partition(".")[0]) is None:
        raise UsageError(
            f"the weights in {folder} are quantised by {method}, which transformers reads through a package that is "
            f"not installed: pip install '{package}'. Without it: {', '.join(DEQUANTISED)}."
        )
    if not module and method not in AUTO_QUANTIZER_MAPPING:
        raise UsageError(
            f"the weights in {folder} are quantised by {method[:40]}, which neither gpuinfer "
            f"({', '.join(DEQUANTISED)}) nor the installed transformers reads. Give the original folder, or use "
            "--backend vllm if vLLM knows it."
        )


def dequantised_state(folder: Path, settings: ConfigFields, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a quantised folder as plain ones. Raises `UsageError` for what is not read."""
    store = dequantising(open_shards(folder, quantised=True), settings)
    found = {name: torch.empty(one.shape, dtype=dtype) for name, one in store.tensors.items()}
    for name, into in found.items():
        store.read(name, into)
    return found


def shape_of_traced(found: TracedModel, generation: Mapping[str, Any]) -> Shape:
    """Sizes as the cache, estimates and reports need them: the largest of layers that differ."""
    own = found.config.get_text_config()
    fields, calls = ConfigFields(own.to_dict()), found.calls
    widths = [getattr(own, width, None) for width in WIDTHS]
    hidden = int(own.hidden_size)
    windows = tuple(call.window for call in calls)
    return Shape(
        family=str(found.config.model_type),
        vocabulary=found.vocabulary,
        hidden=hidden,
        layers=len(calls),
        heads=max(call.heads for call in calls),
        kv_heads=max(call.kv_heads for call in calls),
        head_dim=max(max(call.key_dim, call.value_dim) for call in calls),
        intermediate=max([width for width in widths if isinstance(width, int)], default=4 * hidden),
        positions=positions_of_config(found.config),
        windows=windows if any(windows) else (),
        tied=bool(getattr(own, "tie_word_embeddings", False)),
        end_tokens=end_tokens_of(
            fields, ConfigFields(dict(generation), "generation_config.json"), None, found.vocabulary
        ),
        beginning_token=beginning_of(fields, None, found.vocabulary),
        decoder="transformers",
        cached_values=sum(call.kv_heads * (call.key_dim + call.value_dim) for call in calls),
    )
