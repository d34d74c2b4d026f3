"""What a model of rows is computed in, where the processor has no products of its weights' number format."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import UsageError
from gpuinfer.models import processor
from gpuinfer.models.load import build
from gpuinfer.models.processor import computed_in
from gpuinfer.text import precision
from gpuinfer.text.precision import notices

NARROW = ("bfloat16", "float16")
SPEC = ModelSpec("blobnet-small", None, 32, "uint8", {"actions": 9, "seats": 4})


@pytest.fixture(params=[pytest.param(True, id="a processor with products"), pytest.param(False, id="one without")])
def has_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(processor, "NARROW", {name: lambda: request.param for name in NARROW})
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", ["float32", *NARROW])
def test_a_cpu_computes_in_the_format_of_the_weights_if_it_has_products_of_it(dtype: str, has_products: bool) -> None:
    assert computed_in(dtype, "auto", on_cpu=True) == (dtype if has_products else "float32")
    assert computed_in(dtype, "auto", on_cpu=False) == dtype
    for on_cpu in (True, False):
        assert computed_in(dtype, dtype, on_cpu) == dtype
        assert computed_in(dtype, "float32", on_cpu) == "float32"
    other = {"float32": "bfloat16", "bfloat16": "float16", "float16": "bfloat16"}[dtype]
    with pytest.raises(UsageError, match=f"Use --dtype {other}"):
        computed_in(dtype, other, on_cpu=True)


def test_whom_it_concerns_is_told_before_the_run(has_products: bool) -> None:
    narrow = Setup(SPEC, ("cpu",), "bfloat16")
    for backend in (InProcess(narrow), Central(narrow)):
        assert len(backend.notices) == (0 if has_products else 1)
    assert not InProcess(narrow, compute="bfloat16").notices
    assert not notices(Setup(SPEC, ("cpu",), "float32"), "auto")
    assert not notices(Setup(SPEC, ("cuda",), "bfloat16"), "auto")
    assert not notices(Setup(None, ("cpu",), "bfloat16"), "auto")


@pytest.mark.parametrize("name", ["blobnet", "blobnet-small", "torch.nn:Linear"])
def test_the_weights_are_those_of_the_narrow_format(name: str) -> None:
    arguments = {"in_features": 32, "out_features": 3} if ":" in name else SPEC.arguments
    spec = ModelSpec(name, None, 32, "uint8", arguments)
    cpu, narrow, wide = torch.device("cpu"), torch.bfloat16, torch.float32
    rounded, exact = (build(spec, device=cpu, dtype=dtype, seed=1, compute=wide) for dtype in (narrow, wide))
    features = torch.randint(0, 2, (5, 32)).float()
    with torch.inference_mode():
        answers = [
            torch.cat([*module(features)], -1) if ":" not in name else module(features) for module in (rounded, exact)
        ]
    held = [*rounded.parameters(), *rounded.buffers()]
    assert held
    assert all(torch.equal(tensor.bfloat16().float(), tensor) for tensor in held if tensor.dtype == wide)
    assert answers[0].dtype == wide
    assert not torch.equal(*answers)
    torch.testing.assert_close(*answers, atol=0.1, rtol=0)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_run_says_what_it_computes_in_and_answers_in_it(dtype: str, has_products: bool) -> None:
    block = np.random.default_rng(0).integers(0, 2, (7, 32), dtype=np.uint8)

    async def asked(**options: str) -> tuple[np.ndarray, str]:
        backend = InProcess(Setup(SPEC, ("cpu",), dtype), **options)
        await backend.start(BackendContext())
        try:
            ((_, values),) = await backend.infer([Request(block, 7)])
            return values, backend.device()["computes_in"]
        finally:
            await backend.close()

    (chosen, told), (narrow, _), (wide, _) = (
        asyncio.run(asked(**options)) for options in ({}, {"compute": dtype}, {"compute": "float32"})
    )
    assert told == (dtype if has_products else "float32")
    assert not np.array_equal(narrow, wide)
    np.testing.assert_array_equal(chosen, narrow if has_products else wide)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_text_model_in_bfloat16_says_where_it_is_computed_in_float32(
    dtype: str, deterministic: bool, has_products: bool
) -> None:
    setup = Setup(ModelSpec("tiny", kind="text"), ("cpu",), dtype, deterministic=deterministic)
    if dtype != "bfloat16" or has_products:
        assert notices(setup, "auto") == ()
    else:
        assert "computed with in float32" in notices(setup, "auto")[0]
    with pytest.raises(UsageError, match="Leave it out"):  # a text model leaves no choice of it
        InProcess(setup, compute="float32")
