"""From logits to tokens: each row by its own settings, the same whatever shares its step.

```
sampler.py       what the generator calls
slots.py         what is known of each slot, and what may be asked
cpu.py           the compiled way: cpu_values.py (order and weights), cpu_filters.py (top-k, top-p, min-p as one
                 threshold), cpu_draw.py (counter-based random numbers, draws, log-probabilities)
torch_path.py    the same in torch operations, to the bit: CUDA, and a second opinion
triton_draws.py  draws on CUDA devices in kernels of our own, triton_kernels.py, where there is Triton
```
"""

import gpuinfer.text.passive  # noqa: F401  before torch
from gpuinfer.text.sampling.sampler import Drawn, Sampler
from gpuinfer.text.sampling.slots import check_sampling

__all__ = ["Drawn", "Sampler", "check_sampling"]
