"""From logits to tokens: each row by its own settings, the same whatever shares its step.

```
sampler.py      what the generator calls
checks.py       what may be asked of an answer
slots.py        what is known of each slot
cpu.py          the processor's way: compiled, in threads;  cpu_*.py its kernels
torch_path.py   the way of every other device;  torch_*.py its parts
```
"""

from gpuinfer.text.sampling.sampler import Drawn, Sampler
from gpuinfer.text.sampling.slots import check_sampling

__all__ = ["Drawn", "Sampler", "check_sampling"]
