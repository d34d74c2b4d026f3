"""From a model's name to its weights: Hugging Face folders, nanoGPT files, and two built-in models.

```
opening.py       what a name means
folder.py        a Hugging Face folder                 nanogpt.py  meta.py  pickled.py   model.pt and its alphabet
family.py        config.json → Shape                   builtin.py                        "tiny" and "null"
rope.py  windows.py  fields.py  refusals.py  keys.py   its parts; keys.py: no key of a config is passed over unknown
layout.py        which stored tensors make which weights
safetensors.py   torch_file.py   drawn.py              stores: where the tensors come from
assembly.py      checks a store against a layout, and reads it
estimate.py      bytes before anything is loaded       fingerprint.py   digests.py   what --resume compares
```
"""

from gpuinfer.text.checkpoint.checkpoint import Checkpoint as Checkpoint
from gpuinfer.text.checkpoint.checkpoint import LanguageFiles as LanguageFiles
from gpuinfer.text.checkpoint.estimate import Estimate as Estimate
from gpuinfer.text.checkpoint.estimate import refuse_unfit as refuse_unfit
from gpuinfer.text.checkpoint.export import save_folder as save_folder
from gpuinfer.text.checkpoint.open_checkpoint import open_checkpoint as open_checkpoint
