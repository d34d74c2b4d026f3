"""A child that generates with llama.cpp from a GGUF file: all sequences of a batch at once, the likeliest token each.

It needs a Python that has `llama_cpp` (the package llama-cpp-python), and of ours only
 `gpuinfer.lab.peers.peer_child`.
The weights stay as they are in the file, so that `dtype` says nothing here.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path
from typing import Any

from gpuinfer.lab.peers.peer_child import Order, Run, converse

AT_ONCE = 512  # tokens of prompts in a batch


def main() -> None:
    converse(load, "llama_cpp")


def load(order: Order) -> tuple[str, Run]:
    import numpy as np

    llama: Any = import_module("llama_cpp")
    llama.llama_backend_init()
    silence = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silence, ctypes.c_void_p(0))
    opening = llama.llama_model_default_params()
    opening.use_extra_bufts = not has_amx()
    model = llama.llama_model_load_from_file(order["model"].encode(), opening)
    if not model:
        raise ValueError(f"{order['model']} is no model for llama.cpp. Give a GGUF file.")
    wanted = llama.llama_context_default_params()
    wanted.n_ctx, wanted.n_seq_max = order["rows"] * (-(-order["length"] // 32) * 32), order["rows"]
    wanted.n_batch, wanted.n_ubatch = 2048, AT_ONCE
    wanted.n_threads = wanted.n_threads_batch = order["threads"]
    context = llama.llama_init_from_model(model, wanted)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(2048, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Token, position, sequence and whether what comes next is wanted, of each; the likeliest next tokens."""
        batch.n_tokens = len(entries)
        for place, (token, position, sequence, last) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, last
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode has failed")
        logits = [llama.llama_get_logits_ith(context, place) for place, entry in enumerate(entries) if entry[3]]
        return [int(np.argmax(np.ctypeslib.as_array(one, (vocabulary,)))) for one in logits]

    def run(order: Order) -> int:
        prompts, new = order["prompts"], order["new_tokens"]
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        each = max(1, AT_ONCE // len(prompts[0]))
        last: list[int] = []
        for first in range(0, len(prompts), each):
            some = enumerate(prompts[first : first + each], first)
            last += decode([(token, at, row, at == len(one) - 1) for row, one in some for at, token in enumerate(one)])
        for step in range(new - 1):
            last = decode([(token, len(prompts[row]) + step, row, True) for row, token in enumerate(last)])
        return len(prompts) * new

    run._kept = silence  # type: ignore[attr-defined]  # the callback lives as long as llama.cpp may call it
    return str(llama.__version__), run


def has_amx() -> bool:
    """Where llama.cpp 0.3.36 lays its weights out for AMX, and dies of it in a virtual machine (SIGSEGV)."""
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


if __name__ == "__main__":
    main()
