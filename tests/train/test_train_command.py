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

from gpuinfer.errors import UsageError
from gpuinfer.models.gradients import GradientPass
from gpuinfer.models.positions import PositionsFolder, Sizes, checked, positions_of, sizes_of
from gpuinfer.report.report import schema
from gpuinfer.workloads.optimizer import Stepper, TrainingFolder
from gpuinfer.workloads.train import TrainingBatches, rate_at

SETTINGS = {"game": "made up", "game_options": {}}
STEPS = 24
FILES = ("checkpoint.safetensors", "weights.safetensors")


def written(path, parts, settings=SETTINGS):
    folder = PositionsFolder(path)
    folder.open(settings, resume=False)
    for part in parts:
        folder.write(part)
    folder.close(len(parts))
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return written(tmp_path_factory.mktemp("records") / "games", [positions(400)])


@pytest.fixture
def train(gpuinfer, records, tmp_path):
    """The command in this process, of a few steps, with what a test changes."""

    def run(*words, out="out", **changes):
        told = {"records": records, "out": tmp_path / out, "model": "blobnet-small", "steps": STEPS}
        told |= {"batch_size": 32, "learning_rate": 0.003, "warmup_steps": 4, "checkpoint_every": 5, "device": "cpu"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**told, **changes}.items()]
        return gpuinfer("train", *flags, "-B", "threads=1", "--quiet", *map(str, words))

    return run


