"""Weights that a Hugging Face folder holds quantised, as plain matrices: dequantised as they are read.

Which tensors make a matrix is told by their names and shapes; `quantization_config` says the method.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import quantised_formats as formats
from gpuinfer.text.checkpoint.checkpoint import Digests
from gpuinfer.text.checkpoint.config_keys import ConfigFields, elsewhere, quantisation_method
from gpuinfer.text.checkpoint.tensor_layout import Store, StoredTensor

PART = re.compile(
    r"(?P<stem>.+?)\.(?P<part>qweight|qzeros|scales|g_idx|weight_packed|weight_scale_inv|weight_scale|"
    r"weight_zero_point|weight_shape|weight_g_idx|weight_global_scale|weight\..+|weight|SCB)"
)
UNUSED = re.compile(
    r".+\.((input|output)_(scale|zero_point|global_scale)|activation_scale|[qkv]_(scale|zero_point)|weight_format)"
)
"""Scales of what goes through at run time, in numbers of fewer bits where others compute, and here as --dtype says."""
SIGNS = (
    "qweight",
    "weight_packed",
    "weight_scale_inv",
    "weight_scale",
    "SCB",
    "weight.absmax",
)  # of a quantised matrix
STATE = "weight.quant_state.bitsandbytes__"
MOST_STATE = 1 << 16  # bytes


class MatrixFinder(Protocol):
    def __call__(
        self, store: Store, stem: str, parts: Mapping[str, str], settings: ConfigFields
    ) -> QuantisedMatrix: ...


@dataclass(frozen=True)
class QuantisedMatrix:
    """`parts`: names of the stored tensors by the ends of these names. `decode` makes float32 [out, in] of them."""

    shape: tuple[int, ...]
    parts: Mapping[str, str]
    decode: Callable[[Mapping[str, Tensor]], Tensor]


class QuantisedStore:
    """The matrices of a store of quantised weights, and its other tensors as they are."""

    def __init__(self, stored: Store, matrices: Mapping[str, QuantisedMatrix], plain: Collection[str]) -> None:
        self.where, self._stored, self._matrices = stored.where, stored, matrices
        self.tensors = {name: StoredTensor(one.shape, torch.float32) for name, one in matrices.items()}
        self.tensors |= {name: stored.tensors[name] for name in plain}

    def read(self, name: str, into: Tensor) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._stored.read(name, into)
            return
        parts = {part: whole_tensor(self._stored, own) for part, own in matrix.parts.items()}
        try:
            into.copy_(matrix.decode(parts))
        except (RuntimeError, IndexError, ValueError, KeyError) as error:  # shapes that contradict one another
            reason = str(error).partition("\n")[0][:200]
            raise UsageError(
                f"the quantised tensors of '{name}' in {self.where} do not fit each other: {reason}. Copy the whole "
                "model folder again."
            ) from None

    def digests(self, names: Collection[str]) -> Digests:
        own = {
            name: tuple(self._matrices[name].parts.values()) if name in self._matrices else (name,) for name in names
        }
        found = self._stored.digests(list(dict.fromkeys(part for parts in own.values() for part in parts)))
        return {name: hashlib.sha256(b"".join(found[part] for part in parts)).digest() for name, parts in own.items()}


def whole_tensor(store: Store, name: str) -> Tensor:
    stored = store.tensors[name]
    into = torch.empty(stored.shape, dtype=stored.dtype)
    store.read(name, into)
    return into


def dequantising(stored: Store, settings: ConfigFields) -> QuantisedStore:
    """`settings`: quantization_config, its method one of METHODS. Raises `UsageError` for formats that are not read."""
    find = METHODS[quantisation_method(settings.values)]
    modules: dict[str, dict[str, str]] = {}
    plain = []
    for name in stored.tensors:
        if found := PART.fullmatch(name):
            modules.setdefault(found["stem"], {})[found["part"]] = name
        elif not UNUSED.fullmatch(name):
            plain.append(name)
    matrices = {}
    for stem, parts in modules.items():
        if any(sign in parts for sign in SIGNS):
            matrices[f"{stem}.weight"] = find(stored, stem, parts, settings)
        else:
            plain += parts.values()
    return QuantisedStore(stored, matrices, plain)


def _wanted(
    store: Store, stem: str, parts: Mapping[str, str], *needed: str, more: Collection[str] = ()
) -> dict[str, str]:
    """The parts of this format. Raises `UsageError` if one is missing."""
    if missing := [part for part in needed if part not in parts]:
        raise UsageError(
            f"{store.where} lacks '{stem}.{missing[0]}' of a quantised matrix. Copy the whole folder again."
        )
    return {part: parts[part] for part in (*needed, *more) if part in parts}


def _gptq(store: Store, stem: str, parts: Mapping[str, str], settings: ConfigFields) -> QuantisedMatrix:
    bits, form = settings.integer("bits", most=8), settings.text("checkpoint_format", "gptq")
    if bits not in (2, 3, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise elsewhere(f"the weights are quantised by GPTQ to {bits} bits in the format '{form[:40]}'")
    own = _wanted(store, stem, parts, "qweight", "qzeros", "scales", more=("g_idx",))
    words, outputs = store.tensors[own["qweight"]].shape
    decode = partial(formats.gptq_matrix, old_zeros=form == "gptq", bits=bits)
    return QuantisedMatrix((outputs, words * 32 // bits), own, decode)


def _awq(store: Store, stem: str, parts: Mapping[str, str], settings: ConfigFields) -> QuantisedMatrix:
    bits, version = settings.integer("bits", 4), settings.text("version", "gemm").lower()
    if bits != 4 or version != "gemm":
        raise elsewhere(f"the weights are quantised by AWQ to {bits} bits in the format '{version[:40]}'")
    own = _wanted(store, stem, parts, "qweight", "qzeros", "scales")
    inputs, words = store.tensors[own["qweight"]].shape
    return QuantisedMatrix((words * 8, inputs), own, formats.awq_matrix)


def _fp8(store: Store, stem: str, parts: Mapping[str, str], settings: ConfigFields) -> QuantisedMatrix:
    scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    own = _wanted(store, stem, parts, "weight", scale, more=("weight_zero_point",))
    decode = partial(formats.scaled_matrix, block=_block(settings))
    return QuantisedMatrix(store.tensors[own["weight"]].shape, own, decode)


def _block(settings: ConfigFields) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None: it is not said."""
    groups = [one.get("weights") for one in settings.mapping("config_groups").values() if isinstance(one, Mapping)]
    given = [one.get("block_structure") for one in groups if isinstance(one, Mapping)]
    for block in (settings.values.get("weight_block_size"), *given):
        if isinstance(block, list) and len(block) == 2 and all(isinstance(one, int) and one > 0 for one in block):
            return block[0], block[1]
    return None


