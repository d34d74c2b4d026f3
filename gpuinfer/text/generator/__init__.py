"""Continuous batching: who has which slot and which pages, what the next step computes, what is finished.

```
protocol.py         what a generator is
generator.py        ours, from left to right: a step from start to end
seams.py            what it needs of the language and the sampler
ending.py           when an answer ends, and what it says then
begun.py            answers whose first tokens are known
prepared.py         a prompt's tokens and limits, checked before it takes a slot; a prompt under way and its rows
admission.py        which slot and which pages a row gets, whom it waits for, who gives way when pages run short
pages.py            the pool of pages: which are free, and how many rows have the others
prefixes.py         what pages hold, found by content; which of them go first when pages are needed
row_pages.py        the pages that rows have: found, taken, copied, given back
cache.py            what is known of the rows under way, by slot, in arrays
composing.py        the tokens of the next step
giving.py           what is given out of an answer while it grows
settling.py         what drawn tokens mean for the rows: first tokens, answers that are complete
troubles.py         a step that raised: fewer tokens at once, or the row at fault found
driver.py           the thread that steps
setup.py            from a checkpoint to a generator, and what fits in memory
```
"""

import gpuinfer.text.passive  # noqa: F401  before torch
from gpuinfer.text.generator.driver import Driver
from gpuinfer.text.generator.generator import Generator
from gpuinfer.text.generator.prepared import Prepared
from gpuinfer.text.generator.protocol import Stepped, TextGenerator
from gpuinfer.text.generator.setup import Tuning, open_generator

__all__ = ["Driver", "Generator", "Prepared", "Stepped", "TextGenerator", "Tuning", "open_generator"]
