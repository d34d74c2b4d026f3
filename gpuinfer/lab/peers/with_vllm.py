"""A child that generates with vLLM, offline, as its documentation shows it: `LLM.generate`."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from gpuinfer.lab.peers.peer_protocol import Order, Run, converse

USUAL = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # all cores compute, as with the others
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def main() -> None:
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    converse(load, "vllm")


def load(order: Order) -> tuple[str, Run]:
    vllm: Any = import_module("vllm")
    device = order["device"]
    if device.startswith("cuda:"):
        os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
    model = vllm.LLM(
        order["model"],
        dtype=order["dtype"],
        seed=order["seed"],
        max_model_len=order["length"],
        max_num_seqs=order["rows"],
        skip_tokenizer_init=not (Path(order["model"]) / "tokenizer_config.json").is_file(),
        disable_log_stats=True,
    )

    def run(order: Order) -> int:
        new = order["new_tokens"]
        sampling = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        answers = model.generate(prompts, sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return str(vllm.__version__), run
