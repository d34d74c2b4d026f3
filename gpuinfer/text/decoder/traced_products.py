"""Products and norms of our own inside a model of transformers': the same numbers, from weights in panels.

A module of `torch.nn.Linear` keeps its place, its name and its bias; its weight is kept as the product reads it. A norm
is replaced where it computes what an RMSNorm does, which is tried out, not read off its name. Both compute a row by
itself: its bits depend neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuinfer.host import machine
from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_math import TILE
from gpuinfer.text.decoder.cpu_panels import TERMS, MemoryArena, panels_of, weight_in
from gpuinfer.text.decoder.cpu_product import Kind, product_with
from gpuinfer.text.decoder.openmp import in_torch_threads
from gpuinfer.text.decoder.traced_kernels import (
    ADDRESSES,
    CONTROL,
    INNER,
    NORM_JOB,
    NORM_ROWS,
    NORMS,
    PRODUCT,
    PRODUCT_JOB,
    RUN_BY,
    SCALES,
    WEIGHT,
    WIDE,
    WIDTH,
    compiled_job,
)


class PackedProduct:
    """What a `torch.nn.Linear` with this weight and bias computes, with the weight in panels, which lie in the `arena`
    or by themselves. In `torch.get_num_threads` threads.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kind: Kind,
        arena: MemoryArena | None = None,
        pool: Executor | None = None,
    ) -> None:
        self.columns, self.inner = weight.shape
        self.dtype, self._bias = weight.dtype, bias
        half = self.dtype == torch.bfloat16
        together, stored = (TERMS, 2) if half else (1, 4)
        self._operand = torch.bfloat16 if kind in ("amx", "avx512") else torch.float32
        self._function = compiled_job(PRODUCT)
        self._job = np.zeros(PRODUCT_JOB, np.int64)
        self._address = self._job.ctypes.data
        sizes = self._job[CONTROL:ADDRESSES]
        sizes[at.OPERAND] = self._operand.itemsize
        sizes[at.ROUND], sizes[at.ROUND_BYTES] = together, together * TILE * stored
        self._job[ADDRESSES + at.WEIGHT_PRODUCT] = product_with(kind).address
        self._job[WIDE], self._job[INNER] = self.columns, self.inner
        self.take(panels_of(weight, arena, pool))

    def take(self, panels: NDArray[Any]) -> None:
        """Other weights, as `panels_of` gives them."""
        self.panels = panels
        self._job[WEIGHT] = panels.ctypes.data

    def weight(self) -> Tensor:
        """The weight [columns, inner], a copy."""
        return weight_in(self.panels, self.columns, self.inner)

    def __call__(self, rows: Tensor) -> Tensor:
        """[…, columns] of rows […, inner]."""
        flat = rows.reshape(-1, self.inner)
        if flat.dtype != self._operand:
            flat = flat.to(self._operand)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        found = torch.empty((len(flat), self.columns))
        threads = torch.get_num_threads()
        self._job[at.NEXT] = 0
        self._job[RUN_BY:WIDE] = threads, len(flat), flat.data_ptr(), flat.stride(0), found.data_ptr()
        in_torch_threads(self._function, self._address, threads)
        if self._bias is not None:
            found += self._bias
        return found.to(self.dtype).view(*rows.shape[:-1], self.columns)


class FusedNorm:
    """RMSNorm of `scales` float32 [width], with `eps`; rows of `dtype`."""

    def __init__(self, scales: Tensor, eps: float, dtype: torch.dtype) -> None:
        self.width, self.dtype = len(scales), dtype
        self._function = compiled_job(NORMS[str(dtype).removeprefix("torch.")])
        self._scales = np.append(scales.detach().float().numpy(), np.float32(eps)).astype(np.float32)
        self._job = np.zeros(NORM_JOB, np.int64)
        self._address = self._job.ctypes.data
        self._job[WIDTH], self._job[SCALES] = self.width, self._scales.ctypes.data

    def take(self, scales: Tensor) -> None:
        """Other scales."""
        self._scales[:-1] = scales.float().numpy()

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        found = torch.empty_like(rows)
        self._job[at.NEXT] = 0
        self._job[NORM_ROWS:WIDTH] = rows.numel() // self.width, rows.data_ptr(), found.data_ptr()
        in_torch_threads(self._function, self._address, torch.get_num_threads())
        return found