def _compressed(store: Store, stem: str, parts: Mapping[str, str], settings: ConfigFields) -> QuantisedMatrix:
    if settings.values.get("transform_config") or settings.mapping("sparsity_config").get("format", "dense") != "dense":
        raise elsewhere("the weights are compressed as sparse or rotated matrices (compressed-tensors)")
    if "weight_packed" not in parts:
        return _fp8(store, stem, parts, settings)
    if "weight_global_scale" in parts:
        own = _wanted(store, stem, parts, "weight_packed", "weight_scale", "weight_global_scale")
        outputs, half = store.tensors[own["weight_packed"]].shape
        return QuantisedMatrix((outputs, 2 * half), own, formats.fp4_matrix)
    own = _wanted(
        store, stem, parts, "weight_packed", "weight_scale", "weight_shape", more=("weight_zero_point", "weight_g_idx")
    )
    if store.tensors[own["weight_packed"]].dtype != torch.int32:
        raise elsewhere(f"the weights are quantised by compressed-tensors in a format of their own ('{stem[:80]}')")
    shape = tuple(int(size) for size in whole_tensor(store, own.pop("weight_shape")))
    _, words = store.tensors[own["weight_packed"]].shape
    bits = formats.packed_bits(words, shape[1]) if len(shape) == 2 and shape[1] > 0 else 0
    if bits not in (2, 4, 8):
        raise elsewhere(f"'{stem[:80]}' is quantised to {bits} bits (2, 4 and 8 are read)")
    return QuantisedMatrix(shape, own, partial(formats.packed_matrix, shape=shape, bits=bits))


def _bitsandbytes(store: Store, stem: str, parts: Mapping[str, str], settings: ConfigFields) -> QuantisedMatrix:
    if "SCB" in parts:
        own = _wanted(store, stem, parts, "weight", "SCB")
        return QuantisedMatrix(store.tensors[own["weight"]].shape, own, formats.bitsandbytes_8bit)
    own = _wanted(
        store,
        stem,
        parts,
        *("weight", "weight.absmax", "weight.quant_map"),
        more=("weight.nested_absmax", "weight.nested_quant_map"),
    )
    state = _state(store, stem, parts)
    return QuantisedMatrix(tuple(state["shape"]), own, partial(formats.bitsandbytes_4bit, state=state))


def _state(store: Store, stem: str, parts: Mapping[str, str]) -> dict[str, Any]:
    """What bitsandbytes stores beside a matrix: an object of JSON, as a tensor of bytes."""
    name = next((own for part, own in parts.items() if part.startswith(STATE)), None)
    try:
        if name is None or len(store.tensors[name].shape) != 1 or store.tensors[name].shape[0] > MOST_STATE:
            raise ValueError
        state = json.loads(bytes(whole_tensor(store, name).tolist()))
        whole = {key: int(state[key]) for key in ("blocksize", *(["nested_blocksize"] * ("nested_absmax" in state)))}
        return {**state, **whole, "shape": [int(size) for size in state["shape"]]}
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{store.where} does not say how '{stem}.weight' is quantised. Copy the folder again."
        ) from None


METHODS: Mapping[str, MatrixFinder] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
