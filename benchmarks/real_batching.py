"""A child that generates with transformers' continuous batching (`generate_batch`): paged attention, prompts and
answers of all rows in common steps, the likeliest token each.
"""

from __future__ import annotations

from typing import Any

from gpuinfer.lab.peers.peer_child import Order, Run, converse

PAGE = 32  # positions; its own default, 256, is longer than these rows


def main() -> None:
    converse(load, "transformers")


def load(order: Order) -> tuple[str, Run]:
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(order["threads"])
    dtype = getattr(torch, order["dtype"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        order["model"], dtype=dtype, attn_implementation="sdpa"
    ).eval()
    rows = order["rows"]
    pages = rows * (-(-order["length"] // PAGE) + 1)
    sizes = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages, max_batch_tokens=max(512, rows))

    def run(order: Order) -> int:
        prompts, new = order["prompts"], order["new_tokens"]
        settings = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers = model.generate_batch(inputs=prompts, generation_config=settings, continuous_batching_config=sizes)
        found = sum(len(one.generated_tokens) for one in answers.values())
        if found != len(prompts) * new:
            raise RuntimeError(f"generate_batch has given {found} tokens instead of {len(prompts) * new}")
        return found

    return str(transformers.__version__), run


if __name__ == "__main__":
    main()
