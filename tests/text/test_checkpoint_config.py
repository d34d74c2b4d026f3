"""config.json becomes the shape that transformers would run, scaled rotary angles and sliding windows included."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.config_keys import ANOTHER_PROGRAM
from gpuinfer.text.checkpoint.model_family import shape_of

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GPT2_SIZES = {name: SIZES[name] for name in SIZES if name not in ("intermediate_size", "num_key_value_heads")}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "plain": {},
    "another base": {"rope_theta": 500000.0},
    "whole-number base": {"rope_theta": 1000000},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500000.0},
    "llama3, whole numbers": {
        "rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4}
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "yarn without an original length": {"rope_scaling": {"rope_type": "yarn", "factor": 2.5}},
    "yarn, its own betas": {
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    },
    "yarn with mscale": {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.9}},
    "yarn, attention factor": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}},
    "newer layout": {"rope_parameters": {"rope_type": "default", "rope_theta": 77777.0}},
    "newer layout, yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "newer layout, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    "both layouts": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 12345.0},
}


def written(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **(GPT2_SIZES if family == "gpt2" else SIZES), **changes}


def theirs(config: dict[str, Any], folder: Path) -> Any:
    """The configuration that transformers reads from the same file."""
    (folder / "config.json").write_text(json.dumps(config))
    return transformers.AutoConfig.from_pretrained(folder)


def rotary(config: Any) -> Any:
    """The module of transformers that turns heads by this configuration."""
    name = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
    (kind,) = [value for key, value in vars(importlib.import_module(name)).items() if key.endswith("RotaryEmbedding")]
    return kind(config)


@pytest.mark.thorough
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("family", "head_dim"), [("llama", None), ("mistral", 48), ("qwen2", None), ("qwen3", 128)])
def test_rotary_angles_are_those_of_transformers(family: str, head_dim: int, scaling: str, tmp_path: Path) -> None:
    config = written(family, head_dim=head_dim, **SCALINGS[scaling])
    if head_dim is None:
        del config["head_dim"]
    shape = shape_of(config)
    module = rotary(theirs(config, tmp_path))
    assert shape.rope is not None
    assert torch.equal(torch.tensor(shape.rope.inverse_frequencies), module.inv_freq)
    assert shape.rope.attention_factor == module.attention_scaling
    assert len(shape.rope.inverse_frequencies) == shape.head_dim // 2


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [("plain", 512), ("linear", 2048), ("dynamic", 512), ("llama3", 512), ("yarn", 512), ("yarn, its own betas", 4096)],
)
def test_scaling_makes_room_for_more_positions(scaling: str, positions: int) -> None:
    assert shape_of(written("llama", **SCALINGS[scaling])).positions == positions


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_rotary_config_leaves_out_is_what_transformers_assumes(family: str, tmp_path: Path) -> None:
    shape, config = shape_of({"model_type": family}), theirs({"model_type": family}, tmp_path)
    assert shape.vocabulary == config.vocab_size
    assert (shape.hidden, shape.layers, shape.intermediate) == (
        config.hidden_size,
        config.num_hidden_layers,
        config.intermediate_size,
    )
    assert (shape.heads, shape.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert shape.head_dim == getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert shape.positions == config.max_position_embeddings
    assert (shape.norm_eps, shape.activation, shape.tied) == (
        config.rms_norm_eps,
        config.hidden_act,
        config.tie_word_embeddings,
    )
    ends = () if config.eos_token_id is None else (config.eos_token_id,)
    assert (shape.end_tokens, shape.beginning_token) == (ends, config.bos_token_id)


def test_what_a_gpt2_config_leaves_out_is_what_transformers_assumes(tmp_path: Path) -> None:
    shape, config = shape_of({"model_type": "gpt2"}), theirs({"model_type": "gpt2"}, tmp_path)
    assert (shape.vocabulary, shape.hidden, shape.layers) == (config.vocab_size, config.n_embd, config.n_layer)
    assert (shape.heads, shape.kv_heads, shape.positions) == (config.n_head, config.n_head, config.n_positions)
    assert (shape.norm, shape.norm_eps, shape.activation) == ("layer", config.layer_norm_epsilon, "gelu_tanh")
    assert (shape.tied, shape.end_tokens, shape.gated) == (True, (50256,), False)


def test_no_key_value_heads_named_null_are_as_many_as_heads(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        config = written(family, num_key_value_heads=None)
        assert shape_of(config).kv_heads == theirs(config, tmp_path).num_key_value_heads == 4


WINDOWS = [
    pytest.param("mistral", {"sliding_window": 100}, (100,) * 4, id="mistral: all layers"),
    pytest.param("mistral", {"sliding_window": None}, (), id="mistral without"),
    pytest.param("mistral", {}, (4096,) * 4, id="mistral that does not say"),
    pytest.param("llama", {"sliding_window": None}, (), id="llama has none"),
    pytest.param(
        "mistral",
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        (None, 9, None, 9),
        id="mistral: as listed",
    ),
    pytest.param("mistral", {"sliding_window": 9, "layer_types": ["full_attention"] * 4}, (), id="mistral: all full"),
    pytest.param("mistral", {"sliding_window": 9, "layer_types": None}, (9,) * 4, id="mistral: types named null"),
    pytest.param(
        "ministral",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
        (9, None, 9, None),
        id="ministral",
    ),
    pytest.param("qwen2", {"sliding_window": 100, "use_sliding_window": False}, (), id="qwen2: switched off"),
    pytest.param(
        "qwen2",
        {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
        (None, None, None, 100),
        id="qwen2: from a layer on",
    ),
    pytest.param(
        "qwen3",
        {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},
        (9,) * 4,
        id="qwen3: every layer",
    ),
    pytest.param("qwen3", {"sliding_window": 9, "use_sliding_window": True}, (), id="qwen3: beyond the last layer"),
    pytest.param(
        "qwen3",
        {
            "sliding_window": 9,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        (None, 9, None, 9),
        id="qwen3: as listed",
    ),
]


@pytest.mark.parametrize(("family", "changes", "windows"), WINDOWS)
def test_windows(family: str, changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    config = written(family, **changes)
    assert shape_of(config).windows == windows
    them = theirs(config, tmp_path)
    if family.startswith("qwen") or "layer_types" in changes:
        sliding = [kind == "sliding_attention" for kind in them.layer_types]
        assert sliding == [window is not None for window in windows or (None,) * 4]
    elif family == "mistral":
        assert (them.sliding_window or None) == (windows[0] if windows else None)


@pytest.mark.parametrize("given_name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu"])
def test_activations_are_those_of_transformers(given_name: str) -> None:
    own = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }
    values = torch.linspace(-8, 8, 4001)
    mine = own[shape_of(written("llama", hidden_act=given_name)).activation](values)
    torch.testing.assert_close(mine, transformers.activations.ACT2FN[given_name](values), atol=2e-6, rtol=2e-6)


REFUSED = [
    pytest.param({"model_type": "mixtral"}, "mixtral", id="another family"),
    pytest.param({"model_type": "qwen2_moe"}, "qwen2_moe", id="a mixture of experts by its type"),
    pytest.param({"num_local_experts": 8}, "mixture of experts", id="a mixture of experts by its fields"),
    pytest.param({"quantization_config": {"quant_method": "gptq"}}, "gptq", id="quantised"),
    pytest.param({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope", id="longrope"),
    pytest.param({"rope_scaling": {"rope_type": "proportional"}}, "proportional", id="a rope type nobody here knows"),
    pytest.param({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rotary", id="rope by layer"),
    pytest.param({"partial_rotary_factor": 0.5}, "partial_rotary_factor", id="half-turned heads"),
    pytest.param({"hidden_act": "relu2"}, "relu2", id="another activation"),
    pytest.param(
        {"model_type": "qwen2", "layer_types": ["linear_attention"] * 4}, "linear_attention", id="another attention"
    ),
    pytest.param({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "attention", id="gpt2, scaled"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_does_not_run_here_is_named_and_sent_elsewhere(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of({**written("llama"), **changes})
    assert named in str(refused.value)
    assert str(refused.value).endswith(f"which no backend of gpuinfer runs, vllm neither. {ANOTHER_PROGRAM}")


NO_GENERATORS = [
    pytest.param({"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder (type 't5')", id="t5"),
    pytest.param({"model_type": "bert"}, "an encoder (type 'bert'), which reads text and writes none", id="bert"),
    pytest.param(
        {"model_type": "nomic_bert", "auto_map": {"AutoModel": "modeling.Own"}},
        "an encoder",
        id="one with its own code",
    ),
    pytest.param({"architectures": ["LlamaForSequenceClassification"]}, "a LlamaForSequence", id="a classifier"),
    pytest.param({"model_type": "gpt2", "add_cross_attention": True}, "attends to an encoder", id="a decoder of one"),
]


@pytest.mark.parametrize(("changes", "named"), NO_GENERATORS)
def test_what_writes_no_text_of_its_own_is_not_sent_to_vllm(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of({**written("llama"), **changes})
    assert named in str(refused.value)
    assert str(refused.value).endswith("no backend of gpuinfer serves such models. Run it with transformers.")


def test_remote_code_is_refused_even_for_a_known_family() -> None:
    with pytest.raises(UsageError, match=r"which is refused with every backend\. If you know that"):
        shape_of(written("llama", auto_map={"AutoModelForCausalLM": "modeling.Evil"}))


BROKEN = [
    pytest.param({"hidden_size": "64"}, id="a size that is a text"),
    pytest.param({"hidden_size": -64}, id="a size below zero"),
    pytest.param({"hidden_size": 1 << 60}, id="a size beyond reason"),
    pytest.param({"num_hidden_layers": 10**6}, id="layers beyond reason"),
    pytest.param({"num_attention_heads": 5}, id="heads that do not divide"),
    pytest.param({"num_key_value_heads": 3}, id="key heads that do not divide"),
    pytest.param({"head_dim": 15}, id="an odd head"),
    pytest.param({"rms_norm_eps": "small"}, id="an epsilon that is a text"),
    pytest.param({"rope_scaling": "linear"}, id="scaling that is a text"),
    pytest.param({"rope_scaling": {"type": "linear"}}, id="scaling without a factor"),
    pytest.param({"rope_scaling": {"type": "linear", "factor": 0}}, id="scaling by zero"),
    pytest.param({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, id="an empty band"),
    pytest.param({"rope_theta": float("nan")}, id="a base that is no number"),
    pytest.param({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, id="yarn over base 1"),
    pytest.param({"tie_word_embeddings": "yes"}, id="a switch that is a text"),
    pytest.param({"eos_token_id": "</s>"}, id="an end token that is a text"),
    pytest.param({"model_type": 7}, id="a type that is a number"),
    pytest.param({"model_type": "qwen3", "layer_types": ["full_attention"]}, id="too few layer types"),
    pytest.param({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, id="sliding layers, no window"),
    pytest.param(
        {"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 4},
        id="mistral's sliding layers, no window",
    ),
    pytest.param({"model_type": "gpt2", "n_embd": 32}, id="gpt2 of two sizes"),
]


@pytest.mark.parametrize("changes", BROKEN)
def test_a_config_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of({**written("llama"), **changes})
    assert str(refused.value).endswith(".")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["yarn", "linear"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "factor", "rope_type", "beta_fast", "rope_theta"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
FIELDS = [
    *SIZES,
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "max_window_layers",
    "eos_token_id",
    "bos_token_id",
    "hidden_act",
    "rms_norm_eps",
    "quantization_config",
    "architectures",
    "tie_word_embeddings",
    "original_max_position_embeddings",
    "n_embd",
    "n_inner",
    "logit_scale",
]


@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gpt2"]),
    changes=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4),
)
@settings(max_examples=examples(300), deadline=None)
def test_whatever_a_config_holds_it_is_read_or_refused(family: str, changes: dict[str, Any]) -> None:
    try:
        shape = shape_of({**written(family), **changes})
    except UsageError:
        return
    assert shape.heads % shape.kv_heads == 0
    assert len(shape.windows) in (0, shape.layers)
