"""Networks, and how a model is found, built, loaded and tried out."""

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpuinfer import models
from gpuinfer.api import ModelSpec
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.models.device import resolve_device, resolve_dtype
from gpuinfer.models.load import build, probe, title, trainable
from gpuinfer.models.networks import BlobNet, BlobNetSmall
from gpuinfer.models.row_format import AnswerLayout

CPU = torch.device("cpu")
FEATURES, ACTIONS, SEATS = 64, 20, 4
ARGUMENTS = {"actions": ACTIONS, "seats": SEATS}
NETWORKS = pytest.mark.parametrize("network", [BlobNet, BlobNetSmall])


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def spec(name="blobnet-small", **changes):
    return ModelSpec(**{"name": name, "inputs": FEATURES, "input_dtype": "uint8", "arguments": ARGUMENTS, **changes})


def positions(rows, seed=0):
    return torch.randint(0, 2, (rows, FEATURES), generator=torch.Generator().manual_seed(seed)).float()


def built(a_spec, dtype=torch.float32, seed=0):
    return build(a_spec, device=CPU, dtype=dtype, seed=seed)


# The networks


def test_blobnet_answers_what_torchs_own_encoder_answers():
    torch.manual_seed(1)
    net = BlobNet(FEATURES, ACTIONS, SEATS).eval()
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()
    encoder.layers.load_state_dict(net.layers.state_dict())
    features = positions(33)
    with torch.inference_mode():
        token = encoder(net.norm(net.embed(features)).unsqueeze(1)).squeeze(1)
        policy, values = net(features)
        torch.testing.assert_close(values, net.value(token), atol=1e-5, rtol=0)
        legal = features[:, :ACTIONS] == 1
        torch.testing.assert_close(policy[legal], net.policy(token)[legal], atol=1e-5, rtol=0)


@NETWORKS
def test_gradients_reach_every_parameter_that_can_matter(network):
    net = network(FEATURES, ACTIONS, SEATS)
    policy, values = net(positions(8))
    (policy[policy.isfinite()].square().sum() + values.square().sum()).backward()
    for name, parameter in net.named_parameters():
        gradient = parameter.grad[2 * 256 :] if "in_proj" in name else parameter.grad  # queries and keys cannot matter
        assert parameter.grad.isfinite().all(), name
        assert gradient.abs().sum() > 0, name


@NETWORKS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_frozen_form_answers_the_same_and_illegal_actions_are_minus_infinity(network, dtype, tolerance):
    torch.manual_seed(2)
    net, features = network(FEATURES, ACTIONS, SEATS).eval(), positions(50)
    features[2, :ACTIONS] = 0  # a row without legal ones stays finite
    with torch.inference_mode():
        expected, found = net(features), net.freeze(device=CPU, dtype=dtype)(features.to(dtype))
    illegal = features[:, :ACTIONS] == 0
    illegal[2] = False
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, atol=tolerance, rtol=0)
    for policy, values in (expected, found):
        assert torch.equal(policy.isneginf(), illegal)
        assert policy.softmax(1).isfinite().all()
        assert values.isfinite().all()


# Building

FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, features, actions, seats, answer=None):
        super().__init__()
        self.policy, self.value, self.answer = nn.Linear(features, actions), nn.Linear(features, seats), answer

    def forward(self, x):
        answers = self.policy(x), self.value(x)
        return answers if self.answer is None else self.answer(*answers)

def good(features, actions, seats): return Net(features, actions, seats)
def noisy(**known): return Net(**known)
def raises(features): raise ValueError("no such layer")
def no_module(features): return [features]
def greedy(features, heads): return None
def narrow(actions, seats): return Net(3, actions, seats)
def game(answer): return lambda features, actions, seats: Net(features, actions, seats, answer)
def free(answer): return lambda features: Net(features, 20, 4, answer)

