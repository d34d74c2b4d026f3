"""Loads torch so that its threads sleep between two operations. Whatever of a text model needs torch imports this
first.

By default they spin for a while after each operation, on cores that the decoder's threads compute on. They read the
setting once, as torch is loaded; child processes do not inherit it.
"""

import os
import sys

WAITING = "OMP_WAIT_POLICY"

if "torch" not in sys.modules and WAITING not in os.environ:
    os.environ[WAITING] = "passive"
    import torch  # noqa: F401

    del os.environ[WAITING]
