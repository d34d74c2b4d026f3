"""The transformer itself: one forward step over tokens of many rows.

open_decoder.py chooses between compiled_decoder.py (processors, with the cpu_ files) and torch_decoder.py (any device,
with kernels in Triton for CUDA).
"""

import gpuinfer.text.torch_import  # noqa: F401  before torch
from gpuinfer.text.decoder.open_decoder import Sizing, open_sized, own_kernels

__all__ = ["Sizing", "open_sized", "own_kernels"]
