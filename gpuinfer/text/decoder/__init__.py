"""The transformer itself: one forward step over tokens of many rows.

```
open_decoder.py   which decoder, and one that computes nothing    sizing.py   with how many slots and pages
cpu.py            the decoder for a CPU      cpu_threads.py   its threads: pieces of work, barriers
fewest_threads.py how many of them a step takes that waits for memory
cpu_step.py       a step, phase by phase     cpu_plan.py      which rows go through attention together
cpu_attention.py  attention over pages       cpu_pool.py      the memory of pages
cpu_product.py    products whose bits are a row's own: cpu_block.py (vectors), cpu_amx.py (the matrix unit),
                  cpu_bfloat16.py (which of them there are), cpu_panels.py (how their weights lie)
cpu_experts.py    cpu_activation.py    cpu_adapters.py    what stands in a layer between its products
cpu_weights.py    cpu_sizes.py         what the compiled step reads, and where
cpu_vectors.py    cpu_math.py          cpu_intrinsics.py    vectors and what LLVM makes of them
torch_decoder.py  any device and format    torch_layers.py   torch_experts.py   torch_batch.py   torch_cache.py
segments.py       where the tokens of a step are, and what they see
torch_static.py   batches of fixed shape: compiled, and captured as CUDA graphs
triton_layers.py  layers in kernels of our own for CUDA, triton_kernels.py
prefix_plan.py    which keys and values those read once for several rows
```
"""

import gpuinfer.text.passive  # noqa: F401  before torch
from gpuinfer.text.decoder.open_decoder import open_sized, own_kernels
from gpuinfer.text.decoder.sizing import Sizing

__all__ = ["Sizing", "open_sized", "own_kernels"]
