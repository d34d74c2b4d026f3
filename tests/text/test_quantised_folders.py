"""Folders whose weights are quantised are dequantised as they are read: each format against its formula, value by
value. Methods that are not read, and parts that are missing or do not fit, are refused.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from text.tiny import copy_of, tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import open_checkpoint

FILE = "model.safetensors"
GROUP = 16  # inputs that share a scale


def dice():
    return torch.Generator().manual_seed(11)


def packed_rows(values, bits):
    """Numbers from 0 on [many, columns] as words of 32 bits [many × bits / 32, columns], the first in the lowest."""
    words = torch.zeros(values.shape[0] * bits // 32, values.shape[1], dtype=torch.int64)
    for row, line in enumerate(values.long()):
        for bit in range(bits):
            place = row * bits + bit
            words[place // 32] |= ((line >> bit) & 1) << (place % 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def drawn(outputs, inputs, bits, groups):
    """Values and zero points below 2 to the `bits`, and scales: [in, out], [groups, out] twice."""
    generator = dice()
    values = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, (groups, outputs), generator=generator)
    return values, zeros, (0.01 + torch.rand(groups, outputs, generator=generator)).half()


def grouped(values, zeros, scales, group):
    return torch.stack([(values[i] - zeros[g]).float() * scales[g].float() for i, g in enumerate(group)]).T


def gptq(weight, *, bits=4, shuffled=False, form="gptq"):
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    values, zeros, scales = drawn(outputs, inputs, bits, groups)
    group = [i // GROUP for i in range(inputs)]
    if shuffled:
        group = [group[i] for i in torch.randperm(inputs, generator=dice()).tolist()]
    stored_zeros = zeros - 1 if form == "gptq" else zeros
    parts = {
        "qweight": packed_rows(values, bits),
        "qzeros": packed_rows(stored_zeros.T, bits).T.contiguous(),
        "scales": scales,
        "g_idx": torch.tensor(group, dtype=torch.int32),
    }
    return parts, grouped(values, zeros, scales, group)


def awq(weight):
    outputs, inputs = weight.shape
    values, zeros, scales = drawn(outputs, inputs, 4, inputs // GROUP)

    def words(numbers):
        """Of eight columns, those that lie beside each other in a word: 0, 2, 4, 6, 1, 3, 5, 7."""
        found = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= numbers[:, column::8] << (4 * place)
        return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)

    parts = {"qweight": words(values), "qzeros": words(zeros), "scales": scales}
    return parts, grouped(values, zeros, scales, [i // GROUP for i in range(inputs)])


def fp8(weight, *, block=(48, 40), scale_name="weight_scale_inv", dtype=torch.float8_e4m3fn):
    """Blocks that do not divide the matrix: the last ones are smaller."""
    outputs, inputs = weight.shape
    low = (weight * 50).to(dtype)
    counts = (-(-outputs // block[0]), -(-inputs // block[1]))
    scale = torch.rand(counts, generator=dice()) + 0.5
    wanted = low.float().clone()
    for row in range(counts[0]):
        for column in range(counts[1]):
            part = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])
            wanted[part] *= scale[row, column]
    return {"weight": low, scale_name: scale}, wanted


def fp8_whole(weight):
    low = (weight * 50).to(torch.float8_e4m3fn)
    return {"weight": low, "weight_scale": torch.tensor(0.02), "input_scale": torch.tensor(3.0)}, low.float() * 0.02


def int8_rows(weight, *, zeros=False):
    outputs, _ = weight.shape
    low = torch.randint(-128, 128, weight.shape, generator=dice()).to(torch.int8)
    scale = torch.rand(outputs, 1, generator=dice()) * 0.01
    parts, wanted = {"weight": low, "weight_scale": scale}, low.float()
    if zeros:
        parts["weight_zero_point"] = torch.randint(-9, 9, (outputs, 1), generator=dice()).to(torch.int8)
        wanted = wanted - parts["weight_zero_point"].float()
    return parts, wanted * scale


def packed(weight, *, bits=4, zeros=False):
    outputs, inputs = weight.shape
    values, points, scales = drawn(outputs, inputs, bits, inputs // GROUP)
    half = 1 << (bits - 1)
    group = [i // GROUP for i in range(inputs)]
    parts = {
        "weight_packed": packed_rows(values, bits).T.contiguous(),
        "weight_scale": scales.T.contiguous(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if zeros:
        parts["weight_zero_point"] = packed_rows(points.T, bits)
    return parts, grouped(values, points if zeros else torch.full_like(points, half), scales, group)


def fp4(weight):
    outputs, inputs = weight.shape
    codes = torch.randint(0, 16, (outputs, inputs), generator=dice())
    scale, whole = torch.rand(outputs, inputs // 16, generator=dice()).to(torch.float8_e4m3fn), torch.tensor([7.0])
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    wanted = torch.tensor([[table[code % 8] * (-1 if code > 7 else 1) for code in row] for row in codes.tolist()])
    parts = {
        "weight_packed": (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8),
        "weight_scale": scale,
        "weight_global_scale": whole,
    }
    return parts, wanted * (scale.float() / 7.0).repeat_interleave(16, 1)


def nf4(weight, *, nested=False):
    codes = torch.randint(0, 16, (weight.numel(),), generator=dice())
    table = torch.linspace(-1, 1, 16)
    count = -(-weight.numel() // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
    parts = {"weight": ((codes[::2] << 4) | codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    if nested:
        parts["weight.absmax"] = torch.randint(0, 256, (count,), generator=dice()).to(torch.uint8)
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        parts["weight.nested_absmax"] = torch.rand(-(-count // 8), generator=dice())
        state |= {"nested_blocksize": 8, "nested_offset": 0.25, "nested_dtype": "float32"}
        outer = [parts["weight.nested_absmax"][block // 8] for block in range(count)]
        pairs = zip(parts["weight.absmax"].tolist(), outer, strict=True)
        largest = torch.stack([parts["weight.nested_quant_map"][code] * one + 0.25 for code, one in pairs])
    else:
        parts["weight.absmax"] = largest = torch.rand(count, generator=dice())
    text = json.dumps(state).encode()
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    wanted = torch.stack([table[code] * largest[place // 64] for place, code in enumerate(codes.tolist())])
    return parts, wanted.view(weight.shape)


def int8_bitsandbytes(weight):
    low = torch.randint(-127, 128, weight.shape, generator=dice()).to(torch.int8)
    largest = torch.rand(weight.shape[0], generator=dice())
    parts = {"weight": low, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, torch.stack([row.float() * (one / 127.0) for row, one in zip(low, largest, strict=True)])


def quantised_folder(to, quantise, settings, **more):
    """The tiny folder with its layers' products quantised; and these products as they should be read."""
    folder = copy_of(tiny_checkpoint("llama"), to)
    state, wanted = {}, {}
    for name, tensor in load_file(folder / FILE).items():
        if name.endswith("_proj.weight"):
            parts, wanted[name] = quantise(tensor, **more)
            state |= {name.removesuffix("weight") + part: one for part, one in parts.items()}
        else:
            state[name] = tensor
    save_file(state, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder, wanted


def opened(folder):
    return open_checkpoint(ModelSpec(str(folder), kind="text"))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
BLOCKS = {"config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [48, 40]}}}}
FORMATS = [
    pytest.param(gptq, GPTQ, {}, id="GPTQ"),
    pytest.param(gptq, GPTQ | {"bits": 8}, {"bits": 8}, id="GPTQ of eight bits"),
    pytest.param(gptq, GPTQ | {"bits": 2}, {"bits": 2}, id="GPTQ of two bits"),
    pytest.param(gptq, GPTQ, {"shuffled": True}, id="GPTQ with inputs in an order of their own"),
    pytest.param(gptq, GPTQ | {"checkpoint_format": "gptq_v2"}, {"form": "gptq_v2"}, id="GPTQ's second format"),
    pytest.param(awq, {"quant_method": "awq", "bits": 4, "version": "GEMM"}, {}, id="AWQ"),
    pytest.param(fp8, {"quant_method": "fp8", "weight_block_size": [48, 40]}, {}, id="FP8 in blocks"),
    pytest.param(fp8_whole, {"quant_method": "fp8"}, {}, id="FP8 with one scale"),
    pytest.param(fp8_whole, {"quant_method": "compressed-tensors"}, {}, id="compressed-tensors: FP8"),
    pytest.param(
        fp8, COMPRESSED | BLOCKS, {"scale_name": "weight_scale"}, id="compressed-tensors: FP8 in blocks"
    ),
    pytest.param(int8_rows, COMPRESSED | {"format": "int-quantized"}, {}, id="compressed-tensors: int8"),
    pytest.param(int8_rows, COMPRESSED, {"zeros": True}, id="compressed-tensors: int8 with zero points"),
    pytest.param(packed, COMPRESSED, {}, id="compressed-tensors: int4"),
    pytest.param(packed, COMPRESSED, {"zeros": True}, id="compressed-tensors: int4 with zero points"),
    pytest.param(packed, COMPRESSED, {"bits": 8}, id="compressed-tensors: int8, packed"),
    pytest.param(fp4, COMPRESSED | {"format": "nvfp4-pack-quantized"}, {}, id="compressed-tensors: FP4"),
    pytest.param(nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, id="bitsandbytes: NF4"),
    pytest.param(nf4, {"load_in_4bit": True}, {"nested": True}, id="bitsandbytes: NF4, its scales quantised too"),
    pytest.param(int8_bitsandbytes, {"quant_method": "bitsandbytes"}, {}, id="bitsandbytes: int8"),
]  # fmt: skip


@pytest.mark.parametrize(("quantise", "settings", "more"), FORMATS)
def test_each_format_is_read_by_its_formula(quantise, settings, more, tmp_path):
    folder, wanted = quantised_folder(tmp_path / "model", quantise, settings, **more)
    found = opened(folder)
    for name, value in wanted.items():
        into = torch.empty(value.shape)
        found.store.read(name, into)
        torch.testing.assert_close(into, value, rtol=1e-6, atol=1e-7)
    [first, _] = found.weights(torch.float32).layers
    torch.testing.assert_close(first.out.weight, wanted["model.layers.0.self_attn.o_proj.weight"])


def test_three_bits_go_across_words(tmp_path):
    folder = copy_of(
        tiny_checkpoint("llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=3), tmp_path / "m"
    )
    state = load_file(folder / FILE)
    name = "model.layers.0.mlp.down_proj."
    parts, wanted = gptq(state.pop(f"{name}weight"), bits=3)
    save_file(state | {name + part: one for part, one in parts.items()}, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ | {"bits": 3}}))
    [layer, _] = opened(folder).weights(torch.float32).layers
    torch.testing.assert_close(layer.down.weight, wanted)


def test_bytes_of_the_quantised_tensors_make_the_fingerprint(tmp_path):
    folder, _ = quantised_folder(tmp_path / "one", gptq, GPTQ)
    before = opened(folder).fingerprint
    state = load_file(folder / FILE)
    state["model.layers.1.mlp.up_proj.scales"] *= 2
    save_file(state, folder / FILE)
    assert opened(folder).fingerprint != before


REFUSED = [
    (
        {"quant_method": "aqlm"},
        "which transformers reads through a package that is not installed: pip install 'aqlm[cpu]'",
    ),
    ({"quant_method": "torchao"}, "pip install 'torchao'"),
    ({"quant_method": "tomorrow"}, "quantised by tomorrow, which neither gpuinfer (gptq, awq, fp8"),
    ({"bits": 4}, "quantised by an unnamed method"),
    (GPTQ | {"bits": 5}, "by GPTQ to 5 bits"),
    (GPTQ | {"checkpoint_format": "marlin"}, "in the format 'marlin'"),
    ({"quant_method": "awq", "version": "gemv"}, "AWQ to 4 bits in the format 'gemv'"),
    (COMPRESSED, "lacks 'model.layers.0.mlp.down_proj.weight"),
    (COMPRESSED | {"transform_config": {"a": 1}}, "sparse or rotated"),
    ({"quant_method": "bitsandbytes"}, "lacks 'model.layers.0.mlp.down_proj.weight"),
]


@pytest.mark.parametrize(("settings", "named"), REFUSED)
def test_what_is_not_read_is_named(settings, named, tmp_path):
    folder, _ = quantised_folder(tmp_path / "model", gptq, settings)
    with pytest.raises(UsageError) as refused:
        opened(folder).weights(torch.float32)
    assert named in str(refused.value)


def test_parts_that_do_not_fit_each_other(tmp_path):
    folder, _ = quantised_folder(tmp_path / "model", gptq, GPTQ)
    state = load_file(folder / FILE)
    name = "model.layers.0.mlp.down_proj.scales"
    save_file(state | {name: state[name][:, :5].contiguous()}, folder / FILE)
    with pytest.raises(UsageError, match=r"'model\.layers\.0\.mlp\.down_proj\.weight' in .* do not fit each other"):
        opened(folder).weights(torch.float32)


def test_families_that_transformers_computes_are_dequantised_too(tmp_path):
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = transformers.AutoModelForCausalLM.from_config(transformers.Olmo2Config(vocab_size=384, **sizes))
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "model")  # its tokenizer
    (folder / FILE).unlink()
    made.save_pretrained(folder)
    state, wanted = {}, {}
    for name, tensor in load_file(folder / FILE).items():
        if name.endswith("_proj.weight"):
            parts, wanted[name] = gptq(tensor)
            state |= {name.removesuffix("weight") + part: one for part, one in parts.items()}
        else:
            state[name] = wanted[name] = tensor
    save_file(state, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ}))
    found = opened(folder)
    assert found.shape.decoder == "transformers"
    read = found.model(torch.float32).state_dict()
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(read[name], tensor)
