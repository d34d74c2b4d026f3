"""`gpuinfer train`: learns from records, goes on as if nothing had happened, refuses what does not belong together."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import defaultdict

import forking
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from train_models import ACTIONS, FEATURES, SEATS, positions

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.models.gradients import GradientPass
from gpuinfer.models.load import trainable
from gpuinfer.models.losses import policy_value
from gpuinfer.models.positions import PositionsFolder, Sizes, checked, positions_of, sizes_of
from gpuinfer.workloads.optimizer import Stepper, TrainingFolder
from gpuinfer.workloads.train import TrainingBatches, rate_at

STEPS = 24
TOLD = {"model": "blobnet-small", "steps": STEPS, "batch_size": 32, "learning_rate": 0.003, "warmup_steps": 4}
TOLD |= {"checkpoint_every": 5, "device": "cpu"}


def written(path, parts, game="made up"):
    folder = PositionsFolder(path)
    folder.open({"game": game, "game_options": {}}, resume=False)
    for part in parts:
        folder.write(part)
    folder.close(len(parts))
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return written(tmp_path_factory.mktemp("records") / "games", [positions(400)])


def flags(told):
    return [f"--{name.replace('_', '-')}={value}" for name, value in told.items()] + ["-B", "threads=1", "--quiet"]


@pytest.fixture
def train(gpuinfer, records, tmp_path):
    """The command in this process, of a few steps, with what a test changes: its report, or its complaint."""

    def run(words="", code=0, out="out", **changes):
        told = {"records": records, **TOLD, "out": tmp_path / out, **changes}
        found, said, errors = gpuinfer("train", *flags(told), "--json", "-", *words.split())
        assert found == code, errors
        return " ".join(errors.split()) if code else json.loads(said)

    return run


def weights(folder):
    return load_file(folder / "weights.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def curve(folder):
    return [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]


def test_the_same_weights_are_the_same_bytes(tmp_path):
    """And the file is one as safetensors writes it: sizes that are no multiple of eight are padded."""
    state = {"weights/a.é": torch.arange(3.0), "weights/b": torch.ones(2, 3), "moments/b": torch.zeros(5)}
    content = set()
    for number in range(20):
        folder = TrainingFolder(path := tmp_path / str(number))
        folder.claim({}, resume=False)
        folder.keep(7, "policy", state)
        folder.finish(7, "policy", state)
        step, loss, found = folder.last()
        assert (step, loss) == (7, "policy")
        assert all(torch.equal(found[name], one) for name, one in state.items())
        with safe_open(path / "weights.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "loss": "policy", "step": "7"}
            assert torch.equal(file.get_tensor("b"), state["weights/b"])
        content.add(tuple((path / f"{name}.safetensors").read_bytes() for name in ("checkpoint", "weights")))
    assert len(content) == 1


def test_training_learns_and_reports_it(train, tmp_path):
    report = train(steps=150)
    import jsonschema  # which machines that are lent for GPU tests lack

    from gpuinfer.report.report import schema

    jsonschema.validate(report, schema())
    told = report["training"]
    assert told["loss"]["total"] < 0.8 * told["first_loss"]
    assert told["validation"]["total"] < told["first_loss"]
    assert told["loss"]["policy"] + told["loss"]["value"] == pytest.approx(told["loss"]["total"])
    assert (told["steps"], told["checkpoint"], told["batch_size"]) == (150, 150, 32)
    assert told["positions"] + told["validation_positions"] == 400
    assert report["throughput"]["steps_per_s"] > 0
    assert "evaluations_per_s" not in report["throughput"]
    assert all(np.isfinite(one).all() for one in weights(tmp_path / "out").values())


def test_the_loss_of_each_step_is_a_row_and_a_picture_shows_them(train, tmp_path):
    told, rows = train()["training"], curve(tmp_path / "out")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert steps[0]["loss"] == told["first_loss"]
    assert np.mean([row["loss"] for row in steps]) == pytest.approx(told["loss"]["total"])
    assert all(row["loss_policy"] + row["loss_value"] == pytest.approx(row["loss"], rel=1e-5) for row in steps)
    assert [row["learning_rate"] for row in steps[:4]] == pytest.approx([0.003 / 4 * n for n in range(1, 5)])
    apart = [row for row in rows if "validation" in row]
    assert [row["step"] for row in apart] == [5, 10, 15, 20, STEPS]
    assert apart[-1]["validation"] == told["validation"]["total"]
    assert "</svg>" in (tmp_path / "out" / "loss.svg").read_text()


def test_passes_and_steps_compute_in_one_thread_and_no_other_is_left_that_did(train, monkeypatch):
    """Each thread that has computed has a pool of others behind it, and two pools are in each other's way."""

    def noting(kind, name):
        computed = getattr(kind, name)

        def noted(*arguments, **more):
            where[computed.__qualname__].add(threading.current_thread())
            return computed(*arguments, **more)

        monkeypatch.setattr(kind, name, noted)

    where = defaultdict(set)
    for kind, name in ((GradientPass, "__init__"), (GradientPass, "_passed"), (Stepper, "__init__"), (Stepper, "step")):
        noting(kind, name)
    train(steps=3)
    opening = where.pop("GradientPass.__init__")
    assert len(where) == 3
    assert len(set.union(*where.values())) == 1
    for one in opening:
        one.join(60)
        assert not one.is_alive()


