"""Tiny Hugging Face folders with random weights and a real tokenizer, made without network.

`from text.tiny import tiny_checkpoint`. A folder is written in a temporary place, once for all processes of a test run:
the tests that share it must not change it (`copy_of` gives one that may be changed).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "One request is one row; a batch is what one call of the backend serves; a row that is done frees its slot.",
    "def batch(rows):\n    return [row for row in rows if row is not None]\n\n\nprint(batch([1, 2, None, 4]))",
    "Numbers such as 0, 1, 2.5 and 1,000; signs such as { } [ ] ( ) < > \" ' ; and words in Zürich, naïve café, 東京.",
    '{"name": "Ada", "age": 36, "tags": ["poet", "engine"], "alive": false, "score": 12.75}',
    "user: what is the capital of France?\nassistant: Paris is the capital of France.\nuser: thanks!\n",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END, PAD = 2, 0
VOCABULARY = 384
POSITIONS = 256
DAY_S = 86_400
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def tiny_checkpoint(family: str, *, seed: int = 0, dtype: str = "float32", shard: str = "50GB", **changes: Any) -> Path:
    """A folder as transformers writes it: 2 layers, 64 values, 4 heads over 2 (gpt2: 4), 384 tokens, 256 positions.

    `changes` are fields of the transformers configuration; `shard` is the most bytes of one file ("100KB").
    """
    name = folder_name(family, [seed, dtype, shard, changes])
    made = session_folder() / name
    if not made.is_dir():
        draft = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=session_folder()))
        _write(draft, family, seed, dtype, shard, changes)
        publish(draft, made)
    return made


def copy_of(folder: Path, to: Path) -> Path:
    """A copy that a test may change. `to` is the new folder's path."""
    return Path(shutil.copytree(folder, to))


def llama_tokenizer(folder: Path, **settings: Any) -> None:
    """Put a tokenizer there as Llama 2 has it: pieces of characters, "▁" before every piece of text. `settings` are of
    tokenizer_config.json.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special, raw = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, limit_alphabet=60, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    state = json.loads(tokenizer.to_str())
    room = VOCABULARY - len(raw)
    kept = {piece: number for piece, number in state["model"]["vocab"].items() if number < room}
    state["model"]["vocab"] = kept | {piece: room + byte for byte, piece in enumerate(raw)}
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if {"".join(pair), *pair} <= kept.keys()]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))


def session_folder() -> Path:
    """One for a test run: its processes share it, the next run makes another."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"process-{os.getpid()}"
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"gpuinfer-tiny-{owner}-{run}"
    if not folder.is_dir():
        folder.mkdir(mode=0o700, exist_ok=True)
        _sweep(folder)
    return folder


def _sweep(folder: Path) -> None:
    """A process of its own takes its folder away as it ends. Under xdist that would be too soon for the others: the
    next run takes away what is a day old.
    """
    if "PYTEST_XDIST_TESTRUNUID" not in os.environ:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for old in folder.parent.glob(f"{folder.name.rpartition('-')[0].removesuffix('-process')}-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > DAY_S:
                shutil.rmtree(old, ignore_errors=True)


def folder_name(family: str, given: list[Any]) -> str:
    """One for each way to write it."""
    return f"{family}-{hashlib.sha256(json.dumps([family, *given], sort_keys=True).encode()).hexdigest()[:12]}"


def publish(draft: Path, made: Path) -> None:
    """Whoever is first wins: the same arguments make the same folder."""
    try:
        draft.rename(made)
    except OSError:
        if not made.is_dir():
            raise
        shutil.rmtree(draft)


def _write(folder: Path, family: str, seed: int, dtype: str, shard: str, changes: dict[str, Any]) -> None:
    import torch
    import transformers

    write_tokenizer(folder, SPECIAL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = _config(family, changes)
        model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for name, weights in model.named_parameters():
                _scatter(name, weights)
    model.save_pretrained(folder, max_shard_size=shard)


def _scatter(name: str, weights: Any) -> None:
    """Larger than a fresh model's, so that logits are far apart and no bias or norm is there for nothing."""
    if weights.dim() > 1:
        weights.normal_(0.0, 0.5 if "embed" in name or "wte" in name else 0.12)
    else:
        weights.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.1)


def _config(family: str, changes: dict[str, Any]) -> Any:
    import transformers

    ids = {"vocab_size": VOCABULARY, "eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}
    wide = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        **ids,
    }
    match family:
        case "llama":
            return transformers.LlamaConfig(**wide | changes)
        case "mistral":
            return transformers.MistralConfig(**wide | {"sliding_window": None} | changes)
        case "qwen2":
            return transformers.Qwen2Config(**wide | {"tie_word_embeddings": True} | changes)
        case "qwen3":
            return transformers.Qwen3Config(**wide | {"head_dim": 32, "tie_word_embeddings": True} | changes)
        case "gpt2":
            sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, **ids}
            return transformers.GPT2Config(**sizes | changes)
    raise ValueError(f"no tiny family {family!r}; there are {', '.join(FAMILIES)}")


def write_tokenizer(folder: Path, special: list[str], **named: str) -> None:
    """384 tokens, the `special` ones first; `named` says what some of them are for, such as `mask_token`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    named = {"eos_token": SPECIAL[END], "pad_token": SPECIAL[PAD], **named}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
