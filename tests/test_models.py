"""Networks, and how a model is found, built, loaded and tried out."""

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.models.device import resolve_device, resolve_dtype
from gpuinfer.models.load import build, probe, title, trainable
from gpuinfer.models.networks import Affine, BlobNet, BlobNetSmall, PackedAffine
from gpuinfer.models.row_format import AnswerLayout

CPU = torch.device("cpu")
FEATURES, ACTIONS, SEATS = 64, 20, 4
ARGUMENTS = {"actions": ACTIONS, "seats": SEATS}
NETWORKS = [pytest.param(BlobNet, id="blobnet"), pytest.param(BlobNetSmall, id="blobnet-small")]


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


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_reach_every_parameter_that_can_matter(network):
    net = network(FEATURES, ACTIONS, SEATS)
    policy, values = net(positions(8))
    (policy[policy.isfinite()].square().sum() + values.square().sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        gradient = parameter.grad[2 * 256 :] if "in_proj" in name else parameter.grad  # queries and keys cannot matter
        assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param(torch.float32, 1e-5, id="float32"), pytest.param(torch.bfloat16, 0.1, id="bfloat16")],
)
def test_the_frozen_form_answers_the_same(network, dtype, tolerance):
    torch.manual_seed(2)
    net = network(FEATURES, ACTIONS, SEATS).eval()
    features = positions(50)
    with torch.inference_mode():
        expected = net(features)
        found = net.freeze(device=CPU, dtype=dtype)(features.to(dtype))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, atol=tolerance, rtol=0)


def test_the_plain_and_the_packed_product_agree():
    weight, bias, inputs = torch.randn(24, 16), torch.randn(24), torch.randn(7, 16)
    residual = torch.randn(7, 24)
    best, plain = Affine.best(weight, bias, device=CPU, dtype=torch.float32), Affine(weight, bias)
    assert isinstance(best, PackedAffine) == torch.backends.mkldnn.is_available()
    torch.testing.assert_close(best(inputs), plain(inputs))
    torch.testing.assert_close(best.relu(inputs), plain(inputs).clamp(min=0))
    torch.testing.assert_close(best.plus(inputs, residual), plain(inputs) + residual)


@pytest.mark.parametrize("network", NETWORKS)
def test_illegal_actions_are_minus_infinity_and_a_row_without_legal_ones_stays_finite(network):
    net = network(FEATURES, ACTIONS, SEATS).eval()
    features = positions(5)
    features[2, :ACTIONS] = 0
    for form in (net, net.freeze(device=CPU, dtype=torch.float32)):
        with torch.inference_mode():
            policy, values = form(features)
        illegal = features[:, :ACTIONS] == 0
        illegal[2] = False
        assert torch.equal(policy.isneginf(), illegal)
        assert policy.softmax(1).isfinite().all()
        assert values.isfinite().all()


# Building


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

def good(features, actions, seats):
    return Net(features, actions, seats)

def noisy(**known):
    return Net(**known)

def raises(features):
    raise ValueError("no such layer")

def no_module(features):
    return [features]

def greedy(features, heads):
    return None

def one_row(features, actions, seats):
    return Net(features, actions, seats, lambda policy, value: (policy, value[:1]))

def fixed_rows(features, actions, seats):
    return Net(features, actions, seats, lambda policy, value: (policy[:2], value[:2]))

def swapped(features, actions, seats):
    return Net(features, actions, seats, lambda policy, value: (value, policy))

def alone(features, actions, seats):
    return Net(features, actions, seats, lambda policy, value: policy)

def words(features, actions, seats):
    return Net(features, actions, seats, lambda policy, value: (policy, "win"))

def nan(features, actions, seats):
    return Net(features, actions, seats, lambda policy, value: (policy, value * float("nan")))

def infinite(features, actions, seats):
    return Net(features, actions, seats, lambda policy, value: (policy + float("inf"), value))

