"""From a model's name to its weights: Hugging Face folders, checkpoints of trainers, and built-in models.

```
names.py             what a name means
folder.py            a Hugging Face folder and its shards
nanogpt.py           nanoGPT's model.pt and its alphabet    pickled.py   torch files
trained.py           a torch distributed checkpoint on a base model: dcp.py (what lies where), dcp_names.py (what
                     trainers call tensors), dcp_store.py (tensors put together from chunks)
opcodes.py           pickles, read without an unpickler
builtin.py           "tiny", "tiny-llada" and others, whose weights are drawn; "null"
family.py            config.json → Shape    rotary.py   of all that are built like Llama    rope.py   angles and windows
keys.py              no key passes unknown
masked.py            of masked diffusion models    masked_keys.py   how each is known, and its keys
assembly.py          which stored tensors make which weights, checked and read    tensor_names.py   what they are called
safetensors.py       files of tensors
estimate.py          bytes before anything is loaded        digests.py   what --resume compares
replacement.py       other weights for a model that is at work
adapter.py           adapters as PEFT saves them          adapter_config.py   what they say of themselves
checkpoint.py        what comes of it all                   export.py    a folder written
```
"""

import gpuinfer.text.passive  # noqa: F401  before torch
from gpuinfer.text.checkpoint.adapter import read_adapter as read_adapter
from gpuinfer.text.checkpoint.checkpoint import Checkpoint as Checkpoint
from gpuinfer.text.checkpoint.checkpoint import LanguageFiles as LanguageFiles
from gpuinfer.text.checkpoint.estimate import Estimate as Estimate
from gpuinfer.text.checkpoint.estimate import adapter_bytes as adapter_bytes
from gpuinfer.text.checkpoint.estimate import refuse_unfit as refuse_unfit
from gpuinfer.text.checkpoint.export import save_folder as save_folder
from gpuinfer.text.checkpoint.names import open_checkpoint as open_checkpoint
