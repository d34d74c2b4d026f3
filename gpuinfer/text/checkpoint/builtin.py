"""Models that need no files: "tiny", a random Qwen2 of 5 M parameters; "tiny-llada", a random diffusion model of half a
million; and "null", which computes nothing.

A store whose tensors are drawn, the same ones everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuinfer.text.checkpoint.assembly import RotaryLayout, Stored, TensorPart, parts_of
from gpuinfer.text.checkpoint.checkpoint import Checkpoint, LanguageFiles
from gpuinfer.text.checkpoint.family import Biases
from gpuinfer.text.checkpoint.keys import Fields
from gpuinfer.text.checkpoint.rope import rope_of
from gpuinfer.text.shape import Masking, Shape


@dataclass(frozen=True)
class Recipe:
    """How weights are drawn: deviations of normal distributions, and what keeps tokens silent."""

    embedding: float = 0.5  # large beside what the layers add: the last token matters most, and answers do not freeze
    layers: float = 0.05
    head: float = 0.1  # logits some 1.5 apart
    silence: float = -128.0


class DrawnStore:
    """Norms are ones, biases zeros, matrices normal.

    The first hidden value is one in every embedding and no layer writes to it, so that by it the head keeps all tokens
    but the `speakable` ones silent, whatever the prompt was.
    """

    def __init__(
        self, where: str, parts: Iterable[TensorPart], speakable: Sequence[int], recipe: Recipe | None = None
    ) -> None:
        self.where, self._speakable = where, list(speakable)
        self._recipe = recipe or Recipe()
        self.tensors = {part.name: Stored(part.shape, torch.float32) for part in parts}

    def read(self, name: str, into: Tensor) -> None:
        if into.dim() == 1:
            into.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            into.copy_(self._matrix(name, tuple(into.shape)))

    def digests(self, names: Collection[str]) -> dict[str, bytes]:
        """Of what they are drawn from."""
        return dict.fromkeys(names, f"drawn by torch {torch.__version__}, {self._speakable}, {self._recipe}".encode())

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(
            zlib.crc32(name.encode())
        )  # a tensor's own, whatever is read before it
        drawn = torch.empty(shape).normal_(0.0, self._deviation(name), generator=generator)
        if "embed_tokens" in name:
            drawn[:, 0] = 1.0
        elif "lm_head" in name:
            drawn[:, 0] = self._recipe.silence
            drawn[self._speakable, 0] = 0.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            drawn[0] = 0.0
        return drawn

    def _deviation(self, name: str) -> float:
        own = self._recipe
        return own.embedding if "embed_tokens" in name else own.head if "lm_head" in name else own.layers


END = 256  # tokens 0 to 255 are bytes
SPEAKABLE = (ord("\n"), *range(ord(" "), 127), END)  # what comes unless a constraint asks for other bytes
TINY_POSITIONS = 2048
TEMPLATE = (  # of chats: a line for each message
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def null_shape() -> Shape:
    return Shape(
        family="null",
        vocabulary=END + 1,
        hidden=1,
        layers=0,  # nothing to cache
        heads=1,
        kv_heads=1,
        head_dim=1,
        intermediate=1,
        positions=1 << 17,
        tied=True,
        end_tokens=(END,),
    )


def tiny_shape() -> Shape:
    """A vocabulary larger than the bytes, as a tokenizer would have it: the rest of the tokens never comes."""
    return Shape(
        family="qwen2",
        vocabulary=1024,
        hidden=256,
        layers=6,
        heads=8,
        kv_heads=4,
        head_dim=32,
        intermediate=768,
        positions=TINY_POSITIONS,
        rope=rope_of(Fields({}), 32, TINY_POSITIONS)[0],
        end_tokens=(END,),
    )


def tiny_llada_shape() -> Shape:
    """Small, as each of its steps goes through a whole answer."""
    return Shape(
        family="llada",
        vocabulary=384,
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=32,
        intermediate=256,
        positions=1024,
        rope=rope_of(Fields({}), 32, 1024)[0],
        end_tokens=(END,),
        masking=Masking(mask_token=END + 1),
    )


BUILT_IN: Mapping[str, Callable[[], Shape]] = {"tiny": tiny_shape, "tiny-llada": tiny_llada_shape, "null": null_shape}
RECIPES = {"tiny-llada": Recipe(layers=0.2, head=0.5, silence=-512.0)}
"""Layers that say more, so that masks, which all begin alike, become different tokens; and a head so steep that some
steps are sure of several."""


def open_builtin(name: str) -> Checkpoint:
    """`name` is one of BUILT_IN. The weights are drawn, the same in every process."""
    shape = BUILT_IN[name]()
    layout = RotaryLayout(shape, Biases(qkv=shape.masking is None))
    store = DrawnStore(name, parts_of(layout), SPEAKABLE, RECIPES.get(name))
    return Checkpoint(
        name=name,
        shape=layout.shape,
        folder=None,
        dtype="float32",
        layout=layout,
        store=store,
        language=LanguageFiles(bytes=True, template=TEMPLATE),
    )
