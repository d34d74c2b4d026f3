"""The built-in models, and what any model is estimated to take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from text.tiny import FAMILIES, tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import Checkpoint, Estimate, open_checkpoint, refuse_unfit, save_folder
from gpuinfer.text.transformer import Weights


def opened(name: object) -> Checkpoint:
    return open_checkpoint(ModelSpec(str(name), kind="text"))


def tensors_of(part: object) -> list[torch.Tensor]:
    """All tensors of a tree of weights, one that is used twice once."""
    if isinstance(part, torch.Tensor):
        return [part]
    inner = part if isinstance(part, tuple) else getattr(part, "__dict__", {}).values()
    found = {id(tensor): tensor for one in inner for tensor in tensors_of(one)}
    return list(found.values())


def sizes(weights: Weights) -> tuple[int, int]:
    """Values and bytes."""
    tensors = tensors_of(weights)
    return sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)


def test_tiny_has_five_million_parameters_and_is_the_same_each_time() -> None:
    one, other = opened("tiny"), opened("tiny")
    assert one.fingerprint == other.fingerprint
    assert one.shape == other.shape
    weights = one.weights(torch.float32)
    assert 4_900_000 < sizes(weights)[0] < 5_300_000
    for mine, theirs in zip(tensors_of(weights), tensors_of(other.weights(torch.float32)), strict=True):
        assert torch.equal(mine, theirs)


def test_tiny_speaks_bytes() -> None:
    checkpoint = opened("tiny")
    assert checkpoint.language_files().bytes
    assert checkpoint.shape.end_tokens == (256,)
    assert checkpoint.folder is None


MASKED = ["tiny-llada", "tiny-llada-moe", "tiny-llada2", "tiny-dream", "tiny-sdar"]


@pytest.mark.parametrize("name", MASKED)
def test_a_tiny_diffusion_model_fills_in_masks_that_it_never_says_itself(name: str) -> None:
    checkpoint = opened(name)
    masking = checkpoint.shape.masking
    assert masking is not None
    assert checkpoint.shape.family == name.removeprefix("tiny-")
    weights = checkpoint.weights(torch.float32)
    assert sizes(weights)[0] < 800_000
    silent = weights.head.weight[masking.mask_token, 0]
    assert silent < -100 < weights.head.weight[ord("a"), 0] == 0.0


def test_null_takes_no_memory() -> None:
    checkpoint = opened("null")
    weights = checkpoint.weights(torch.float32)
    assert checkpoint.shape.family == "null"
    assert weights.layers == ()
    assert checkpoint.estimate(256, 64, 2048, torch.float32).cache_bytes == 0


def test_tiny_is_written_for_other_programs(tmp_path: Path) -> None:
    save_folder(opened("tiny"), tmp_path / "out")
    again = opened(tmp_path / "out")
    assert again.shape == opened("tiny").shape
    assert torch.equal(
        again.weights(torch.float32).layers[3].qkv.weight, opened("tiny").weights(torch.float32).layers[3].qkv.weight
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, opened("tiny").weights(torch.float32).head.weight)
    with pytest.raises(UsageError, match="Use 'tiny'"):
        save_folder(again, tmp_path / "more")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "tiny", *MASKED])
def test_the_estimate_is_what_the_weights_take(family: str, dtype: torch.dtype) -> None:
    checkpoint = opened(family if family.startswith("tiny") else tiny_checkpoint(family))
    estimate, shape = checkpoint.estimate(3, 12, 100, dtype), checkpoint.shape
    assert estimate.weights_bytes == sizes(checkpoint.weights(dtype))[1]
    assert estimate.cache_bytes == 12 * 32 * 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    assert estimate.peak_bytes > estimate.weights_bytes + estimate.cache_bytes


@pytest.mark.parametrize("name", MASKED)
def test_a_tiny_diffusion_model_is_written_as_its_family_is_published(name: str, tmp_path: Path) -> None:
    save_folder(opened(name), tmp_path / "out")
    again, drawn = opened(tmp_path / "out"), opened(name)
    assert again.shape == drawn.shape
    for mine, theirs in zip(*(tensors_of(one.weights(torch.float32)) for one in (again, drawn)), strict=True):
        assert torch.equal(mine, theirs)


FITS = Estimate(weights_bytes=10_000_000_000, cache_bytes=8_000_000_000, peak_bytes=19_000_000_000)


def refusal(free: float, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(UsageError) as refused:
        refuse_unfit("m", FITS, int(free), pages=4096, length=2048, dtype=dtype)
    return str(refused.value)


def test_a_model_that_fits_is_let_through() -> None:
    refuse_unfit("m", FITS, 19_000_000_000, pages=4096, length=2048, dtype=torch.float32)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    message = refusal(15e9)
    for number in ("10 GB", "8 GB", "19 GB", "15 GB", "4,096 pages", "2,048 tokens", "64 pages"):
        assert number in message


@pytest.mark.parametrize(
    ("free", "dtype", "cure"),
    [
        pytest.param(15e9, torch.float32, "Use -B pages=2048 or --dtype bfloat16", id="fewer pages"),
        pytest.param(15e9, torch.bfloat16, "Use -B pages=2048.", id="narrow already"),
        pytest.param(11.05e9, torch.bfloat16, "Use --context 800.", id="pages for less than one row"),
        pytest.param(18.5e9, torch.bfloat16, "-B pages=3840", id="almost"),
        pytest.param(9e9, torch.float32, "Not even one page fits beside the weights", id="not one page"),
        pytest.param(9e9, torch.bfloat16, "smaller model", id="too large by far"),
        pytest.param(1e9, torch.float32, "smaller model", id="too large even in half"),
    ],
)
def test_the_cure_is_one_that_helps(free: float, dtype: torch.dtype, cure: str) -> None:
    assert cure in refusal(free, dtype)


def test_tiny_says_printable_characters_after_whatever_it_is_told(tmp_path: Path) -> None:
    save_folder(opened("tiny"), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompts = torch.randint(0, 1024, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(prompts).logits
    likely = logits.softmax(-1)
    speakable = [10, *range(32, 127), 256]
    assert likely[..., speakable].sum(-1).min() > 0.999
    assert logits.argmax(-1).unique().numel() > 20
