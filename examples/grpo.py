"""GRPO on a CPU: a small language model learns sums, as a LoRA adapter over weights that stay as they are.

    pip install 'gpuinfer[models]' transformers
    python examples/grpo.py --model smollm2 --out grpo

gpuinfer plays the games and draws the tokens; this file is the trainer, in plain PyTorch: the group-relative advantage
and the clipped objective of GRPO (Shao et al. 2024, DeepSeekMath, section 4.1) on low ranks (Hu et al. 2022, LoRA).
After each step the new adapter goes to gpuinfer under the next version, and the next games are played with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gpuinfer.rollouts.export.samples import Sample, samples
from gpuinfer.rollouts.record import Group
from gpuinfer.text.packaged_models import PACKAGED, packaged_files
from gpuinfer.workloads.rollouts.stream import rollouts

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")  # of attention, in each adapted layer
SUMS = ["largest=9", "operations=+", "examples=0"]  # options of the environment
SMOOTHED = 10  # steps of the drawn mean


class LowRank(nn.Module):
    """A linear layer W, frozen, plus (alpha / rank) · B A. B starts at 0, so that nothing changes at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.scale * (inputs @ self.down.T @ self.up.T)


class Policy:
    """The model with low ranks in its last `layers` layers. Below them no gradient is computed."""

    def __init__(self, model: str, rank: int, alpha: float, layers: int) -> None:
        import transformers

        if model in PACKAGED or model.endswith(".gguf"):
            file = packaged_files(model)[0] if model in PACKAGED else Path(model)
            place, words = file.parent, {"gguf_file": file.name}
        else:
            place, words = Path(model), {}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **words)
        self.model: Any = loaded.eval().requires_grad_(False)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place, **words)
        self.rank, self.alpha = rank, alpha
        self.adapted: dict[str, LowRank] = {}
        decoder = self.model.model
        for number in range(max(0, len(decoder.layers) - layers), len(decoder.layers)):
            attention = decoder.layers[number].self_attn
            for name in PROJECTIONS:
                low = LowRank(getattr(attention, name), rank, alpha)
                setattr(attention, name, low)
                self.adapted[f"model.layers.{number}.self_attn.{name}"] = low

    def parameters(self) -> list[nn.Parameter]:
        return [half for low in self.adapted.values() for half in (low.down, low.up)]

    def logprobs(self, tokens: Tensor, positions: Tensor, seen: Tensor, before: Tensor) -> Tensor:
        """Of the last m of n tokens, float32 [m], each given the state of the token at `before` [m]. `positions` [n]
        are what the model is told, and `seen` bool [n, n] says which tokens each token attends to.
        """
        states = self.model.model(
            input_ids=tokens[None], position_ids=positions[None], attention_mask=seen[None, None]
        ).last_hidden_state[0]
        scores = self.model.lm_head(states[before])
        return torch.log_softmax(scores, -1).gather(1, tokens[-len(before) :, None])[:, 0]

    def save(self, folder: Path) -> str:
        """The adapter as PEFT writes it."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, low in self.adapted.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = low.down.detach()
            tensors[f"base_model.model.{name}.lora_B.weight"] = low.up.detach()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": PROJECTIONS}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return str(folder)


class SharedPrompt:
    """Samples of one start, of one turn each, as one sequence of n tokens: the prompt, which is computed once, and
    behind it the answers, m tokens in all, each of which sees the prompt and itself alone.
    """

    def __init__(self, group: Sequence[Sample]) -> None:
        prompt, answers = len(group[0].prompt), [len(sample.response) for sample in group]
        tokens = [*group[0].prompt, *(token for sample in group for token in sample.response)]
        self.tokens = torch.tensor(tokens)  # int64 [n]
        positions = [torch.arange(prompt), *(prompt + torch.arange(length) for length in answers)]
        self.positions = torch.cat(positions)  # int64 [n]
        lengths = torch.tensor([prompt, *answers])
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)  # 0: the prompt
        visible = (owner[None, :] == 0) | (owner[None, :] == owner[:, None])
        self.seen = visible.tril()  # bool [n, n]
        self.before = torch.arange(prompt, len(tokens)) - 1  # int64 [m]: whose state foretells each token
        self.before[lengths[1:].cumsum(0) - lengths[1:]] = prompt - 1
        self.old = torch.tensor([one for sample in group for one in sample.logprobs])  # float32 [m], when drawn
        self.advantage = torch.tensor([sample.advantage for sample in group]).repeat_interleave(lengths[1:])
        self.share = (1 / lengths[1:]).repeat_interleave(lengths[1:])  # each answer weighs alike


class Trainer:
    """One step of GRPO a batch of groups."""

    def __init__(self, policy: Policy, rate: float, clip: float) -> None:
        self.policy, self.clip = policy, clip
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)

    def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Train on groups; figures of the step. A group whose games all got the same reward has advantages of 0: it
        teaches nothing, and is left out.
        """
        played = [samples(group) for group in groups]
        every = [sample for of_group in played for sample in of_group]
        useful = [of_group for of_group in played if any(sample.advantage for sample in of_group)]
        loss = drift = 0.0
        for of_group in useful:
            lost, moved = self.lost(SharedPrompt(of_group))
            lost = lost / len(every)
            lost.backward()
            loss, drift = loss + float(lost.detach()), max(drift, moved)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        if useful:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "reward": _mean([sample.trajectory.reward for sample in every]),
            "answer_tokens": _mean([len(sample.response) for sample in every]),
            "useful_groups": len(useful),
            "loss": loss,
            "gradient": float(norm),
            "drift": drift,
        }

    def lost(self, shared: SharedPrompt) -> tuple[Tensor, float]:
        """The negative objective, summed over samples (Shao et al. 2024, equation 3, without its KL term), and the
        largest difference of log-probabilities between us and who drew the tokens.
        """
        new = self.policy.logprobs(shared.tokens, shared.positions, shared.seen, shared.before)
        ratio = (new - shared.old).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gained = torch.minimum(ratio * shared.advantage, clipped * shared.advantage)
        return -(shared.share * gained).sum(), float((new.detach() - shared.old).abs().max())


