"""Masked diffusion models: answers that are filled in a block at a time, some tokens a step, in any order.

```
generator.py     a step from start to end: compose, forward, score, decide, settle
planning.py      how a prompt asks to be answered, and what cannot be; choosing.py finds its decoder
layout.py        where an answer's blocks lie; rows.py one prompt under way, and its rows; slots.py their canvases
caching.py       which positions a step computes anew; composing.py the tokens of the next step
scoring.py       from logits to what decoders look at (asking.py, cpu_scores.py, torch_scores.py)
deciding.py      what a decoder is; decoders/ those that are built in; unmasking.py has them decide, and writes it down
blending.py      masks that enter a step with a hint of what is expected there (cpu_blend.py)
settling.py      how far an answer is known, what of it is given out, and when it ends
```
"""