def weights(folder):
    return load_file(folder / "weights.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_the_same_weights_are_the_same_bytes(tmp_path):
    """And the file is one as safetensors writes it: sizes that are no multiple of eight are padded."""
    state = {"weights/a.é": torch.arange(3.0), "weights/b": torch.ones(2, 3), "moments/b": torch.zeros(5)}
    written = set()
    for number in range(20):
        folder = TrainingFolder(tmp_path / str(number))
        folder.claim({}, resume=False)
        folder.keep(7, "policy", state)
        folder.finish(7, "policy", state)
        step, loss, found = folder.last()
        assert (step, loss) == (7, "policy")
        assert all(torch.equal(found[name], one) for name, one in state.items())
        with safe_open(tmp_path / str(number) / "weights.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "loss": "policy", "step": "7"}
            assert torch.equal(file.get_tensor("b"), state["weights/b"])
        written.add(tuple((tmp_path / str(number) / name).read_bytes() for name in FILES))
    assert len(written) == 1


def test_training_learns_and_reports_it(train, tmp_path):
    code, out, errors = train("--json", "-", steps=150)
    assert code == 0, errors
    report = json.loads(out)
    import jsonschema  # which machines that are lent for GPU tests lack

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


def curve(folder):
    return [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]


def test_the_loss_of_each_step_is_a_row_and_a_picture_shows_them(train, tmp_path):
    code, out, errors = train("--json", "-")
    assert code == 0, errors
    told, rows = json.loads(out)["training"], curve(tmp_path / "out")
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


def test_the_curve_of_a_run_that_broke_is_that_of_one_that_did_not(train, tmp_path):
    assert train(out="whole", schedule="constant", steps=10)[0] == 0
    with (tmp_path / "whole" / "loss.jsonl").open("a") as file:
        file.write('{"step":11,"loss":1.0}\n{"step":12,"lo')  # a kill in the midst of a row, after the last checkpoint
    assert train("--resume", out="whole", schedule="constant")[0] == 0
    assert train(schedule="constant")[0] == 0
    at = [row["step"] for row in curve(tmp_path / "whole") if "loss" in row]
    assert at == list(range(1, STEPS + 1))
    steps = [[row for row in curve(tmp_path / one) if "loss" in row] for one in ("whole", "out")]
    assert steps[0] == steps[1]


def test_a_run_that_broke_before_its_first_checkpoint_decides_nothing(train, monkeypatch):
    """Its loss curve alone does not hold the folder."""

    def broken(self, gradients, rate):
        raise MemoryError("the machine is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "step", broken)
        assert train()[0] == 1
    code, _, errors = train(learning_rate=0.001)
    assert code == 0, errors


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
    assert train(steps=3)[0] == 0
    opening = where.pop("GradientPass.__init__")
    assert len(where) == 3
    assert len(set.union(*where.values())) == 1
    for one in opening:
        one.join(60)
        assert not one.is_alive()


def test_a_run_that_broke_goes_on_to_the_same_bits(train, tmp_path, monkeypatch):
    assert train(out="whole")[0] == 0
    step, done = Stepper.step, []

    def breaking(self, gradients, rate):
        done.append(rate)
        if len(done) == 13:
            raise MemoryError("the machine is gone")
        return step(self, gradients, rate)

    monkeypatch.setattr(Stepper, "step", breaking)
    code, _, errors = train(out="broken")
    assert code == 1, errors
    monkeypatch.undo()
    code, out, errors = train("--resume", "--json", "-", out="broken")
    assert code == 0, errors
    assert json.loads(out)["progress"]["before"] == 10
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_to_the_same_bits(train, records, tmp_path):
    assert train(out="whole", steps=200)[0] == 0
    flags = ["--records", records, "--out", "killed", "--model", "blobnet-small", "--steps", 200, "--batch-size", 32]
    flags += ["--learning-rate", 0.003, "--warmup-steps", 4, "--checkpoint-every", 5, "--device", "cpu", "--quiet"]
    words = ["gpuinfer", "train", *flags, "-B", "threads=1", "--resume"]
    for _ in range(2):
        with forking.Forked(words, tmp_path) as run:
            until, seen = time.monotonic() + 120, _written(tmp_path / "killed")
            while _written(tmp_path / "killed") == seen and run.poll() is None and time.monotonic() < until:
                time.sleep(0.005)
            run.send_signal(signal.SIGKILL)
    done = forking.run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    assert not list((tmp_path / "killed").glob("*.tmp"))


def _written(folder):
    try:
        return (folder / "checkpoint.safetensors").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def test_what_is_done_is_not_done_again(train):
    assert train()[0] == 0
    code, out, _ = train("--resume", "--json", "-")
    assert (code, json.loads(out)["progress"]["before"]) == (0, STEPS)
    code, _, errors = train()
    assert code == 2
    assert "holds a training run already. Add --resume" in errors


def test_a_run_that_was_refused_leaves_its_folder_free(train):
    code, _, errors = train("-B", "loss=train_models:per_rwo")
    assert (code, "no loss in module 'train_models' named 'per_rwo'" in errors) == (2, True)
    assert train("--learning-rate", "0.001")[0] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": 0.001}, "learning_rate: 0.003 there, 0.001 here"),
        ({"steps": 48}, "steps: 24 there, 48 here"),
        ({"window": 100}, "records.positions: 400 there, 100 here"),
        ({"seed": 4}, "seed: 0 there, 4 here"),
    ],
)
def test_other_settings_are_refused_and_shown(train, changes, said):
    assert train()[0] == 0
    code, _, errors = train("--resume", **changes)
    assert code == 2
    assert said in " ".join(errors.split())


def test_another_loss_is_refused(train):
    assert train()[0] == 0
    code, _, errors = train("--resume", "-B", "loss=train_models:weighed")
    assert code == 0  # nothing was left to ask for
    assert train(out="b", schedule="constant", steps=10)[0] == 0
    code, _, errors = train("--resume", "-B", "loss=train_models:weighed", out="b", schedule="constant")
    assert code == 2
    assert "was made with the loss 'policy-value', and this run has 'train_models:weighed'" in " ".join(errors.split())


def test_a_checkpoint_that_is_damaged_is_named(train, tmp_path):
    assert train()[0] == 0
    (tmp_path / "out" / "checkpoint.safetensors").write_bytes(b"nothing")
    code, _, errors = train("--resume")
    assert code == 2
    assert "checkpoint.safetensors cannot be read" in " ".join(errors.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda state, name: state.pop(name), "no 'weights/", id="a tensor that is missing"),
        pytest.param(lambda state, name: state.update({name: np.zeros((3, 5), "f4")}), "size of tensor", id="a shape"),
    ],
)
def test_a_checkpoint_of_a_model_that_has_changed_since_is_refused(train, tmp_path, change, said):
    assert train()[0] == 0
    path = tmp_path / "out" / "checkpoint.safetensors"
    with safe_open(path, "np") as file:
        told = file.metadata()
    state = load_file(path)
    change(state, next(name for name in state if name.startswith("weights/")))
    save_file(state, path, told)
    for _ in range(2):  # and the folder is free again
        code, _, errors = train("--resume")
        assert code == 2
        assert said in errors
        assert "not of model 'blobnet-small' as it is now" in " ".join(errors.split())


def test_training_begins_with_weights_from_a_file(train, tmp_path):
    assert train()[0] == 0
    first = tmp_path / "out" / "weights.safetensors"
    assert train(out="next", weights=first, learning_rate=1e-9)[0] == 0
    for name, one in weights(tmp_path / "next").items():
        np.testing.assert_allclose(one, load_file(first)[name], atol=1e-6)