def narrow(actions, seats):
    return Net(3, actions, seats)

def free(answer):
    return lambda features: Net(features, 20, 4, answer)

of_one = free(lambda policy, value: value)
of_two = free(lambda policy, value: [policy.unflatten(1, (4, 5)), value])
of_names = free(lambda policy, value: {"policy": policy, "best": value.max(1).values})
of_numbers = free(lambda policy, value: {0: policy, 1: value})
of_pairs = free(lambda policy, value: policy @ policy.T)

number = 3
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("blobnt", "Did you mean 'blobnet'", id="an unknown name"),
        pytest.param("no_such_module:make", "no module named 'no_such_module'", id="no such module"),
        pytest.param("broken_model:make", "a_package_that_is_not_there", id="a module whose import fails"),
        pytest.param("a_model:god", "Did you mean 'good'", id="no such factory"),
        pytest.param("a_model:number", "not a function", id="a factory that is a number"),
        pytest.param("a_model:raises", "raised ValueError: no such layer", id="a factory that raises"),
        pytest.param("a_model:no_module", "returned list", id="a factory that returns no module"),
        pytest.param("a_model:greedy", "needs heads", id="a factory that wants what nobody has"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(name, said, factories):
    with pytest.raises(UsageError, match=said) as caught:
        built(spec(name))
    assert str(caught.value).endswith("."), "the cure is a sentence"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("one_row", r"2 rows with \[2, 20\] and \[1, 4\]", id="too few rows"),
        pytest.param("fixed_rows", r"3 rows with \[2, 20\] and \[2, 4\]", id="rows that do not follow the batch"),
        pytest.param("swapped", r"Let it return policy logits \[2, 20\] and values \[2, 4\]", id="heads swapped"),
        pytest.param("alone", r"2 rows with \[2, 20\]\. ", id="one head missing"),
        pytest.param("words", "str among the answers", id="an answer that is no tensor"),
        pytest.param("nan", r"NaN in output 1 \[2, 4\]", id="NaN"),
        pytest.param("infinite", r"\+inf in output 0 \[2, 20\]", id="infinity"),
        pytest.param("narrow", r"given features \[2, 64\] of float32", id="a forward that raises"),
    ],
)
def test_a_model_with_wrong_answers_is_named_with_its_shapes(name, said, factories):
    one = spec(f"a_model:{name}")
    with pytest.raises(UsageError, match=said) as caught:
        probe(built(one), one, device=CPU, dtype=torch.float32)
    assert one.name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("a_model:of_one", AnswerLayout("tensor", ((4,),)), id="a tensor"),
        pytest.param("a_model:of_two", AnswerLayout("tuple", ((4, 5), (4,))), id="a list"),
        pytest.param("a_model:of_names", AnswerLayout("dict", ((20,), ()), ("policy", "best")), id="a dict"),
        pytest.param("torch.nn:Identity", AnswerLayout("tensor", ((FEATURES,),)), id="the features themselves"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_other_work_may_answer_any_tensors_of_the_same_rows(name, layout, dtype, factories):
    free = spec(name, arguments={})
    assert probe(built(free, dtype), free, device=CPU, dtype=dtype) == layout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("of_numbers", r"a dict in which 0 is a key.*\. Let it return tensors of 2 rows", id="no names"),
        pytest.param("of_pairs", r"2 rows with tensor \[2\] a row and 3 rows with tensor \[3\]", id="pairs of rows"),
    ],
)
def test_answers_that_cannot_be_laid_out_are_refused(name, said, factories):
    free = spec(f"a_model:{name}", arguments={})
    with pytest.raises(UsageError, match=said):
        probe(built(free), free, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"arguments": {}}, "module:factory", id="work that is no card game"),
        pytest.param({"inputs": 10}, "legal mask", id="fewer features than actions"),
    ],
)
def test_a_built_in_network_refuses_work_that_it_cannot_do(changes, said):
    with pytest.raises(UsageError, match=said):
        built(spec(**changes))