TRIED = 6  # rows that a norm is tried with, of sizes from far below to far above 1
AS_EXACT = {torch.float32: 3e-6, torch.bfloat16: 2e-2}  # of a norm's values, which are about 1: roundings apart


def fused_norm(module: nn.Module, dtype: torch.dtype) -> tuple[FusedNorm, float] | None:
    """What computes the same as `module`, if that is an RMSNorm, and what its weight lacks: 0, or 1."""
    weight, eps = module._parameters.get("weight"), getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if weight is None or weight.dim() != 1 or not isinstance(eps, float) or len(list(module.parameters())) > 1:
        return None
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-5, 3, TRIED)[:, None]
    rows = (torch.randn(TRIED, len(weight), generator=generator) * sizes).to(dtype)
    given = rows.clone()
    try:
        expected = module(rows)
    except Exception:  # noqa: BLE001  another module of transformers', which takes something else
        return None
    if not isinstance(expected, Tensor) or expected.shape != rows.shape or expected.dtype != dtype:
        return None
    for added in (0.0, 1.0):
        norm = FusedNorm(weight.float() + added, eps, dtype)
        bound = AS_EXACT[dtype] * (1 + expected.abs())
        if ((norm(given) - expected).abs() <= bound).all():
            return norm, added
    return None


class PackedModules:
    """The modules of `model` that our own products and norms compute, by their names. Each weight is let go as soon as
    it is packed; that of an embedding which is the head too is kept for looking up.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, kind: Kind) -> None:
        self._modules = dict(model.named_modules())
        self.products: dict[str, PackedProduct] = {}
        self.norms: dict[str, tuple[FusedNorm, float]] = {}
        self._tied: dict[str, Tensor] = {}  # weights of products that embeddings have too
        lookups = {id(one.weight): one.weight for one in self._modules.values() if isinstance(one, nn.Embedding)}
        self._arena = MemoryArena()
        with torch.no_grad(), ThreadPoolExecutor(machine.cores(), "gpuinfer-packing") as pool:
            for name, module in self._modules.items():
                if type(module).forward is nn.Linear.forward and _plain(module, dtype):
                    assert isinstance(module, nn.Linear)
                    self.products[name] = product = PackedProduct(module.weight, module.bias, kind, self._arena, pool)
                    if id(module.weight) in lookups:
                        self._tied[name] = module.weight
                    module.register_parameter("weight", _nothing(module.weight))
                    module.forward = product  # type: ignore[assignment,method-assign]
                elif (norm := fused_norm(module, dtype)) is not None:
                    self.norms[name] = norm
                    module.forward = norm[0]  # type: ignore[assignment]

    def tensors(self) -> list[Tensor]:
        """What is kept of the products' weights: bfloat16 as its bits in int16."""
        found = (one.panels for one in self.products.values())
        return [torch.from_numpy(one.view(np.int16) if one.dtype == np.uint16 else one) for one in found]

    def repacked(self, name: str, tensor: Tensor) -> NDArray[Any] | Tensor:
        """Another tensor of the model, as `take` has it."""
        module, _, last = name.rpartition(".")
        return panels_of(tensor) if last == "weight" and module in self.products else tensor

    def take(self, name: str, packed: NDArray[Any] | Tensor) -> bool:
        """Exchange a tensor for what `repacked` gave. Whether the model's own tensor is not to be written to."""
        module = name.rpartition(".")[0]
        if isinstance(packed, np.ndarray):
            self.products[module].take(packed)
            return True
        if module in self.norms:
            norm, added = self.norms[module]
            norm.take(packed.float() + added)
        return False

    def restore(self) -> None:
        """Let the model compute by its own code again, with its own weights."""
        for name, product in self.products.items():
            module = self._modules[name]
            weight = self._tied[name] if name in self._tied else product.weight()
            module.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        for name in (*self.products, *self.norms):
            del self._modules[name].__dict__["forward"]
        self.products, self.norms = {}, {}


def _plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module has a weight in `dtype` and nothing that is called before or behind its forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    weight = module._parameters.get("weight")
    return not hooked and weight is not None and weight.dtype == dtype and weight.device.type == "cpu"


def _nothing(weight: Tensor) -> nn.Parameter:
    """A weight of the same shape without memory: whoever reads its values finds none."""
    return nn.Parameter(torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape), requires_grad=False)