@pytest.mark.parametrize("after", [0, 13], ids=["before its first checkpoint", "later"])
def test_a_run_that_broke_goes_on_to_the_same_bits(train, tmp_path, monkeypatch, after):
    train(out="whole")
    step, done = Stepper.step, []

    def breaking(self, gradients, rate):
        done.append(rate)
        if len(done) > after:
            raise MemoryError("the machine is gone")
        return step(self, gradients, rate)

    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "step", breaking)
        train(out="broken", code=1)
    if after:
        assert train("--resume", out="broken")["progress"]["before"] == 10
    else:
        train(out="broken")  # its loss curve alone does not hold the folder
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_to_the_same_bits(train, records, tmp_path):
    def modified():
        path = tmp_path / "killed" / "checkpoint.safetensors"
        return path.stat().st_mtime_ns if path.exists() else 0

    train(out="whole", steps=200)
    words = ["gpuinfer", "train", *flags({"records": records, **TOLD, "out": "killed", "steps": 200}), "--resume"]
    for _ in range(2):
        with forking.Forked(words, tmp_path) as run:
            until, seen = time.monotonic() + 120, modified()
            while modified() == seen and run.poll() is None and time.monotonic() < until:
                time.sleep(0.005)
            run.send_signal(signal.SIGKILL)
    done = forking.run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    assert not list((tmp_path / "killed").glob("*.tmp"))


def test_what_does_not_go_on_with_a_folder_is_refused_and_shown(train, tmp_path):
    train()
    assert train("--resume")["progress"]["before"] == STEPS
    assert "holds a training run already. Add --resume" in train(code=2)
    for changes, said in (
        ({"learning_rate": 0.001}, "learning_rate: 0.003 there, 0.001 here"),
        ({"steps": 48}, "steps: 24 there, 48 here"),
        ({"window": 100}, "records.positions: 400 there, 100 here"),
        ({"seed": 4}, "seed: 0 there, 4 here"),
    ):
        assert said in train("--resume", 2, **changes)
    train("--resume -B loss=train_models:weighed")  # nothing is left to ask for
    train(out="b", schedule="constant", steps=10)
    said = train("--resume -B loss=train_models:weighed", 2, out="b", schedule="constant")
    assert "was made with the loss 'policy-value', and this run has 'train_models:weighed'" in said

    path = tmp_path / "out" / "checkpoint.safetensors"
    with safe_open(path, "np") as file:
        told = file.metadata()
    whole = load_file(path)
    name = next(name for name in whole if name.startswith("weights/"))
    for state, said in (
        ({key: one for key, one in whole.items() if key != name}, "no 'weights/"),
        ({**whole, name: np.zeros((3, 5), "f4")}, "size of tensor"),
    ):
        save_file(state, path, told)
        for _ in range(2):  # and the folder is free again
            errors = train("--resume", 2)
            assert said in errors
            assert "not of model 'blobnet-small' as it is now" in errors
    path.write_bytes(b"nothing")
    assert "checkpoint.safetensors cannot be read" in train("--resume", 2)