# Weights


def trained():
    torch.manual_seed(9)
    return BlobNetSmall(FEATURES, ACTIONS, SEATS).eval()


def save_torch(state, path):
    torch.save(state, path)


def save_wrapped(state, path):
    torch.save({"state_dict": state, "epoch": 3}, path)


@pytest.mark.parametrize(
    ("file", "save"),
    [
        pytest.param("w.safetensors", save_file, id="safetensors"),
        pytest.param("w.pt", save_torch, id="a torch file"),
        pytest.param("w.pt", save_wrapped, id="a torch checkpoint"),
    ],
)
def test_weights_are_used(file, save, tmp_path):
    net, features = trained(), positions(4)
    save(net.state_dict(), tmp_path / file)
    module = built(spec(weights=str(tmp_path / file)))
    with torch.inference_mode():
        torch.testing.assert_close(module(features)[1], net(features)[1], atol=1e-5, rtol=0)


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code in the weights file was run')",))


def absent(path):
    pass


def damaged(path):
    path.write_bytes(b"not weights at all")


def another_size(path):
    state = BlobNetSmall(FEATURES, ACTIONS + 3, SEATS).state_dict()
    save_file(state, path)


def another_network(path):
    save_file(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).state_dict(), path)


@pytest.mark.parametrize(
    ("file", "write", "said"),
    [
        pytest.param(
            "w.safetensors",
            absent,
            r"no weights file .*w\.safetensors\. Check the path that was given as weights\.$",
            id="absent",
        ),
        pytest.param("w.safetensors", damaged, "cannot read weights", id="a damaged safetensors file"),
        pytest.param("w.pt", damaged, "cannot read weights", id="a damaged torch file"),
        pytest.param("w.pt", lambda path: torch.save(Evil(), path), "no plain tensors. Save", id="code in it"),
        pytest.param("w.pt", lambda path: torch.save([1, 2], path), "does not hold a state_dict", id="no state_dict"),
        pytest.param("w.safetensors", another_size, r"'policy.weight' is \[23, 128\] where it has", id="other sizes"),
        pytest.param("w.safetensors", another_network, "'first.weight' .* is missing.* and 13 more", id="another net"),
    ],
)
def test_weights_that_do_not_fit_say_where(file, write, said, tmp_path):
    write(tmp_path / file)
    with pytest.raises(UsageError, match=said):
        built(spec(weights=str(tmp_path / file)))


# Devices and number formats


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param("gpu", UnknownName, id="no such kind"),
        pytest.param("cuda:x", UnknownName, id="no number"),
        pytest.param("cuda:-1", UnknownName, id="a negative number"),
        pytest.param("cuda:99", UsageError, id="a device that is not there"),
    ],
)
def test_devices_that_are_not_there(name, error):
    with pytest.raises(error, match=r"--device|Choices"):
        resolve_device(name)


def test_an_unknown_number_format_is_refused():
    with pytest.raises(UnknownName, match="Did you mean 'float16'"):
        resolve_dtype("floats16")


def test_the_public_way_builds_the_same_module_from_what_a_run_says():
    from gpuinfer import models

    module = models.build(spec(), device="cpu", dtype="float32", seed=3)
    for ours, theirs in zip(module(positions(5)), built(spec(), seed=3)(positions(5)), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(UsageError, match="is a model of text"):
        models.build(ModelSpec("tiny", kind="text"))


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        pytest.param("numpy:zeros", f" (package numpy {np.__version__})", id="of a package"),
        pytest.param("test_models:here", f" ({__file__})", id="of a file"),
        pytest.param("nowhere:at_all", "", id="that is not there"),
        pytest.param("blobnet", "", id="built in"),
    ],
)
def test_a_model_of_the_users_own_is_named_with_whose_it_is(name, owner):
    assert title(name) == f"model '{name}'{owner}"
