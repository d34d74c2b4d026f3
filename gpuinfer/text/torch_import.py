"""Loads torch so that its threads sleep between two operations.

They would keep their cores busy for a while after each, in case another comes: cores that the decoder's threads compute
on. They read how to wait once, as torch is loaded; our children shall not inherit it. Whatever of a text model needs
torch imports this first.
"""

import os
import sys

WAITING = "OMP_WAIT_POLICY"

if "torch" not in sys.modules and WAITING not in os.environ:
    os.environ[WAITING] = "passive"
    import torch  # noqa: F401

    del os.environ[WAITING]
