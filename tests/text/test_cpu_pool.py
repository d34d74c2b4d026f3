"""Memory for keys and values on a CPU."""

from __future__ import annotations

import mmap

from gpuinfer.text.decoder import cpu_panels


def test_a_kernel_without_large_pages_gives_memory_all_the_same(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *given):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    memory = cpu_panels.map_memory(5000)
    assert (len(memory), memory.any()) == (5000, False)
    assert memory.ctypes.data % cpu_panels.LARGE == 0
