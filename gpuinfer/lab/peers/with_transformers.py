"""A child that generates with `transformers`: one batch, padded on the left, each step the likeliest token."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from gpuinfer.lab.peers.peer_protocol import Order, Run, converse


def main() -> None:
    converse(load, "transformers")


def load(order: Order) -> tuple[str, Run]:
    import torch

    transformers: Any = import_module("transformers")  # any version of it
    device = _device(order["device"], torch)
    model = transformers.AutoModelForCausalLM.from_pretrained(order["model"], dtype=getattr(torch, order["dtype"]))
    model = model.to(device).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # greedy, whatever the folder says
    tokenizer = _tokenizer(order["model"], transformers)

    def run(order: Order) -> int:
        """The answers' tokens; their text too, as the others make it."""
        tokens, seen = _padded(order["prompts"], torch)
        new = order["new_tokens"]
        with torch.inference_mode():
            whole = model.generate(
                input_ids=tokens.to(device),
                attention_mask=seen.to(device),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,  # goes on past the end token
            )
        answers = whole[:, tokens.shape[1] :].tolist()
        if tokenizer is not None:
            tokenizer.batch_decode(answers, skip_special_tokens=True)
        return sum(map(len, answers))

    return str(transformers.__version__), run


def _device(name: str, torch: Any) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _padded(prompts: list[list[int]], torch: Any) -> tuple[Any, Any]:
    """Tokens and mask, int64 [prompts, longest]."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(masks)


def _tokenizer(model: str, transformers: Any) -> Any:
    """None for a folder without one: prompts come as tokens anyway."""
    if not (Path(model) / "tokenizer_config.json").is_file():
        return None
    return transformers.AutoTokenizer.from_pretrained(model)
