"""Records what diffusers' `LLaDA2Pipeline` with its `BlockRefinementScheduler` makes of the toy model. Run by hand,
with diffusers 0.42.1 (pip install diffusers==0.42.1) beside the libraries of the tests:

    python tests/text/record_block_refinement.py > tests/text/block_refinement.json

It is no dependency of the tests: importing it takes longer than all that is tested here.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from text.diffusion_toy import MASK, Toy, prompt_of

PLAIN = [*itertools.product([(8, 24), (16, 8)], [1, 3, 8], [0.5, 0.95], [0.0]), ((5, 19), 8, 0.5, 0.0)]
"""A block that the prompt reaches into has fewer masks, and so another schedule than here: but one token a step."""
EDITING = [*itertools.product([(8, 24), (5, 19)], [16], [0.5, 0.95], [0.4, 0.8])]
"""With steps to spare: a block that takes all of its own is not edited in the end."""
CASES = [
    {"prompt": prompt, "length": length, "block": 8, "steps": steps, "threshold": threshold, "edit": edit, "seed": seed}
    for ((prompt, length), steps, threshold, edit), seed in itertools.product([*PLAIN, *EDITING], [0, 1])
]


def main() -> None:
    import diffusers
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    class Pipeline(LLaDA2Pipeline):
        _execution_device = torch.device("cpu")  # looking for it needs accelerate

    diffusers.utils.logging.disable_progress_bar()
    for case in CASES:
        pipeline = Pipeline(Wrapped(Toy(case["seed"])), BlockRefinementScheduler(), tokenizer=None)
        pipeline.set_progress_bar_config(disable=True)
        found = pipeline(
            input_ids=torch.tensor([prompt_of(case["prompt"])]),
            gen_length=case["length"],
            block_length=case["block"],
            num_inference_steps=case["steps"],
            threshold=case["threshold"],
            editing_threshold=case["edit"],
            max_post_steps=15,  # it takes one more
            eos_early_stop=False,
            mask_token_id=MASK,
            output_type="seq",
        )
        case["tokens"] = found.sequences[0].tolist()
    json.dump({"diffusers": diffusers.__version__, "cases": CASES}, sys.stdout)


class Wrapped(torch.nn.Module):
    """The toy as the pipeline calls a model. It never says the mask, as no model of this kind does."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.toy = toy
        self.anything = torch.nn.Parameter(torch.zeros(1))  # whose device and dtype the pipeline asks for

    def forward(self, tokens: torch.Tensor, **more: Any) -> SimpleNamespace:
        logits = self.toy(tokens[0].tolist())
        logits[:, MASK] = -torch.inf
        return SimpleNamespace(logits=logits[None])


if __name__ == "__main__":
    main()
