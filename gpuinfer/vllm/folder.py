"""The model as a Hugging Face folder, which is all that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError

TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def folder_of(spec: ModelSpec, room: Path) -> Path:
    """The model's own folder, or one that is written into `room`: of "tiny", and of a model in training.

    Raises `UsageError` for a model that vLLM cannot be given.
    """
    from gpuinfer.text.checkpoint import open_checkpoint, save_folder

    checkpoint = open_checkpoint(spec)
    if checkpoint.shape.masking is not None:
        raise UsageError(
            f"the backend 'vllm' goes from left to right, and '{spec.name}' is a diffusion model "
            f"({checkpoint.shape.family}). Use the backend inprocess."
        )
    if checkpoint.folder is not None and spec.weights is None:
        return checkpoint.folder.resolve()
    if checkpoint.shape.family in ("null", "nanogpt"):
        raise UsageError(
            f"the backend 'vllm' cannot serve '{spec.name}', which is no Hugging Face folder. "
            "Use the backend inprocess, or name another --model."
        )
    to = room / "model"
    save_folder(checkpoint, to)
    if checkpoint.language.bytes:
        write_bytes_tokenizer(to, checkpoint.shape.vocabulary, checkpoint.shape.end_tokens[0])
    return to


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER)


def write_bytes_tokenizer(folder: Path, vocabulary: int, end: int) -> None:
    """A tokenizer.json whose token i is byte i: what "tiny" has built in, as others read it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _letters()
    pieces = {letters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    spare = [f"<|spare {number}|>" for number in range(end + 1, vocabulary)]
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in spare])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _letters() -> list[str]:
    """What stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2's `bytes_to_unicode`)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
