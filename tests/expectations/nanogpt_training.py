"""A model with nanoGPT's layout in plain torch, trained for a moment on matches and saved as its train.py saves one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

OPENING = ["e4", "e5", "Nf3", "Nc6", "Bb5", "a6", "Ba4", "Nf6", "O-O", "Be7"]
END = "<|endoftext|>"
WORDS = ["\n", *OPENING, "d4", "d5", "c4", "e6", "Nc3", END]
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 64, "bias": False, "dropout": 0.0}
STEPS = 60


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias=False), "c_proj": nn.Linear(width, width, bias=False)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=False), "c_proj": nn.Linear(4 * width, width, bias=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            one.view(rows, length, self.heads, -1).transpose(1, 2)
            for one in self.attn["c_attn"](self.ln_1(x)).split(width, 2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    """`tokens` int64 [rows, length] → logits float32 [rows, length, vocabulary]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        width = SIZES["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(SIZES["block_size"], width),
                "h": nn.ModuleList(Block(width, SIZES["n_head"]) for _ in range(SIZES["n_layer"])),
                "ln_f": nn.LayerNorm(width, bias=False),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))

    @torch.no_grad()
    def likeliest(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens, the likeliest each time."""
        found = list(tokens)
        for _ in range(count):
            found.append(int(self(torch.tensor([found]))[0, -1].argmax()))
        return found[len(tokens) :]


def trained(tokens: list[str], matches: list[list[str]], seed: int = 0) -> Gpt:
    """A model of these tokens that has seen these matches, again and again."""
    torch.manual_seed(seed)
    numbers = {text: number for number, text in enumerate(tokens)}
    model = Gpt(len(tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flat = [numbers[word] for match in matches for word in match]
    data = torch.tensor([flat[start : start + 33] for start in range(0, len(flat) - 33, 7)][:32])
    for _ in range(STEPS):
        logits = model(data[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def save_as_nanogpt(model: Gpt, tokens: list[str], out: Path, dataset: Path | None = None, **meta: Any) -> Path:
    """`ckpt.pt` in `out`, and `meta.pkl` in `dataset`, or beside it. Returns the checkpoint's path."""
    out.mkdir(parents=True, exist_ok=True)
    arguments = {**SIZES, "vocab_size": len(tokens)}
    optimizer = torch.optim.AdamW(model.parameters())
    content = {
        "model": {f"_orig_mod.{name}": one for name, one in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": arguments,
        "iter_num": STEPS,
        "best_val_loss": torch.tensor(0.5),
        "config": {"dataset": (dataset or out).name, "compile": True, "init_from": "scratch"},
    }
    torch.save(content, out / "ckpt.pt")
    stoi = {text: number for number, text in enumerate(tokens)}
    known = {"vocab_size": len(tokens), "itos": dict(enumerate(tokens)), "stoi": stoi, **meta}
    (dataset or out).mkdir(parents=True, exist_ok=True)
    ((dataset or out) / "meta.pkl").write_bytes(pickle.dumps(known))
    return out / "ckpt.pt"


def saved_matches(out: Path, dataset: Path | None = None, tokens: list[str] | None = None, **meta: Any) -> Gpt:
    """Train a model on Spanish games and queen's gambits, and save it."""
    tokens = WORDS if tokens is None else tokens
    matches = [[END, *OPENING, "\n"], [END, "d4", "d5", "c4", "e6", "Nc3", "Nf6", "\n"]] * 24
    model = trained(tokens, matches)
    save_as_nanogpt(model, tokens, out, dataset, **meta)
    return model
