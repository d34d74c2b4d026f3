"""The models of `benchmarks/real.py` by name: real weights, and random ones of real shapes in a cache folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))  # tools/ of this checkout

from gpuinfer.api import ModelSpec
from gpuinfer.text.checkpoint import open_checkpoint, save_folder
from tools import real

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "402m": (
        "Qwen2Config",  # layers of Qwen2-0.5B, with a vocabulary as large as SmolLM2's
        {
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    "1.1b": (
        "LlamaConfig",  # TinyLlama-1.1B
        {
            "hidden_size": 2048,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 5632,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
    ),
}
NAMES = ("smollm2", *SHAPES, "tiny")


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a folder, which every program can open."""

    name: str
    folder: Path
    ours: str  # what gpuinfer opens: a folder, or a built-in name
    vocabulary: int
    parameters: int  # those that a step reads: an embedding that is not the head too is left out
    gguf: Path | None  # the quantised file that llama.cpp opens


def opened(name: str, cache: Path, gguf: Path | None = None) -> Model:
    """A model by its name or its folder; what is not there yet is made. Raises `SystemExit` where it cannot be had."""
    if name == "smollm2":
        made = real.smollm2(cache)
        return described(name, made.folder, gguf or made.gguf)
    if name in SHAPES:
        return described(name, random_model(name, cache), gguf)
    if name == "tiny":
        return described(name, tiny(cache / name), gguf, ours=name)
    return described(Path(name).name, Path(name).resolve(), gguf)


def described(name: str, folder: Path, gguf: Path | None, ours: str | None = None) -> Model:
    shape = open_checkpoint(ModelSpec(str(folder), kind="text")).shape
    width, keys = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    feed_forward = shape.hidden * shape.intermediate * (3 if shape.gated else 2)
    layer = shape.hidden * (2 * width + keys) + feed_forward
    parameters = shape.layers * layer + shape.vocabulary * shape.hidden
    return Model(name, folder, ours or str(folder), shape.vocabulary, parameters, gguf)


def random_model(name: str, cache: Path) -> Path:
    """Random weights in bfloat16, 2 bytes a parameter on disk, and a tokenizer of single bytes."""
    folder = cache / name
    if (folder / "tokenizer.json").is_file():
        return folder
    import transformers

    kind, sizes = SHAPES[name]
    print(f"making {folder}: random weights", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, kind)(max_position_embeddings=4096, **none, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    of_bytes().save(str(folder / "tokenizer.json"))
    return folder


def of_bytes() -> Tokenizer:
    """A token for each byte; the model has more tokens, which mean nothing."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def tiny(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_folder(open_checkpoint(ModelSpec("tiny", kind="text")), folder)
    return folder
