"""Compile each kernel as the layers of a model launch it, for NVIDIA's compute capabilities given, and print what each
takes, as JSON lines. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).parents[1] / "text"))

from random_models import LLAMA

from gpuinfer.text.decoder.torch_cache import PageCache
from gpuinfer.text.decoder.torch_layers import SharedPrefixes, StepBatch, Tiles
from gpuinfer.text.decoder.triton_layers import TritonLayers, tile_rows
from gpuinfer.text.sampling.slot_settings import SETTINGS
from gpuinfer.text.sampling.torch_path import WantedDraws
from gpuinfer.text.sampling.triton_draws import TritonDraws
from gpuinfer.text.transformer import Layer, Linear, Norm

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64"}


class Ahead:
    """Compiles what it would launch, once for each form."""

    capabilities: tuple[int, ...] = ()

    def _launch(self, kernel, grid, *given, num_warps, **sizes):
        signature, attributes = dict.fromkeys(sizes, "constexpr"), {}
        for number, (name, value) in enumerate(zip(kernel.arg_names, given, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{NAMES[value.dtype]}"
                attributes[(number,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, sizes, attributes)
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        for capability in self.capabilities:
            built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            told = {"kernel": kernel.fn.__name__, "capability": capability, "sizes": sizes}
            print(json.dumps({**told, "bytes": len(built.asm["cubin"]), "shared": built.metadata.shared}), flush=True)


class Compiling(Ahead, TritonLayers):
    pass


class CompilingDraws(Ahead, TritonDraws):
    pass


def compile_draws(vocabulary: int) -> None:
    records = np.zeros(4, np.dtype(SETTINGS))
    values = torch.zeros(4, vocabulary)
    CompilingDraws().drawn(values, values[:, 0], WantedDraws.of(records, np.zeros(4), values.device))


def compile_all(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = replace(LLAMA, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=1)
    layers = Compiling(shape, None, torch.zeros(64, head_dim // 2), torch.zeros(64, head_dim // 2), 4096)
    cache = PageCache(shape, 4, 64, torch.device("cpu"), dtype)
    rows = torch.zeros(256, dtype=torch.int64)
    many, few = torch.zeros(256, 128, dtype=torch.int64), torch.zeros(8, 128, dtype=torch.int64)
    shared = SharedPrefixes(torch.zeros(6, 128, dtype=torch.int64), rows, rows, rows, 8)
    forms = [
        Tiles(many, None, 1, 4096),
        Tiles(many, None, 1, 4096, shared),
        Tiles(few, None, 1, 4096),
        Tiles(few, None, 1, 4096, shared),
        Tiles(many, (rows, rows, rows), 1, 4096, shared),
        Tiles(few, (rows, rows, rows), tile_rows(shape), 4096),
    ]
    for tiles in forms:
        batch = StepBatch(rows, rows, rows, tiles=(tiles,), sees=rows)
        layers.attend(torch.zeros(256, heads, head_dim, dtype=dtype), batch, cache, 0)
    x, norm, nothing = torch.zeros(4, 2048, dtype=dtype), Norm(torch.zeros(2048)), Linear(torch.zeros(0))
    layers.norm(x, norm)
    layers.sum_norm(x, x, norm)
    layers.activate(x)
    scale = Norm(torch.zeros(head_dim))
    for head_norm in (None, scale):
        layer = Layer(norm, nothing, nothing, norm, nothing, nothing, head_norm, head_norm)
        layers.place(layer, torch.zeros(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype), batch, cache, 0)


if __name__ == "__main__":
    Ahead.capabilities = tuple(map(int, sys.argv[1].split(",")))
    compile_all(32, 8, 128, torch.bfloat16)
    compile_draws(128_256)
    compile_draws(151_665)  # no multiple of anything