def test_a_step_is_that_of_plain_torch(train, records, tmp_path):
    """Loss, clipping, AdamW and learning rate, by hand, over the same batches."""
    from gpuinfer.api import ModelSpec
    from gpuinfer.models.load import trainable
    from gpuinfer.models.losses import policy_value

    assert train(steps=6, validation_share=0)[0] == 0
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
    assert train(out="cpu", **changes)[0] == 0
    code, out, errors = train("--json", "-", out="cuda", device="cuda", steps=15, **changes)
    assert code == 0, errors
    assert all(json.loads(out)["training"][name] > 0 for name in ("forward_s", "backward_s", "optimizer_s"))
    assert train("--resume", out="cuda", **changes)[0] == 0
    there, here = curve(tmp_path / "cuda"), curve(tmp_path / "cpu")
    for name in ("loss", "gradient_norm", "validation"):
        found, expected = ([row[name] for row in rows if name in row] for rows in (there, here))
        np.testing.assert_allclose(found, expected, rtol=2e-3, err_msg=name)
    for name, one in weights(tmp_path / "cuda").items():
        np.testing.assert_allclose(one, weights(tmp_path / "cpu")[name], atol=0.02, err_msg=name)


def test_features_that_are_no_numbers_are_the_records_fault_and_not_the_learning_rates(train, tmp_path):
    part = positions(400)
    part["observation"] = np.where(part["observation"] > 0, np.nan, 0.0).astype(np.float32)
    code, _, errors = train(records=written(tmp_path / "odd", [part]))
    assert code == 1
    assert "since features in the records are not finite" in " ".join(errors.split())
    assert "learning rate" not in errors


def test_diverging_is_said(train):
    code, _, errors = train("-B", "loss=train_models:nothing")
    assert code == 1
    assert "the loss 'train_models:nothing' is nan" in " ".join(errors.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "blobnt"), "Did you mean 'blobnet'?"),
        ((), "nowhere holds no records. Write some with `gpuinfer selfplay --out nowhere`"),
        (("--weights", "none.safetensors"), "no file 'none.safetensors'"),
        (("--backend", "central"), "has a model of gradients, and the backend 'central' serves"),
        (("--schedule", "linear"), "Choose from cosine, constant"),
        (("-B", "max_rows=8"), "Give a smaller --batch-size, or raise -B max_rows"),
    ],
)
def test_bad_flags_are_refused(train, words, said):
    code, _, errors = train(*words, **({} if words else {"records": "nowhere"}))
    assert code == 2
    assert said in " ".join(errors.split())


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


def test_a_damaged_shard_is_named(tmp_path):
    path = written(tmp_path / "a", [positions(60)])
    shard = next(PositionsFolder(path).shards())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    with pytest.raises(UsageError, match=r"shard-\w+\.npz cannot be read .* Run gpuinfer selfplay with --resume"):
        positions_of([path])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": lambda one: one[:-1]}, "does not hold what self-play writes"),
        ({"value": lambda one: one * np.nan}, "holds what is no number"),
        ({"value": lambda one: one.astype(np.float64)}, "does not hold what self-play writes"),
    ],
)
def test_a_shard_of_something_else_is_refused(tmp_path, change, said):
    whole = positions(60)
    path = written(tmp_path / "a", [{name: change.get(name, lambda one: one)(one) for name, one in whole.items()}])
    with pytest.raises(UsageError, match=said):
        positions_of([path])


def test_positions_of_different_games_do_not_go_together(tmp_path):
    one = written(tmp_path / "a", [positions(20)])
    other = written(tmp_path / "b", [positions(20)], {"game": "another", "game_options": {}})
    with pytest.raises(UsageError, match="hold different games"):
        positions_of([one, other])


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
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] > 0


def test_positions_are_turned_at_random_with_what_is_to_be_learnt_of_them(records):
    found = positions_of([records])
    draw = np.random.default_rng(1)
    pairs = []
    for _ in range(2):
        actions = draw.permutation(ACTIONS)
        pairs.append(([*actions, *(ACTIONS + draw.permutation(FEATURES - ACTIONS))], actions))
    symmetries = checked(pairs, FEATURES, ACTIONS, "g")
    plain, turned = TrainingBatches(found, 64, 0, 0.1), TrainingBatches(found, 64, 0, 0.1, symmetries)
    seen = set()
    for step in range(4):
        one, other, again = plain.at(step), turned.at(step), turned.at(step)
        np.testing.assert_array_equal(other.features, again.features)
        np.testing.assert_array_equal(other.targets["value"], one.targets["value"])
        for row in range(64):
            ways = [(slice(None), slice(None)), *pairs]
            fitting = [
                number
                for number, (features, actions) in enumerate(ways)
                if (other.features[row] == one.features[row][features]).all()
                and all(
                    (other.targets[name][row] == one.targets[name][row][actions]).all() for name in ("policy", "legal")
                )
            ]
            assert fitting
            seen.update(fitting)
    assert seen == {0, 1, 2}
    for one, other in zip(plain.validating(), turned.validating(), strict=True):
        np.testing.assert_array_equal(one.features, other.features)
