"""The C allocator, set up for forwards that want the same large buffers over and over."""

from __future__ import annotations

import ctypes

# of glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT, STEP, LARGEST = 1 << 30, 32 << 20, 32 << 20  # bytes; 32 MiB is the largest threshold that glibc takes


def keep_freed_memory() -> None:
    """Let freed memory stay with this process; does nothing where the C library has no such knobs.

    By default glibc gives large buffers back to the system at once, and the next forward takes a page fault for each
    4 KiB of them again: a tenth of its time on a virtual machine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for knob, value in ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, STEP)):
        mallopt(knob, value)
