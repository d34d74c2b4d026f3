"""What training costs: a step against plain torch's, and checkpointed layers against those that keep everything.

    python benchmarks/train.py [--device cpu] [--steps N] [--repeats N] [--batch-size N] [--threads N]

Steps: `gpuinfer train` and a loop of plain torch with the same batches, loss, clipping and optimizer take turns in this
process; ratios are taken within a turn, of the clock and of processor time. Each keeps what it has come to at the end:
ours its checkpoint and the weights, the loop weights and optimizer by `torch.save`. Layers:
forward and backward of 24 layers of `blobnet` in 4 segments, against the same without, in turns; processor time, on
CUDA the clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.gradients import TrainingBatch
from gpuinfer.models.device import device_name, resolve_device
from gpuinfer.models.gradients import GradientPass
from gpuinfer.models.load import trainable
from gpuinfer.models.losses import policy_value
from gpuinfer.models.networks import WIDTH, OneTokenLayer
from gpuinfer.models.positions import PositionsFolder, positions_of
from gpuinfer.runtime.run import run
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.workloads.train import Train, TrainingBatches, rate_at

FEATURES, ACTIONS, SEATS = 256, 52, 4  # of Blob with four players
POSITIONS, GAMES = 20_000, 1000
LAYERS, SEGMENTS = 24, 4


class Deep(nn.Module):
    """`blobnet` with more layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(OneTokenLayer() for _ in range(LAYERS))
        self.policy, self.value = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, SEATS)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.embed(rows)
        for layer in self.layers:
            rows = layer(rows)
        return self.policy(rows), self.value(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024, help="of a pass through 24 layers")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", choices=("steps", "layers"), default=None)
    own = parser.parse_args()
    if own.threads:
        torch.set_num_threads(own.threads)
    print(f"{device_name(resolve_device(own.device))}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    if own.only != "layers":
        steps(own)
    if own.only != "steps":
        layers(own)


def steps(own: argparse.Namespace) -> None:
    print(f"| model, batches of {own.batch_size} | steps/s | plain torch | ratio | ratio of processor time |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        write(records)
        for model in ("blobnet", "blobnet-small"):
            count = own.steps * (10 if model == "blobnet-small" else 1)
            ours, plain = (
                (lambda n=count, m=model: with_ours(records, m, n, own)),
                (lambda n=count, m=model: with_torch(records, m, n, own)),
            )
            with_ours(records, model, 5, own), with_torch(records, model, 5, own)  # whatever is imported and compiled
            turns = [(ours(), plain()) if turn % 2 else (plain(), ours())[::-1] for turn in range(own.repeats)]
            wall = [b[0] / a[0] for a, b in turns]
            cpu = [b[1] / a[1] for a, b in turns]
            rates = [statistics.median(count / one[side][0] for one in turns) for side in (0, 1)]
            print(f"| {model} | {rates[0]:.1f} | {rates[1]:.1f} | {shown(wall)} | {shown(cpu)} |", flush=True)
    print()


def shown(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def with_ours(records: Path, model: str, count: int, own: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the clock and of processors for so many steps, the last checkpoint included."""
    setup = Setup(devices=(own.device,))
    with tempfile.TemporaryDirectory() as out:
        work = Train(
            setup,
            records=[records],
            out=Path(out),
            model=model,
            steps=count,
            batch_size=own.batch_size,
            validation_share=0.0,
            checkpoint_every=10**9,
        )
        setup = Setup(model=work.model(), devices=(own.device,))
        report = run(work, InProcess(setup, threads=own.threads), Dynamic(setup))
    return report["wall_s"], report["cores"]["busy_s"]


def with_torch(records: Path, model: str, count: int, own: argparse.Namespace) -> tuple[float, float]:
    """The same by hand, in a thread that ends: its pool of OpenMP would send the threads of ours to sleep otherwise."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(plainly, records, model, count, own).result()


def plainly(records: Path, model: str, count: int, own: argparse.Namespace) -> tuple[float, float]:
    device, batches = resolve_device(own.device), TrainingBatches(positions_of([records]), own.batch_size, 0, 0.0)
    module = trainable(spec(model), 0).train().to(device)
    matrices = [one for one in module.parameters() if one.ndim > 1]
    vectors = [one for one in module.parameters() if one.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    began = time.perf_counter(), time.process_time()
    for step in range(count):
        batch = batches.at(step)
        targets = {name: torch.from_numpy(one).to(device) for name, one in batch.targets.items()}
        answers = module(torch.from_numpy(batch.features).to(device).float())
        loss, _ = policy_value(answers, targets)
        optimizer.zero_grad()
        loss.backward()
        loss.item()  # a loop that tells its loss
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, peak=1e-3, warmup=100, steps=count, schedule="cosine")
        optimizer.step()
    with tempfile.TemporaryFile() as file:
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return time.perf_counter() - began[0], time.process_time() - began[1]


def layers(own: argparse.Namespace) -> None:
    device = resolve_device(own.device)
    batch = made(own.rows)
    wanted = ModelSpec("benchmark:Deep", None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})
    passes = []
    for count in (None, SEGMENTS):
        torch.manual_seed(0)
        passes.append(GradientPass(Deep().to(device), wanted, checkpoint_segments=count))
    without, found = (one(batch) for one in passes)  # the first pass counts the memory
    difference = max(float(np.abs(found.by_name[name] - one).max()) for name, one in without.by_name.items())
    share = found.activation_bytes / without.activation_bytes
    clock: Callable[[], float] = time.perf_counter if device.type == "cuda" else time.process_time
    ratios = []
    for _ in range(own.repeats):
        spent = []
        for one in passes:
            began = clock()
            one(batch)
            spent.append(clock() - began)
        ratios.append(spent[1] / spent[0])
    print(
        f"{LAYERS} layers in {SEGMENTS} segments, {own.rows} rows: {share:.3f} of the activations' memory "
        f"({found.activation_bytes / 2**20:,.1f} of {without.activation_bytes / 2**20:,.1f} MiB), "
        f"{shown(ratios)} times the time, gradients within {difference:.1e}"
    )


def spec(model: str) -> ModelSpec:
    return ModelSpec(model, None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})


def arrays(rows: int) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(0)
    observation = dice.integers(0, 2, (rows, FEATURES), dtype=np.uint8)
    observation[:, 0] = 1
    legal = observation[:, :ACTIONS].astype(bool)
    policy = dice.random((rows, ACTIONS), dtype=np.float32) * legal
    return {
        "observation": observation,
        "legal": legal,
        "policy": policy / policy.sum(1, keepdims=True),
        "value": dice.standard_normal((rows, SEATS), dtype=np.float32),
    }


def made(rows: int) -> TrainingBatch:
    found = arrays(rows)
    return TrainingBatch(found["observation"], {name: found[name] for name in ("policy", "value", "legal")})


def write(path: Path) -> None:
    folder = PositionsFolder(path)
    folder.open({"game": "made up"}, resume=False)
    numbers = np.arange(POSITIONS)
    folder.write(
        {
            **arrays(POSITIONS),
            "player": np.zeros(POSITIONS, np.int8),
            "game": numbers // (POSITIONS // GAMES),
            "move": (numbers % (POSITIONS // GAMES)).astype(np.int16),
            "finished": np.arange(GAMES),
            "returns": np.zeros((GAMES, SEATS), np.float32),
        }
    )
    folder.close(GAMES)


if __name__ == "__main__":
    main()