def test_training_begins_with_weights_from_a_file(train, tmp_path):
    train()
    first = tmp_path / "out" / "weights.safetensors"
    train(out="next", weights=first, learning_rate=1e-9)
    for name, one in weights(tmp_path / "next").items():
        np.testing.assert_allclose(one, load_file(first)[name], atol=1e-6)


def test_a_step_is_that_of_plain_torch(train, records, tmp_path):
    """Loss, clipping, AdamW and learning rate, by hand, over the same batches."""
    train(steps=6, validation_share=0)
    spec = ModelSpec("blobnet-small", None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})
    module, batches = trainable(spec, 0), TrainingBatches(positions_of([records]), 32, 0, 0.0)
    parameters = list(module.parameters())
    groups = [[one for one in parameters if one.ndim > 1], [one for one in parameters if one.ndim == 1]]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0}]
    )
    for step in range(6):
        batch = batches.at(step)
        targets = {name: torch.from_numpy(one) for name, one in batch.targets.items()}
        loss, _ = policy_value(module(torch.from_numpy(batch.features).float()), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, peak=0.003, warmup=4, steps=6, schedule="cosine")
        optimizer.step()
    for name, one in weights(tmp_path / "out").items():
        np.testing.assert_allclose(one, module.state_dict()[name].numpy(), atol=1e-6, err_msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["blobnet-small", "train_models:Normed"])
def test_training_on_cuda_has_the_losses_of_the_cpu_and_goes_on_there(train, tmp_path, model):
    changes = {"model": model, "schedule": "constant"}
    train(out="cpu", **changes)
    told = train(out="cuda", **{**changes, "device": "cuda", "steps": 15})["training"]
    assert all(told[name] > 0 for name in ("forward_s", "backward_s", "optimizer_s"))
    train("--resume", out="cuda", **changes)
    there, here = curve(tmp_path / "cuda"), curve(tmp_path / "cpu")
    for name in ("loss", "gradient_norm", "validation"):
        found, expected = ([row[name] for row in rows if name in row] for rows in (there, here))
        np.testing.assert_allclose(found, expected, rtol=2e-3, err_msg=name)
    for name, one in weights(tmp_path / "cuda").items():
        np.testing.assert_allclose(one, weights(tmp_path / "cpu")[name], atol=0.02, err_msg=name)


