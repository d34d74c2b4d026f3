"""LLaDA as its makers run it, in plain torch: a folder of random weights, the model over a whole canvas, and its
procedure (Nie et al. 2025, "Large Language Diffusion Models", ML-GSAI/LLaDA: generate.py), written anew.

`Reference` computes as transformers would: float32, torch's own attention, all rows of a batch of one length.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

EPSILON, THETA = 1e-5, 10_000.0


@dataclass(frozen=True)
class Sizes:
    """Of a model that is drawn: those of the built-in tiny-llada."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    inner: int = 256
    vocabulary: int = 384
    positions: int = 1024

    @property
    def end(self) -> int:
        return self.vocabulary - 2

    @property
    def mask(self) -> int:
        return self.vocabulary - 1


def write_folder(folder: Path, sizes: Sizes, head: float, ends: float = 0.0, seed: int = 0) -> None:
    """A folder as the makers publish it. `head` scales the head, and so how sure the model is of what it says; the mask
    is never likely, and the end more so the larger `ends` is: as likely as any token at 1, never at 0.
    """
    config = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "block_type": "llama", "activation_type": "silu",
        "d_model": sizes.hidden, "n_heads": sizes.heads, "n_kv_heads": sizes.heads, "n_layers": sizes.layers,
        "mlp_hidden_size": sizes.inner, "vocab_size": sizes.vocabulary, "embedding_size": sizes.vocabulary,
        "max_sequence_length": sizes.positions, "rope": True, "rope_theta": THETA, "rms_norm_eps": EPSILON,
        "layer_norm_type": "rms", "weight_tying": False, "include_bias": False, "include_qkv_bias": False,
        "mask_token_id": sizes.mask, "eos_token_id": sizes.end, "pad_token_id": sizes.end, "torch_dtype": "float32",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_drawn(sizes, head, ends, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, sizes)


def _drawn(sizes: Sizes, head: float, ends: float, seed: int) -> dict[str, Tensor]:
    """So large that neighbours and positions matter to what stands at a mask: all masks begin alike."""
    dice, hidden = torch.Generator().manual_seed(seed), sizes.hidden

    def normal(out: int, inner: int, deviation: float) -> Tensor:
        return deviation * torch.randn(out, inner, generator=dice)

    gain = 2.2 * hidden**-0.5
    found = {"model.transformer.wte.weight": normal(sizes.vocabulary, hidden, 0.5)}
    found["model.transformer.ln_f.weight"] = torch.ones(hidden)
    found["model.transformer.ff_out.weight"] = normal(sizes.vocabulary, hidden, head * hidden**-0.5)
    found["model.transformer.ff_out.weight"][sizes.mask] = 0.0
    found["model.transformer.ff_out.weight"][sizes.end] *= ends
    for number in range(sizes.layers):
        block = f"model.transformer.blocks.{number}."
        for name, out, inner in (
            *((f"{which}_proj", hidden, hidden) for which in "qkv"),
            ("attn_out", hidden, hidden),
            *((name, sizes.inner, hidden) for name in ("ff_proj", "up_proj")),
            ("ff_out", hidden, sizes.inner),
        ):
            found[f"{block}{name}.weight"] = normal(out, inner, gain)
        found[f"{block}attn_norm.weight"] = found[f"{block}ff_norm.weight"] = torch.ones(hidden)
    return {name: tensor.clone() for name, tensor in found.items()}


def _write_tokenizer(folder: Path, sizes: Sizes) -> None:
    """Bytes, then words that nobody writes, the end and the mask."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<{number}>" for number in range(len(words), sizes.vocabulary - 2)]
    vocabulary = {word: number for number, word in enumerate([*words, "<end>", "<mask>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<mask>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "mask_token": "<mask>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Reference:
    """The model of a folder: `logits`, and answers by its makers' procedure."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._tensors = load_file(folder / "model.safetensors")
        self._heads, self._mask = self._config["n_heads"], self._config["mask_token_id"]
        size = self._config["d_model"] // self._heads
        frequencies = THETA ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(self._config["max_sequence_length"]).float(), frequencies)
        angles = torch.cat([angles, angles], -1)
        self._cosine, self._sine = angles.cos(), angles.sin()

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Float32 [rows, length, vocabulary] of tokens [rows, length]: every position sees all others of its row."""
        weights = self._tensors
        hidden = functional.embedding(tokens, weights["model.transformer.wte.weight"])
        for number in range(self._config["n_layers"]):
            block = f"model.transformer.blocks.{number}."
            hidden = hidden + self._attention(block, self._normed(hidden, f"{block}attn_norm"))
            inner = self._normed(hidden, f"{block}ff_norm")
            gate = functional.linear(inner, weights[f"{block}ff_proj.weight"])
            value = functional.linear(inner, weights[f"{block}up_proj.weight"])
            hidden = hidden + functional.linear(functional.silu(gate) * value, weights[f"{block}ff_out.weight"])
        return functional.linear(
            self._normed(hidden, "model.transformer.ln_f"), weights["model.transformer.ff_out.weight"]
        )

    def _normed(self, hidden: Tensor, name: str) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], self._tensors[f"{name}.weight"], EPSILON)

    def _attention(self, block: str, inputs: Tensor) -> Tensor:
        rows, length, hidden = inputs.shape
        queries, keys, values = (
            functional.linear(inputs, self._tensors[f"{block}{which}_proj.weight"])
            .view(rows, length, self._heads, -1)
            .transpose(1, 2)
            for which in "qkv"
        )
        mixed = functional.scaled_dot_product_attention(self._turned(queries), self._turned(keys), values)
        return functional.linear(
            mixed.transpose(1, 2).reshape(rows, length, hidden), self._tensors[f"{block}attn_out.weight"]
        )

    def _turned(self, part: Tensor) -> Tensor:
        length, half = part.shape[2], part.shape[3] // 2
        other = torch.cat([-part[..., half:], part[..., :half]], -1)
        return part * self._cosine[:length] + other * self._sine[:length]

    @torch.inference_mode()
    def answers(self, prompts: Tensor, length: int, block: int, steps: int) -> Tensor:
        """[rows, length] after prompts [rows, prompt length], at temperature 0: `low_confidence`, a schedule of `steps`
        over blocks that divide the answer.
        """
        rows, start = prompts.shape
        canvas = torch.cat([prompts, torch.full((rows, length), self._mask)], 1)
        for first in range(start, start + length, block):
            schedule = self._schedule(canvas[:, first : first + block], steps * block // length)
            for quota in schedule.T:
                masked = canvas == self._mask
                logits = self.logits(canvas)
                tokens = logits.argmax(-1)
                sure = functional.softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
                sure[:, first + block :] = -torch.inf
                sure = torch.where(masked, sure, -torch.inf)
                for row in range(rows):
                    _, chosen = sure[row].topk(int(quota[row]))
                    canvas[row, chosen] = tokens[row, chosen]
        return canvas[:, start:]

    def _schedule(self, block: Tensor, steps: int) -> Tensor:
        """[rows, steps] how many masks each step commits."""
        masks = (block == self._mask).sum(1, keepdim=True)
        return masks // steps + (torch.arange(steps)[None] < masks % steps)
