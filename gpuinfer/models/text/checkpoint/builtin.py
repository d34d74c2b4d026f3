"""Models that need no files: "tiny", a random Qwen2 of 5 M parameters, and "null", which computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuinfer.models.text.checkpoint.assembly import parts_of
from gpuinfer.models.text.checkpoint.checkpoint import Checkpoint, LanguageFiles
from gpuinfer.models.text.checkpoint.drawn import DrawnStore
from gpuinfer.models.text.checkpoint.family import Biases
from gpuinfer.models.text.checkpoint.fields import Fields
from gpuinfer.models.text.checkpoint.layout import RotaryLayout
from gpuinfer.models.text.checkpoint.rope import rope_of
from gpuinfer.models.text.shape import Shape

END = 256  # tokens 0 to 255 are bytes
SPEAKABLE = (ord("\n"), *range(ord(" "), 127), END)  # what comes unless a constraint asks for other bytes
TINY_POSITIONS = 2048


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


BUILT_IN: Mapping[str, Callable[[], Shape]] = {"tiny": tiny_shape, "null": null_shape}


def open_builtin(name: str) -> Checkpoint:
    """`name` is one of BUILT_IN. The weights are drawn, the same in every process."""
    layout = RotaryLayout(BUILT_IN[name](), Biases(qkv=True))
    store = DrawnStore(name, parts_of(layout), speakable=SPEAKABLE)
    return Checkpoint(
        name=name,
        shape=layout.shape,
        folder=None,
        dtype="float32",
        layout=layout,
        store=store,
        language=LanguageFiles(bytes=True),
    )
