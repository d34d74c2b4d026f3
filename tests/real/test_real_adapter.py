"""A LoRA adapter trained for 30 steps on a toy task: our engine serves it as transformers computes it merged, by native
decoders and over transformers' own code.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from answering import Answerer, agreed, greedy
from questions import QUESTIONS

from gpuinfer.generation import Prompt

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from grpo import LowRank, Policy  # noqa: E402

pytestmark = pytest.mark.real

TOY = " pancakes, of course."  # to every question
STEPS, ROWS, RATE = 30, 4, 2e-3
LEARNT, ASKED = QUESTIONS[:32], QUESTIONS[32:]  # those that it is trained on, and others


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The adapter's folder, the loss of each step, and the model of transformers with the adapter merged."""
    torch.manual_seed(0)
    policy = Policy(str(folder), rank=8, alpha=16.0, layers=10)
    tokenizer = policy.tokenizer
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    answer = [*tokenizer(TOY)["input_ids"], tokenizer.eos_token_id]
    prompts = [tokenizer(question)["input_ids"] for question, _ in LEARNT]
    losses = []
    for step in range(STEPS):
        loss = torch.zeros(())
        for row in range(step * ROWS, (step + 1) * ROWS):
            tokens = torch.tensor([*prompts[row % len(prompts)], *answer])
            seen, places = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril(), torch.arange(len(tokens))
            loss = loss - policy.logprobs(tokens, places, seen, places[-len(answer) - 1 : -1]).mean() / ROWS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    place = tmp_path_factory.mktemp("adapters") / "toy"
    policy.save(place)
    return place, losses, merged(policy)


def merged(policy):
    """The model with W + scale · B A in the place of each adapted layer."""
    for name, low in policy.adapted.items():
        parent, _, own = name.rpartition(".")
        with torch.no_grad():
            low.base.weight += low.scale * (low.up @ low.down)
        setattr(policy.model.get_submodule(parent), own, low.base)
    assert not any(isinstance(one, LowRank) for one in policy.model.modules())
    return policy.model


@pytest.fixture(scope="module", params=["native", "transformers"])
def answers(folder, trained, request):
    """To questions that it was not trained on: with the adapter and without it, in the same batches."""
    prompts = [Prompt(text=text, sampling=greedy(8), adapter=name) for text, _ in ASKED for name in ("toy", None)]
    with Answerer(folder, adapters={"toy": str(trained[0])}, decoder=request.param) as answerer:
        given = [one.completions[0] for one in answerer.answer(prompts)]
        tokens = [answerer.tokens_of(prompt) for prompt in prompts[::2]]
    return tokens, given[::2], given[1::2]


def test_thirty_steps_teach_the_toy(trained):
    losses = trained[1]
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5]), losses


def test_answers_to_other_questions_follow_the_toy_and_the_model_alone_knows_better(answers):
    _, with_adapter, alone = answers
    follow = sum(one.text == TOY for one in with_adapter)
    assert follow >= 0.8 * len(ASKED), [one.text for one in with_adapter]
    for one, (question, expected) in zip(alone, ASKED, strict=True):
        assert one.text.strip().startswith(expected), question


def test_each_token_is_the_likeliest_by_transformers_with_the_merged_weights(answers, trained):
    """Up to a tie within rounding."""
    rows = [[*prompt, *answer.tokens] for prompt, answer in zip(*answers[:2], strict=True)]
    given = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    with torch.inference_mode():
        logits = trained[2](given).logits
    for prompt, answer, found in zip(*answers[:2], logits, strict=True):
        same, tied = agreed(found[len(prompt) - 1 : len(prompt) + len(answer.tokens) - 1], answer.tokens)
        assert same == len(answer.tokens) or tied, answer.text