one_row = game(lambda policy, value: (policy, value[:1]))
fixed_rows = game(lambda policy, value: (policy[:2], value[:2]))
swapped = game(lambda policy, value: (value, policy))
alone = game(lambda policy, value: policy)
words = game(lambda policy, value: (policy, "win"))
nan = game(lambda policy, value: (policy, value * float("nan")))
infinite = game(lambda policy, value: (policy + float("inf"), value))
of_one = free(lambda policy, value: value)
of_two = free(lambda policy, value: [policy.unflatten(1, (4, 5)), value])
of_names = free(lambda policy, value: {"policy": policy, "best": value.max(1).values})
of_numbers = free(lambda policy, value: {0: policy, 1: value})
of_pairs = free(lambda policy, value: policy @ policy.T)
number = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module `a_model` of model factories, in the working folder as a user has it."""
    (tmp_path / "a_model.py").write_text(FACTORIES)
    (tmp_path / "broken_model.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    for name in ("a_model", "broken_model"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["blobnet", "blobnet-small", "a_model:noisy"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(name, factories):
    before = torch.random.get_rng_state()
    first, again, other = (trainable(spec(name), seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers were disturbed"


@pytest.mark.parametrize("name", ["blobnet", "blobnet-small", "a_model:good"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_built_is_ready_to_answer(name, dtype, factories):
    module = built(spec(name), dtype)
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    probe(module, spec(name), device=CPU, dtype=dtype)


GAME, FREE = ARGUMENTS, {}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("blobnt", GAME, "Did you mean 'blobnet'"),
        ("no_such_module:make", GAME, "no module named 'no_such_module'"),
        ("broken_model:make", GAME, "a_package_that_is_not_there"),
        ("a_model:god", GAME, "Did you mean 'good'"),
        ("a_model:number", GAME, "not a function"),
        ("a_model:raises", GAME, "raised ValueError: no such layer"),
        ("a_model:no_module", GAME, "returned list"),
        ("a_model:greedy", GAME, "needs heads"),
        ("blobnet-small", FREE, "module:factory"),
        ("blobnet-small", {"actions": 90, "seats": 2}, "legal mask"),
        # answers to which a trial leads
        ("a_model:one_row", GAME, r"2 rows with \[2, 20\] and \[1, 4\]"),
        ("a_model:fixed_rows", GAME, r"3 rows with \[2, 20\] and \[2, 4\]"),
        ("a_model:swapped", GAME, r"Let it return policy logits \[2, 20\] and values \[2, 4\]"),
        ("a_model:alone", GAME, r"2 rows with \[2, 20\]\. "),
        ("a_model:words", GAME, "str among the answers"),
        ("a_model:nan", GAME, r"NaN in output 1 \[2, 4\]"),
        ("a_model:infinite", GAME, r"\+inf in output 0 \[2, 20\]"),
        ("a_model:narrow", GAME, r"given features \[2, 64\] of float32"),
        ("a_model:of_numbers", FREE, r"a dict in which 0 is a key.*\. Let it return tensors of 2 rows"),
        ("a_model:of_pairs", FREE, r"2 rows with tensor \[2\] a row and 3 rows with tensor \[3\]"),
    ],
)
def test_a_model_that_cannot_be_had_says_why_and_what_to_do(name, arguments, said, factories):
    one = spec(name, arguments=arguments)
    with pytest.raises(UsageError, match=said) as caught:
        probe(built(one), one, device=CPU, dtype=torch.float32)
    assert str(caught.value).endswith("."), "the cure is a sentence"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("a_model:of_one", AnswerLayout("tensor", ((4,),))),
        ("a_model:of_two", AnswerLayout("tuple", ((4, 5), (4,)))),
        ("a_model:of_names", AnswerLayout("dict", ((20,), ()), ("policy", "best"))),
        ("torch.nn:Identity", AnswerLayout("tensor", ((FEATURES,),))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_other_work_may_answer_any_tensors_of_the_same_rows(name, layout, dtype, factories):
    free = spec(name, arguments={})
    assert probe(built(free, dtype), free, device=CPU, dtype=dtype) == layout


# Weights


@pytest.mark.parametrize(
    ("file", "save"),
    [
        ("w.safetensors", save_file),
        ("w.pt", torch.save),
        ("w.pt", lambda state, path: torch.save({"state_dict": state, "epoch": 3}, path)),
    ],
)
def test_weights_are_used(file, save, tmp_path):
    torch.manual_seed(9)
    net, features = BlobNetSmall(FEATURES, ACTIONS, SEATS).eval(), positions(4)
    save(net.state_dict(), tmp_path / file)
    with torch.inference_mode():
        found = built(spec(weights=str(tmp_path / file)))(features)[1]
        torch.testing.assert_close(found, net(features)[1], atol=1e-5, rtol=0)


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code in the weights file was run')",))


def another_size(path):
    save_file(BlobNetSmall(FEATURES, ACTIONS + 3, SEATS).state_dict(), path)


def another_network(path):
    save_file(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).state_dict(), path)


@pytest.mark.parametrize(
    ("file", "write", "said"),
    [
        ("w.safetensors", lambda path: None, r"no weights file .*w\.safetensors\. Check the path"),
        ("w.safetensors", lambda path: path.write_bytes(b"not weights at all"), "cannot read weights"),
        ("w.pt", lambda path: path.write_bytes(b"not weights at all"), "cannot read weights"),
        ("w.pt", lambda path: torch.save(Evil(), path), "no plain tensors. Save"),
        ("w.pt", lambda path: torch.save([1, 2], path), "does not hold a state_dict"),
        ("w.safetensors", another_size, r"'policy.weight' is \[23, 128\] where it has"),
        ("w.safetensors", another_network, "'first.weight' .* is missing.* and 13 more"),
    ],
)
def test_weights_that_do_not_fit_say_where(file, write, said, tmp_path):
    write(tmp_path / file)
    with pytest.raises(UsageError, match=said):
        built(spec(weights=str(tmp_path / file)))


# Devices and number formats


def test_devices_and_number_formats_that_are_not_there():
    for name, error in (
        ("gpu", UnknownName),
        ("cuda:x", UnknownName),
        ("cuda:-1", UnknownName),
        ("cuda:99", UsageError),
    ):
        with pytest.raises(error, match=r"--device|Choices"):
            resolve_device(name)
    with pytest.raises(UnknownName, match="Did you mean 'float16'"):
        resolve_dtype("floats16")


def test_the_public_way_builds_the_same_module_from_what_a_run_says():
    module = models.build(spec(), device="cpu", dtype="float32", seed=3)
    for ours, theirs in zip(module(positions(5)), built(spec(), seed=3)(positions(5)), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(UsageError, match="is a model of text"):
        models.build(ModelSpec("tiny", kind="text"))
    assert title("numpy:zeros") == f"model 'numpy:zeros' (package numpy {np.__version__})"
