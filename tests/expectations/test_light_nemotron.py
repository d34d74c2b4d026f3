"""Nemotron through transformers' own code in our engine; its relatives that do not run here are refused by name."""

from __future__ import annotations

import json
import re

import pytest
from text.oracle import peer
from text.tiny import END, copy_of
from text.tiny_families import tiny_family
from text.toy import run

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.generator import open_generator
from gpuinfer.text.text_options import TorchModelOptions

TEXTS = [
    "The quick brown fox",
    "Zürich, naïve café, 東京; and a longer prompt that has to go through in chunks, beside others and before others",
    "x",
    "The quick brown fox jumps over the lazy dog, and then",
]


def as_published(folder, target):
    """With the keys of the checkpoints that NVIDIA publishes, older than `rope_parameters`."""
    copied = copy_of(folder, target)
    config = json.loads((copied / "config.json").read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "partial_rotary_factor": 0.5}
    config |= {"architectures": ["NemotronForCausalLM"], "hidden_act": "relu2", "rope_scaling": None}
    (copied / "config.json").write_text(json.dumps(config))
    return copied


def nemotron(folder, **how):
    setup = Setup(devices=("cpu",), dtype="float32", deterministic=how.pop("deterministic", False))
    options = TorchModelOptions(**{"slots": 3, "step_tokens": 24, "threads": 1, **how})
    return open_generator(ModelSpec(str(folder), kind="text"), setup, options)


def test_nemotron_answers_as_transformers_does_alone_in_company_and_from_the_cache(tmp_path):
    """Norms of weights around 1, squared ReLUs and rotary positions of half a head: greedy tokens of transformers'
    own `generate`, in chunks, among others, and again with what the prefix cache has.
    """
    import torch

    folder = as_published(tiny_family("nemotron"), tmp_path / "published")
    generator = nemotron(folder)
    assert generator.decoder.shape.decoder == "transformers"
    prompts = [Prompt(text=text, sampling=Sampling(temperature=0, max_tokens=12)) for text in TEXTS]
    expected = []
    for prepared in generator.prepare(prompts):
        inputs = torch.tensor(prepared.tokens.tolist())[None]
        how = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(inputs)}
        answer = peer(folder).generate(inputs, **how)[0, inputs.shape[1] :].tolist()
        expected.append(answer[: answer.index(END)] if END in answer else answer)
    assert max(len(set(tokens)) for tokens in expected) > 2
    rounds = [*([one] for one in prompts)], [prompts], [prompts]
    for batches in rounds:
        found = [outcome.completions[0].tokens for batch in batches for outcome in run(generator, batch)]
        assert [[one for one in tokens if one != END] for tokens in found] == expected
    generator.close()


def test_nemotron_has_the_same_bits_in_any_company():
    sampling = Sampling(max_tokens=6, logprobs=2, ignore_eos=True)
    prompts = [Prompt(text=text, key=text, sampling=sampling) for text in TEXTS]
    generator = nemotron(tiny_family("nemotron"), deterministic=True)
    together = [outcome.completions for outcome in run(generator, prompts)]
    generator.close()
    generator = nemotron(tiny_family("nemotron"), deterministic=True, slots=1, step_tokens=64)
    alone = [outcome.completions for prompt in prompts for outcome in run(generator, [prompt])]
    generator.close()
    assert together == alone


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({"model_type": "nemotron_h"}, "a nemotron_h model keeps a state", id="the hybrid"),
        pytest.param(
            {"model_type": "nemotron_labs_diffusion", "auto_map": {"AutoModel": "modeling.Model"}},
            "type 'nemotron_labs_diffusion'. Install a newer transformers, or use --backend vllm",
            id="the diffusion one, which transformers does not have",
        ),
    ],
)
def test_other_nemotrons_are_refused_by_name_with_what_may_serve_them(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="(?s)" + re.escape(said)):
        open_checkpoint(ModelSpec(str(tmp_path), kind="text"))
