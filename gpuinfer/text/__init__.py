"""Text generation: checkpoints, the decoder, sampling, language, and the generator that puts them to work.

```
generator/    continuous batching: who has which slot, what the next step computes, what is finished
sampling/     from logits to tokens
language/     tokenizer, chat template, text as it grows, stop strings, constraints
decoder/      the transformer itself: one forward step over tokens of many rows
checkpoint/   folders and files: shape, weights, estimates
shape.py  weights.py  step.py    what they share
```
"""

import os
import sys

WAITING = "OMP_WAIT_POLICY"

if "torch" not in sys.modules and WAITING not in os.environ:
    # Torch's own threads keep their cores busy for a while after each operation, in case another comes: cores that the
    # decoder's threads compute on. They read how to wait once, as torch is loaded; our children shall not inherit it.
    os.environ[WAITING] = "passive"
    import torch  # noqa: F401

    del os.environ[WAITING]
