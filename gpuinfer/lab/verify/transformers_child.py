"""The child process that runs transformers: it answers with the tokens of texts, or the logits of tokens."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from gpuinfer.host import children
from gpuinfer.host.child import Channel, ChannelClosed


def run_child(end: socket.socket, folder: str, gguf: str | None, device: str, threads: int, piece: int) -> None:
    """Answer until the other end is closed. `gguf`: the file whose tokenizer is read, not the folder's."""
    children.set_up_child()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what transformers prints of progress and advice is dropped
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    answer_requests(end, folder, gguf, device, threads, piece)


def answer_requests(end: socket.socket, folder: str, gguf: str | None, device: str, threads: int, piece: int) -> None:
    """Answer each request; a request that fails is answered with its error."""
    channel = Channel(end)
    answerer = TransformersAnswerer(channel, folder, gguf, device, threads, piece)
    with contextlib.suppress(ChannelClosed):
        while True:
            request = channel.receive()
            try:
                getattr(answerer, request.pop("do"))(**request)
            except ChannelClosed:
                raise
            except Exception as error:  # noqa: BLE001  whatever it is, the other side must hear of it
                first = (str(error).strip().splitlines() or ["no message"])[0]
                channel.send({"error": f"{type(error).__name__}: {first}"})


class TransformersAnswerer:
    """What can be asked: each method answers on the channel."""

    def __init__(self, channel: Channel, folder: str, gguf: str | None, device: str, threads: int, piece: int) -> None:
        self._channel, self._folder, self._gguf, self._device = channel, folder, gguf, device
        self._threads, self._piece = threads, piece
        self._models: dict[str, Any] = {}

    def tokens(self, texts: list[tuple[str, bool]], chats: list[list[dict[str, Any]]]) -> None:
        """Of each text, with special tokens or without, and of each chat up to where the answer begins."""
        import transformers

        folder, more = self._folder, dict[str, Any]()
        if self._gguf is not None:
            folder, more["gguf_file"] = os.path.split(self._gguf)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **more
        )

        def encoded(text: str, special: bool) -> dict[str, Any]:
            return {"text": text, "ids": tokenizer(text, add_special_tokens=special)["input_ids"]}

        rendered = []
        for chat in chats:
            try:
                text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # noqa: BLE001  a template is a program: it may raise anything
                rendered.append({"refused": str(error)[:200]})
            else:
                rendered.append(encoded(text, False))
        answer = {"tokenizer": type(tokenizer).__name__, "version": transformers.__version__}
        self._channel.send({**answer, "texts": [encoded(*text) for text in texts], "chats": rendered})

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
        self._channel.send({"ready": True})

    def logits(self, dtype: str, tokens: list[int]) -> None:
        """All positions' logits, float32, in pieces."""
        import torch

        with torch.inference_mode():
            given = torch.tensor([tokens], device=self._device)
            logits = self._models[dtype](given, use_cache=False).logits[0]
            self._channel.send({"vocabulary": logits.shape[1]})
            for start in range(0, len(tokens), self._piece):
                rows = logits[start : start + self._piece].float().cpu().contiguous().numpy()
                self._channel.send(rows.tobytes())
