"""The transformer itself: one forward step over tokens of many rows.

```
opening.py  sizing.py   which decoder, with how many slots
cpu*.py  blas.py        compiled kernels for the CPU, float32 and bfloat16
torch_*.py              plain torch: CUDA, and whatever the kernels do not take; an independent second opinion on them
null.py                 computes nothing
```
"""

from gpuinfer.text.decoder.open_decoder import open_sized
from gpuinfer.text.decoder.sizing import Sizing

__all__ = ["Sizing", "open_sized"]
