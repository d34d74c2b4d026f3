"""The transformer itself: one forward step over tokens of many rows.

```
open_decoder.py   which decoder, and one that computes nothing    sizing.py   with how many slots
cpu.py            the decoder for a CPU: threads, lanes, what is compiled
cpu_step.py       a step of one lane      cpu_attention.py      cpu_product.py   products whose bits are a row's own
cpu_sharing.py    which slots begin alike, so that their rows are read once
cpu_vectors.py    cpu_math.py   cpu_intrinsics.py    vectors and what LLVM makes of them
cpu_experts.py    cpu_activation.py    what stands in a layer beside its products
cpu_weights.py    cpu_sizes.py    how weights lie    blas.py    MKL's bfloat16 product
torch_decoder.py  any device and format    torch_layers.py   torch_experts.py   torch_batch.py   torch_cache.py
segments.py       where the tokens of a step are, and what they see
torch_static.py   batches of fixed shape: compiled, and captured as CUDA graphs
```
"""

import gpuinfer.text.passive  # noqa: F401  before torch
from gpuinfer.text.decoder.open_decoder import open_sized, own_lanes
from gpuinfer.text.decoder.sizing import Sizing

__all__ = ["Sizing", "open_sized", "own_lanes"]