async def train(own: argparse.Namespace) -> list[dict[str, float]]:
    """Play and train in turns; the figures of each step."""
    torch.manual_seed(own.seed)
    torch.set_num_threads(own.threads)
    out = Path(own.out)
    policy = Policy(own.model, own.rank, own.alpha, own.layers)
    trainer = Trainer(policy, own.rate, own.clip)
    history: list[dict[str, float]] = []
    stream = rollouts(
        env="arithmetic",
        env_option=own.env_option,
        model=own.model,
        adapter=[f"policy={policy.save(out / 'adapters' / 'v0')}"],
        groups=own.steps * own.batch_groups,
        samples_per_group=own.samples,
        max_new_tokens=own.max_new_tokens,
        batch_groups=own.batch_groups,
        buffer_depth=own.batch_groups,
        max_staleness=0,  # all of a batch is drawn by the newest weights
        context=256,
        out=out / "record",
        steps=out / "steps.jsonl",
        seed=own.seed,
        device="cpu",
        backend_options={"threads": own.threads},
    )
    try:
        async with stream:
            async for batch in stream:
                figures = await asyncio.to_thread(trainer.step, batch.groups)
                folder = policy.save(out / "adapters" / f"v{batch.version + 1}")
                await stream.update(batch.version + 1, folder, adapter="policy")
                stream.tell(metrics=figures)
                history.append(figures)
                words = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                print(f"step {batch.step}: {words}", flush=True)
    finally:
        if history:
            draw([one["reward"] for one in history], out / "rewards.svg")
    return history


def draw(rewards: Sequence[float], file: Path) -> None:
    """The mean reward of each step, and its mean over the last few."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(rewards, ".", color="#9bb7d4", label="a step")
    smooth = [_mean(rewards[max(0, end - SMOOTHED) : end]) for end in range(1, len(rewards) + 1)]
    axes.plot(smooth, color="#1f4e79", label=f"the last {SMOOTHED} steps")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file)
    plt.close(figure)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model of a package, a GGUF file or a folder")
    parser.add_argument("--out", default="grpo", help="a new folder for adapters, games, steps and the curve")
    parser.add_argument("--env-option", nargs="*", default=SUMS, help="of the environment, as key=value")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-groups", type=int, default=8, help="questions a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each question")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--layers", type=int, default=15, help="that are adapted, from the last one down")
    parser.add_argument("--rate", type=float, default=5e-4, help="of learning")
    parser.add_argument("--clip", type=float, default=0.2, help="of the ratio of probabilities")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


if __name__ == "__main__":
    asyncio.run(train(arguments()))