@pytest.mark.parametrize(
    ("words", "changes", "code", "said"),
    [
        ("", {"model": "blobnt"}, 2, "Did you mean 'blobnet'?"),
        ("", {"records": "nowhere"}, 2, "nowhere holds no records. Write some with `gpuinfer selfplay --out nowhere`"),
        ("", {"weights": "none.safetensors"}, 2, "no file 'none.safetensors'"),
        ("", {"schedule": "linear"}, 2, "Choose from cosine, constant"),
        ("-B max_rows=8", {}, 2, "Give a smaller --batch-size, or raise -B max_rows"),
        ("-B loss=train_models:per_rwo", {}, 2, "no loss in module 'train_models' named 'per_rwo'"),
        ("-B loss=train_models:nothing", {}, 1, "the loss 'train_models:nothing' is nan"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_its_folder_free(train, words, changes, code, said):
    assert said in train(words, code, **changes)
    train(steps=1, warmup_steps=0)


def test_features_that_are_no_numbers_are_the_records_fault_and_not_the_learning_rates(train, tmp_path):
    part = positions(400)
    part["observation"] = np.where(part["observation"] > 0, np.nan, 0.0).astype(np.float32)
    errors = train(code=1, records=written(tmp_path / "odd", [part]))
    assert "since features in the records are not finite" in errors
    assert "learning rate" not in errors


# What is read


def test_positions_come_in_the_order_of_play_whatever_shards_are_called(tmp_path):
    whole = positions(60)
    early = {name: one[whole["game"] < 5] if len(one) == 60 else one[:5] for name, one in whole.items()}
    late = {name: one[whole["game"] >= 5] if len(one) == 60 else one[5:] for name, one in whole.items()}
    one = positions_of([written(tmp_path / "a", [late, early])])
    other = positions_of([written(tmp_path / "b", [early, late])])
    np.testing.assert_array_equal(one.observation, whole["observation"])
    assert one.digest() == other.digest()
    newest = positions_of([tmp_path / "a"], 7)
    np.testing.assert_array_equal(newest.policy, whole["policy"][-7:])
    both = positions_of([tmp_path / "a", tmp_path / "b"], 70)
    np.testing.assert_array_equal(both.policy, np.concatenate([whole["policy"][-10:], whole["policy"]]))
    assert sizes_of([tmp_path / "a"]) == Sizes(FEATURES, "uint8", ACTIONS, SEATS)


def test_shards_that_are_damaged_or_of_something_else_are_refused(tmp_path):
    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)

    whole = positions(60)
    for number, (changes, said) in enumerate(
        (
            ({}, r"shard-\w+\.npz cannot be read .* Run gpuinfer selfplay with --resume"),
            ({"policy": whole["policy"][:-1]}, "does not hold what self-play writes"),
            ({"value": whole["value"] * np.nan}, "holds what is no number"),
            ({"value": whole["value"].astype(np.float64)}, "does not hold what self-play writes"),
        )
    ):
        path = written(tmp_path / str(number), [{**whole, **changes}])
        if not changes:
            flip(next(PositionsFolder(path).shards()))
        with pytest.raises(UsageError, match=said):
            positions_of([path])
    games = [written(tmp_path / game, [positions(20)], game) for game in ("one", "another")]
    with pytest.raises(UsageError, match="hold different games"):
        positions_of(games)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_batches_depend_on_the_seed_and_the_step_alone(records, share):
    of = positions_of([records])
    one, other = TrainingBatches(of, 32, 1, share), TrainingBatches(of, 32, 1, share)
    expected = {step: one.at(step).features for step in range(3 * one.an_epoch)}
    for step in reversed(expected):
        np.testing.assert_array_equal(other.at(step).features, expected[step])
    assert not set(of.game[one.rows]) & set(of.game[one.validation])
    assert bool(len(one.validation)) == bool(share)
    assert len(one.rows) + len(one.validation) == 400


def test_the_learning_rate_rises_and_falls():
    rates = [rate_at(step, peak=1.0, warmup=10, steps=110, schedule="cosine") for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert (rates[10], rates[60]) == (1.0, pytest.approx(0.5))
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] > 0


def test_positions_are_turned_at_random_with_what_is_to_be_learnt_of_them(records):
    found, draw, pairs, seen = positions_of([records]), np.random.default_rng(1), [], set()
    for _ in range(2):
        actions = draw.permutation(ACTIONS)
        pairs.append(([*actions, *(ACTIONS + draw.permutation(FEATURES - ACTIONS))], actions))
    symmetries = checked(pairs, FEATURES, ACTIONS, "g")
    plain, turned = TrainingBatches(found, 64, 0, 0.1), TrainingBatches(found, 64, 0, 0.1, symmetries)
    for step in range(4):
        one, other, again = plain.at(step), turned.at(step), turned.at(step)
        np.testing.assert_array_equal(other.features, again.features)
        np.testing.assert_array_equal(other.targets["value"], one.targets["value"])
        for row in range(64):
            fitting = {
                number
                for number, (features, actions) in enumerate([(slice(None), slice(None)), *pairs])
                if (other.features[row] == one.features[row][features]).all()
                and all(
                    (other.targets[name][row] == one.targets[name][row][actions]).all() for name in ("policy", "legal")
                )
            }
            assert fitting
            seen |= fitting
    assert seen == {0, 1, 2}
    for one, other in zip(plain.validating(), turned.validating(), strict=True):
        np.testing.assert_array_equal(one.features, other.features)
