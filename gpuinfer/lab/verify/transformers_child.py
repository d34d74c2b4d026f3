"""The process that runs transformers: it takes texts or tokens, gives their tokens or logits, and says nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from multiprocessing.connection import Connection
from typing import Any

from gpuinfer.host import children


def main(channel: Connection, folder: str, device: str, threads: int, piece: int) -> None:
    """Answer until the other end is closed."""
    children.set_up_child()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what transformers prints of progress and advice is dropped
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    answer_requests(channel, folder, device, threads, piece)


def answer_requests(channel: Connection, folder: str, device: str, threads: int, piece: int) -> None:
    """Answer each request; a request that fails is answered with its error."""
    answerer = TransformersAnswerer(channel, folder, device, threads, piece)
    while True:
        try:
            request = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            getattr(answerer, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001  whatever it is, the other side must hear of it
            first = (str(error).strip().splitlines() or ["no message"])[0]
            with contextlib.suppress(OSError):  # it listens no more: the next look at the channel says so
                channel.send_bytes(json.dumps({"error": f"{type(error).__name__}: {first}"}).encode())


class TransformersAnswerer:
    """What can be asked: each method answers on the channel."""

    def __init__(self, channel: Connection, folder: str, device: str, threads: int, piece: int) -> None:
        self._channel, self._folder, self._device = channel, folder, device
        self._threads, self._piece = threads, piece
        self._models: dict[str, Any] = {}

    def tokens(self, texts: list[tuple[str, bool]], chats: list[list[dict[str, Any]]]) -> None:
        """Of each text, with special tokens or without, and of each chat up to where the answer begins."""
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            self._folder, local_files_only=True, trust_remote_code=False
        )
        spoken = [_spoken(tokenizer, text, special) for text, special in texts]
        chatted = [_chatted(tokenizer, chat) for chat in chats]
        kind = type(tokenizer).__name__
        self._say({"tokenizer": kind, "version": transformers.__version__, "texts": spoken, "chats": chatted})

    def open(self, dtype: str) -> None:
        """Load the model in this number format, next to those that are open."""
        import torch
        import transformers

        torch.set_num_threads(self._threads)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        self._models[dtype] = model.to(self._device).eval()
        self._say({"ready": True})

    def logits(self, dtype: str, tokens: list[int]) -> None:
        """All positions' logits, float32, in pieces."""
        import torch

        with torch.inference_mode():
            given = torch.tensor([tokens], device=self._device)
            logits = self._models[dtype](given, use_cache=False).logits[0]
            self._say({"vocabulary": logits.shape[1]})
            for start in range(0, len(tokens), self._piece):
                rows = logits[start : start + self._piece].float().cpu().contiguous().numpy()
                self._channel.send_bytes(rows.tobytes())

    def _say(self, answer: dict[str, Any]) -> None:
        self._channel.send_bytes(json.dumps(answer).encode())


def _spoken(tokenizer: Any, text: str, special: bool) -> dict[str, Any]:
    return {"text": text, "ids": tokenizer(text, add_special_tokens=special)["input_ids"]}


def _chatted(tokenizer: Any, chat: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # noqa: BLE001  a template is a program: it may raise anything
        return {"refused": str(error)[:200]}
    return _spoken(tokenizer, text, False)
