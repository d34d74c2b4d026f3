"""Our own products, norms and attention inside a model of transformers': the numbers of torch's, and none replaced that
computes something else.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from text.tiny import tiny_checkpoint
from text.tiny_families import tiny_family
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from gpuinfer.api import ModelSpec
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.transformers_trace import AttentionCall
from gpuinfer.text.decoder.open_decoder import kernels_for, open_sized
from gpuinfer.text.decoder.traced_attention import PanelCache
from gpuinfer.text.decoder.traced_products import PackedModules
from gpuinfer.text.transformer import PAGE, Step

pytestmark = pytest.mark.skipif(not kernels_for(torch.float32), reason="this processor has no FMA")


class Scaled(nn.Module):
    """RMSNorm as Gemma's, or with another power of the mean."""

    def __init__(self, width, power=2):
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.randn(width) / 8), 1e-6, power

    def forward(self, rows):
        size = rows.float().abs().pow(self.power).mean(-1, keepdim=True)
        return (rows.float() * torch.rsqrt(size + self.eps) * (1 + self.weight.float())).type_as(rows)


def of_modules(dtype, **modules):
    torch.manual_seed(3)
    return nn.ModuleDict(modules).to(dtype).eval()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with a bias"])
@pytest.mark.parametrize("rows", [(1, 1), (1, 7), (3, 41)], ids=str)
def test_a_product_is_that_of_torch_whatever_its_size(rows, bias):
    model = of_modules(torch.float32, one=nn.Linear(37, 53, bias=bias))
    given = torch.randn(*rows, 37)
    expected = model["one"](given)
    packed = PackedModules(model, torch.float32, "float32")
    assert list(packed.products) == ["one"]
    assert torch.allclose(model["one"](given), expected, atol=1e-5)
    assert torch.isnan(model["one"].weight).all(), "who reads a packed weight finds nothing, not other numbers"
    packed.restore()
    assert torch.equal(model["one"](given), expected)


def test_norms_are_replaced_where_they_compute_the_same_and_nowhere_else():
    model = of_modules(
        torch.float32,
        rms=nn.RMSNorm(48, eps=1e-5),
        one_more=Scaled(48),
        other=Scaled(48, power=3),
        layer=nn.LayerNorm(48),
    )
    given = torch.randn(2, 5, 48)
    expected = {name: module(given) for name, module in model.items()}
    packed = PackedModules(model, torch.float32, "float32")
    assert {name: added for name, (_, added) in packed.norms.items()} == {"rms": 0.0, "one_more": 1.0}
    for name, module in model.items():
        assert torch.allclose(module(given), expected[name], atol=1e-5)


def test_new_scales_of_a_norm_are_taken_over():
    model = of_modules(torch.float32, one=Scaled(32))
    packed, given, other = PackedModules(model, torch.float32, "float32"), torch.randn(4, 32), Scaled(32)
    assert not packed.take("one.weight", other.weight.detach())
    assert torch.allclose(model["one"](given), other(given), atol=1e-5)


CALLS = {
    "grouped heads": (AttentionCall("", 6, 2, 16, 16, None), {}),
    "a window": (AttentionCall("", 4, 4, 32, 32, 9), {}),
    "heads of odd and unequal sizes": (AttentionCall("", 4, 2, 24, 10, None), {}),
    "a soft cap": (AttentionCall("", 4, 1, 16, 16, None), {"soft_cap": 2.0}),
    "sinks": (AttentionCall("", 4, 2, 16, 16, 40), {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}),
}


def plain_attention(call, queries, keys, values, scale, soft_cap=None, sinks=None):
    """[rows, heads, value_dim] of one row of tokens, in torch alone."""
    shared, rows = call.heads // call.kv_heads, queries.shape[1]
    keys, values = (one.repeat_interleave(shared, dim=0) for one in (keys, values))
    far = torch.arange(rows)[:, None] - torch.arange(rows)
    seen = (far >= 0) & (far < (call.window or rows))
    if soft_cap is None and sinks is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale).transpose(0, 1)
    scores = queries @ keys.transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, rows, 1)), dim=-1)
    return (scores.softmax(-1)[..., :rows] @ values).transpose(0, 1)


@pytest.mark.parametrize("case", CALLS)
def test_attention_over_pages_is_that_of_torch_in_chunks_and_token_by_token(case):
    call, wishes = CALLS[case]
    torch.manual_seed(5)
    rows, scale = 150, 0.4
    queries = torch.randn(call.heads, rows, call.key_dim)
    keys, values = torch.randn(call.kv_heads, rows, call.key_dim), torch.randn(call.kv_heads, rows, call.value_dim)
    expected = plain_attention(call, queries, keys, values, scale, **wishes)
    cache = PanelCache([call], 8, 8 * PAGE, torch.float32, "float32", 1)
    pages = np.array([[6, 1, 3, 0, 7]], np.int32)
    given = {"soft_cap": None, "sinks": None, **wishes}
    found = []
    for start, end in ((0, 70), (70, 131), *((place, place + 1) for place in range(131, rows))):
        count = np.array([end - start], np.int32)
        cache.begin(Step(np.zeros(end - start, np.int32), pages, np.array([start], np.int32), count, count - 1))
        part = (one[:, start:end] for one in (queries, keys, values))
        found.append(cache.attend(0, *part, scale, **given))
    assert torch.allclose(torch.cat(found), expected, atol=2e-5)


def decoder_of(folder, dtype=torch.float32):
    checkpoint = open_checkpoint(ModelSpec(str(folder), kind="text"), "transformers")
    given = {"slots": 2, "pages": 8, "length": 64, "threads": 1, "deterministic": False}
    return open_sized(checkpoint, dtype, torch.device("cpu"), **given, compile=False, graphs=False)[0]


def test_products_and_norms_of_a_family_are_ours():
    decoder = decoder_of(tiny_checkpoint("llama"))
    assert {name.rpartition(".")[2] for name in decoder._packed.products} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
    }  # fmt: skip
    assert any(name.endswith("input_layernorm") for name in decoder._packed.norms)
    decoder.close()


def test_a_model_that_reads_its_weights_itself_keeps_them(monkeypatch, caplog):
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    def forward(self, rows):
        gated = self.act_fn(nn.functional.linear(rows, self.gate_proj.weight)) * self.up_proj(rows)
        return self.down_proj(gated)

    folder, step = (
        tiny_family("gemma"),
        Step(
            np.array([5, 6, 7], np.int32),
            np.zeros((1, 2), np.int32),
            np.zeros(1, np.int32),
            np.array([3], np.int32),
            np.array([2], np.int32),
        ),
    )
    plain = decoder_of(folder)
    expected = plain.forward(step)
    monkeypatch.setattr(GemmaMLP, "forward", forward)
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        decoder = decoder_of(folder)
    assert "reads its weights in ways of its own" in caplog.text
    assert torch.allclose(decoder.forward(step), expected, atol=1e-4)
    for one in (plain, decoder):
        one.close()
