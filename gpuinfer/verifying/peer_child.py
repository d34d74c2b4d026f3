"""The process that runs transformers: it takes tokens and gives their logits, and says nothing else."""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from typing import Any

from gpuinfer import children


def main(channel: Connection, folder: str, dtype: str, device: str, threads: int, piece: int) -> None:
    """Load the model, say how that went, then answer until the other end is closed."""
    children.settle_in()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its progress and its advice are nobody's
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    try:
        model = _model(folder, dtype, device, threads)
        channel.send_bytes(json.dumps({"ready": True}).encode())
        while True:
            _answer(channel, model, device, json.loads(channel.recv_bytes()), piece)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # noqa: BLE001  whatever it is, the other side must hear of it
        first = (str(error).strip().splitlines() or ["no message"])[0]
        channel.send_bytes(json.dumps({"error": f"{type(error).__name__}: {first}"}).encode())


def _model(folder: str, dtype: str, device: str, threads: int) -> Any:
    import torch
    import transformers

    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    return model.to(device).eval()


def _answer(channel: Connection, model: Any, device: str, tokens: list[int], piece: int) -> None:
    """All positions' logits, float32, in pieces."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=device), use_cache=False).logits[0]
        channel.send_bytes(json.dumps({"vocabulary": logits.shape[1]}).encode())
        for start in range(0, len(tokens), piece):
            channel.send_bytes(logits[start : start + piece].float().cpu().contiguous().numpy().tobytes())
