"""Each decoder does what its source describes, token for token; and what may be asked of one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from text import diffusion_reference as reference
from text.diffusion_filling import filled
from text.diffusion_toy import MASK, Toy, prompt_of

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Sampling, Unmasking
from gpuinfer.text.diffusion.decoders import schedule
from gpuinfer.text.diffusion.unmasking_decoder import UnmaskingDecoder
from gpuinfer.text.diffusion.unmasking_plan import decoder_for

RECORDED = json.loads((Path(__file__).parent / "block_refinement.json").read_text())["cases"]


def decoder(name: str, **options) -> UnmaskingDecoder:
    return decoder_for(Sampling(unmasking=Unmasking(decoder=name, options=options)), "low-confidence")


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: "-".join(str(case[name]) for name in list(case)[:-1]))
def test_block_refinement_does_what_diffusers_pipeline_did(case):
    """Recorded by record_block_refinement.py; the reference of the other tests is held to it too."""
    toy, prompt = Toy(case["seed"]), prompt_of(case["prompt"])
    sizes, threshold, edit = (case["length"], case["block"], case["steps"]), case["threshold"], case["edit"]
    assert reference.block_refinement(toy, MASK, prompt, *sizes, threshold, edit).tokens == case["tokens"]
    own = decoder("block-refinement", edit_threshold=edit)
    assert filled(own, toy, MASK, prompt, *sizes, threshold=threshold, aligned=True).tokens == case["tokens"]


def test_a_random_order_follows_the_schedule_and_the_seed():
    toy, prompt = Toy(), prompt_of(4)

    def orders(seed):
        sampling = Sampling(temperature=0.0, seed=seed)
        return filled(decoder("random"), toy, MASK, prompt, 16, 8, 8, sampling=sampling)

    assert orders(1) == orders(1)
    assert orders(1).forwards == 8
    assert len({tuple(orders(seed).tokens) for seed in range(8)}) > 4


def test_dreams_temperature_makes_the_order_random():
    toy, prompt = Toy(), prompt_of(4)
    orders = decoder("dream", temperature=5.0)

    def order(seed):
        return filled(orders, toy, MASK, prompt, 16, 16, 16, sampling=Sampling(temperature=0.0, seed=seed)).tokens

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 4


def test_dreams_schedule_ends_with_any_number_of_steps():
    for steps in (1, 2, 10**12):
        assert sum(schedule(50, steps, 1e-3).values()) == 50


def test_credits_are_a_rows_own():
    """Two rows that take turns get what each gets alone."""
    shared, toys = decoder("credit"), (Toy(1), Toy(2))
    rows = [shared.begin(), shared.begin()]
    alone = [shared.begin(), shared.begin()]
    positions = np.arange(6, dtype=np.int32)
    together, apart = [], []
    for row in (0, 1, 0, 1):
        for kept, found in ((rows, together), (alone, apart)):
            logits = toys[row]([MASK] * 6).numpy()
            shared.adjust(kept[row], positions, logits)
            found.append(logits.tolist())
        alone[1 - row] = alone[1 - row]
    assert together == apart


def test_requests_with_the_same_options_share_a_decoder():
    assert decoder("factor", factor=2.0) is decoder("factor", factor=2.0)
    assert decoder("factor", factor=2.0) is not decoder("factor", factor=1.0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"decoder": "treshold"},
            "no decoder named 'treshold'. Did you mean 'threshold'? Installed: block-refinement,",
        ),
        (
            {"decoder": "factor", "options": {"facto": 1}},
            "'factor' has no option 'facto'. Did you mean 'factor'?",
        ),
        (
            {"decoder": "factor", "options": {"factor": 0}},
            "option factor: 0 is not more than 0. Give more than 0.",
        ),
        ({"decoder": "dream", "options": {"algorithm": "max"}}, "Choose from probability, margin, entropy."),
        ({"threshold": 0.9}, "decoder 'low-confidence' has no threshold. Leave it out, or choose block-refinement or"),
        ({"decoder": "threshold", "threshold": 1.1}, "threshold is 1.1. Give a number from 0 to 1."),
        ({"decoder": "threshold", "threshold": "high"}, "threshold is 'high'. Give a number from 0 to 1."),
        ({"decoder": "threshold", "threshold": float("nan")}, "threshold is nan. Give a number from 0 to 1."),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_choices(asked, said):
    with pytest.raises(BadPrompt) as caught:
        decoder_for(Sampling(unmasking=Unmasking(**asked)), "low-confidence")
    assert said in str(caught.value)
